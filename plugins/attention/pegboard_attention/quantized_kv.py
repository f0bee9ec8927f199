"""The layout of a K/V cache of eight bits an element, with a scale for each token and head.

A page of one layer holds, all of them KV head by KV head:

- k (K, S, D), v (K, D, S): v is turned, so that the tokens that a matmul sums over lie side by side;
- k_scale, v_scale (K, S) float32: the number is scale times what the byte stands for.

"int8": uint8 bytes in offset binary, byte - 128, scale = max |x| / 127. "float8_e4m3fn": scale = max |x| / 448. Scales
are at least 2^-100, so that their logarithm is finite.
"""

from __future__ import annotations

from pegboard.contracts.attention import AttentionLayer, KVLayout
from pegboard.contracts.device import TensorSpec

#: kv_dtype -> dtype in which the bytes are stored
STORED = {"int8": "uint8", "float8_e4m3fn": "float8_e4m3fn"}


def quantized_layout(layer: AttentionLayer, page_size: int, kv_dtype: str) -> KVLayout:
    """Layout "hnd-int8" or "hnd-float8_e4m3fn"; KeyError for another kv_dtype."""
    heads, size, stored = layer.kv_heads, layer.head_size, STORED[kv_dtype]
    return KVLayout(
        name=f"hnd-{kv_dtype}",
        tensors=(
            TensorSpec(name="k", shape=(heads, page_size, size), dtype=stored),
            TensorSpec(name="v", shape=(heads, size, page_size), dtype=stored),
            TensorSpec(name="k_scale", shape=(heads, page_size), dtype="float32"),
            TensorSpec(name="v_scale", shape=(heads, page_size), dtype="float32"),
        ),
    )

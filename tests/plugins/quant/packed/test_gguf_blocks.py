"""Quantizer `blocks-cuda`: GGUF's blocks as the gguf package writes and reads them, and what it leaves dense."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("gguf")

from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.quantizer import LinearSpec, QuantizerNeed, Shard
from pegboard.testing.oracles.checkpoints import MemoryCheckpoint
from pegboard_quant.packed.blocks_quantizer import BlocksCudaQuantizer
from pegboard_quant.packed.gguf_blocks import KINDS, read_blocks_as_codes
from pegboard_quant.packed.weight import dense

CUDA = DeviceFacts(type="cuda", index=0, capability=(9, 0))


def blocks_of(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Blocks, and the weight that they mean."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    type_ = GGMLQuantizationType[kind]
    blocks = quantize(weight.numpy(), type_)
    return torch.from_numpy(blocks), torch.from_numpy(dequantize(blocks, type_))


def need(**changes: Any) -> QuantizerNeed:
    return QuantizerNeed(**{"device": CUDA, "dtype": "bfloat16", "storages": frozenset({"Q4_1", "F32"})} | changes)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("rows", "columns"), [(3, 32), (40, 96), (7, 1024)])
def test_blocks_mean_what_the_format_says(kind: str, rows: int, columns: int) -> None:
    """Bit for bit in float32."""
    blocks, meant = blocks_of(kind, rows, columns, seed=columns)
    assert torch.equal(dense(read_blocks_as_codes(blocks, KINDS[kind])), meant)


def test_every_code_and_sign() -> None:
    """Codes 0 to 15 in every place, scales and offsets of either sign and of none."""
    steps = torch.tensor([[0.5, -2.0], [-0.25, 0.125], [0.0, 3.0]], dtype=torch.float16)
    codes = torch.arange(48).view(3, 16) % 16
    halves = (codes | (15 - codes) << 4).to(torch.uint8)
    blocks = torch.cat([torch.cat((steps[row].view(torch.uint8), halves[row])) for row in range(3)]).view(3, 20)
    found = dense(read_blocks_as_codes(blocks, KINDS["Q4_1"]))
    expected = torch.cat((codes, 15 - codes), 1) * steps[:, :1].float() + steps[:, 1:].float()
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": DeviceFacts(type="cpu")}, "'blocks-cpu'"),
        ({"device": DeviceFacts(type="cuda", index=0, capability=(7, 5))}, "8.0 or more"),
        ({"dtype": "float32"}, "not float32"),
        ({"storages": frozenset({"Q6_K", "F32"})}, "stores F32, Q6_K"),
        ({"batch_invariant": True}, "bit for bit"),
        ({"scheme": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], words: str) -> None:
    assert not BlocksCudaQuantizer.refusals(need(), None)
    assert words in " ".join(BlocksCudaQuantizer.refusals(need(**changes), None))


def checkpoint_of(*kinds: str, columns: int = 96, **changes: Any) -> tuple[Any, LinearSpec, Tensor]:
    sources = [f"s{number}" for number in range(len(kinds))]
    made = [blocks_of(kind, 40, columns, seed=number) for number, kind in enumerate(kinds)]
    spec = LinearSpec(
        name="proj", sources=tuple(sources), in_features=columns, out_features=(40,) * len(kinds), **changes
    )
    names = [f"{source}.weight" for source in sources]
    checkpoint = MemoryCheckpoint(
        {name: meant for name, (_, meant) in zip(names, made, strict=True)},
        storages=dict(zip(names, kinds, strict=True)),
        blocks={name: blocks for name, (blocks, _) in zip(names, made, strict=True)},
    )
    return checkpoint, spec, torch.cat([meant for _, meant in made])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("rows", [1, 7, 64, 400])
def test_products_on_a_device(kind: str, rows: int) -> None:
    checkpoint, spec, meant = checkpoint_of(kind, kind, columns=608)
    made = BlocksCudaQuantizer.create(need(storages=frozenset({kind})), None)
    found = made.linear(spec, checkpoint, Shard())
    assert found.weight_bytes == made.bytes_for(spec, checkpoint.tensors(), Shard())
    x = torch.randn(rows, 608, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    expected = x.double() @ meant.double().T
    error = (found(x.cuda()).cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-2


@pytest.mark.gpu
def test_what_has_no_kernel_is_dense(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint, spec, meant = checkpoint_of("Q4_1", "Q8_0")
    made = BlocksCudaQuantizer.create(need(), None)
    with caplog.at_level(logging.WARNING, "pegboard"):
        found = made.linear(spec, checkpoint, Shard())
        made.linear(spec, checkpoint, Shard())
    assert [record.message for record in caplog.records] == [
        "proj is stored as Q4_1 and Q8_0, for which quantizer 'blocks-cuda' has no kernel: it is dequantised to "
        "bfloat16, and so are all such"
    ]
    assert found.weight is not None
    assert torch.equal(found.weight.cpu(), meant.to(torch.bfloat16))

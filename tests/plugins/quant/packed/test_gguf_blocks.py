"""Quantizer `blocks-cuda`: GGUF's blocks as the gguf package writes and reads them, and what it leaves dense.

Products run on a CUDA device, and on the CPU under Triton's interpreter (`test_under_the_interpreter`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("gguf")

from pegboard import CheckpointError, SamplingParams
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.quantizer import LinearSpec, QuantizerNeed, Shard
from pegboard.testing.oracles import gguf_blocks as written
from pegboard.testing.oracles.checkpoints import MemoryCheckpoint
from pegboard.testing.oracles.gguf_files import write_llama
from pegboard.testing.tiny import tiny_model
from pegboard_quant.int4.layout import TiledWeight, tile, untile
from pegboard_quant.options import BlocksCudaOptions
from pegboard_quant.packed.blocks_quantizer import BlocksCudaQuantizer
from pegboard_quant.packed.gguf_blocks import KINDS, read_blocks_as_codes
from pegboard_quant.packed.linear import GroupLinear
from pegboard_quant.packed.weight import dense

#: However small
ALL = BlocksCudaOptions(dense_below=0)
CUDA = DeviceFacts(type="cuda", index=0, capability=(9, 0))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
#: On a CUDA device, or under the interpreter.
RUNS = pytest.mark.skipif(False, reason="") if INTERPRETED else pytest.mark.gpu


def blocks_of(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Blocks, and the weight that they mean."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    blocks = written.quantized(weight, kind)
    return blocks, written.meant(blocks, kind)


def need(**changes: Any) -> QuantizerNeed:
    return QuantizerNeed(**{"device": CUDA, "dtype": "bfloat16", "storages": frozenset({"Q4_1", "F32"})} | changes)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize(("rows", "columns"), [(3, 32), (40, 96), (7, 1024)])
def test_blocks_mean_what_the_format_says(kind: str, rows: int, columns: int) -> None:
    """Bit for bit in float32."""
    blocks, meant = blocks_of(kind, rows, columns, seed=columns)
    assert torch.equal(dense(read_blocks_as_codes(blocks, KINDS[kind])), meant)


def exact_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale times code, and what is subtracted from it, float64 [O, I], by the definition of a block."""
    each = blocks.unflatten(1, (-1, 144))
    d, dmin = (each[..., at : at + 2].contiguous().view(torch.float16).double() for at in (0, 2))
    packed, codes = each[..., 4:16].long(), each[..., 16:].long()
    scaled, subtracted = [], []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[..., group] & 63, packed[..., group + 4] & 63
        else:
            scale = packed[..., group + 4] & 15 | packed[..., group - 4] >> 6 << 4
            minimum = packed[..., group + 4] >> 4 | packed[..., group] >> 6 << 4
        run = codes[..., 32 * (group // 2) : 32 * (group // 2) + 32] >> (4 * (group % 2)) & 15
        scaled.append(d * scale[..., None] * run)
        subtracted.append((dmin * minimum[..., None]).expand(run.shape))
    return torch.cat(scaled, -1).flatten(1), torch.cat(subtracted, -1).flatten(1)


@pytest.mark.parametrize("made", ["random", "rounded"])
@pytest.mark.parametrize(("rows", "columns"), [(3, 256), (24, 768)])
def test_q4_k_loses_what_rounding_two_numbers_a_group_to_float16_loses(made: str, rows: int, columns: int) -> None:
    """Each of both is off by 2^-11 of itself at most: the products of 11 and 6 bits have no more than 17."""
    blocks = written.random_blocks("Q4_K", rows, columns) if made == "random" else blocks_of("Q4_K", rows, columns)[0]
    scaled, subtracted = exact_q4_k(blocks)
    torch.testing.assert_close((scaled - subtracted).float(), written.meant(blocks, "Q4_K"), rtol=0, atol=1e-6)
    held = read_blocks_as_codes(blocks, KINDS["Q4_K"])
    error = (dense(held, torch.float64) - (scaled - subtracted)).abs()
    # Below float16's normal numbers steps are 2^-24; fifteen of them at most, and one offset
    assert (error <= 2.0**-11 * (scaled.abs() + subtracted.abs()) + 16 * 2.0**-25).all()
    assert error.max() > 0
    assert held.scales.dtype == torch.float16


def test_q4_k_without_rounding_is_exact() -> None:
    """Factors that are powers of two need no rounding; every code is in every place."""
    blocks = torch.zeros(16, 2, 144, dtype=torch.uint8)
    blocks[..., :4] = torch.tensor([0.25, -0.5], dtype=torch.float16).view(torch.uint8)
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 0, 1], dtype=torch.uint8)
    blocks[..., 4:8] = powers[:4] | powers[4:] >> 4 << 6
    blocks[..., 8:12] = powers.flip(0)[:4] | powers.flip(0)[4:] >> 4 << 6
    blocks[..., 12:16] = powers[4:] & 15 | (powers.flip(0)[4:] & 15) << 4
    codes = (torch.arange(128) + torch.arange(16)[:, None]) % 16
    blocks[..., 16:] = (codes | (15 - codes) << 4).to(torch.uint8)[:, None]
    blocks = blocks.flatten(1)
    assert torch.equal(dense(read_blocks_as_codes(blocks, KINDS["Q4_K"])), written.meant(blocks, "Q4_K"))


def test_scales_beyond_float16_are_refused() -> None:
    checkpoint, spec, _ = checkpoint_of("Q4_K", columns=256)
    blocks = checkpoint.blocks["s0.weight"]
    blocks[:, :2] = torch.tensor([60000.0], dtype=torch.float16).view(torch.uint8)
    blocks[:, 4] = 2
    with pytest.raises(CheckpointError, match=r"scale or an offset of 3\.7.*e\+06, and float16 ends at 65504"):
        read_blocks_as_codes(blocks | torch.tensor([0] * 4 + [63] * 12 + [0] * 128, dtype=torch.uint8), KINDS["Q4_K"])
    made = BlocksCudaQuantizer.create(need(device=DeviceFacts(type="cpu")), ALL)
    with pytest.raises(CheckpointError, match=r"proj: .* quantizer 'none'"):
        made.linear(spec, checkpoint, Shard())


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
    assert not BlocksCudaQuantizer.refusals(need(), ALL)
    assert words in " ".join(BlocksCudaQuantizer.refusals(need(**changes), ALL))


def checkpoint_of(*kinds: str, columns: int = 96, **changes: Any) -> tuple[Any, LinearSpec, Tensor]:
    sources = [f"s{number}" for number in range(len(kinds))]
    made = [blocks_of(kind, 40, columns, seed=number) for number, kind in enumerate(kinds)]
    biases = {f"{source}.bias": torch.randn(40) for source in sources} if changes.get("bias") else {}
    spec = LinearSpec(
        name="proj", sources=tuple(sources), in_features=columns, out_features=(40,) * len(kinds), **changes
    )
    names = [f"{source}.weight" for source in sources]
    checkpoint = MemoryCheckpoint(
        {name: meant for name, (_, meant) in zip(names, made, strict=True)} | biases,
        storages=dict(zip(names, kinds, strict=True)),
        blocks={name: blocks for name, (blocks, _) in zip(names, made, strict=True)},
    )
    return checkpoint, spec, torch.cat([meant for _, meant in made])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("rows", [1, 7, 64, 400])
def test_products_on_a_device(kind: str, rows: int) -> None:
    checkpoint, spec, meant = checkpoint_of(kind, kind, columns=1024 if kind == "Q4_K" else 608)
    made = BlocksCudaQuantizer.create(need(storages=frozenset({kind})), ALL)
    found = made.linear(spec, checkpoint, Shard())
    assert found.weight_bytes == made.bytes_for(spec, checkpoint.tensors(), Shard())
    x = torch.randn(rows, spec.in_features, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    expected = x.double() @ meant.double().T
    error = (found(x.cuda()).cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-2


@RUNS
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_products_are_those_of_the_blocks(kind: str, rows: int) -> None:
    from pegboard_quant.int4.launching import Int4Launcher

    blocks, meant = blocks_of(kind, 72, 512, seed=rows)
    weight = tile(read_blocks_as_codes(blocks.to(DEVICE), KINDS[kind]))
    capability = torch.cuda.get_device_capability() if DEVICE == "cuda" else (8, 0)
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).half()
    out = torch.empty(rows, 72, dtype=torch.float16, device=DEVICE)
    Int4Launcher(capability, interpreted=INTERPRETED).multiply(x.to(DEVICE), weight, None, out)
    expected = x.double() @ meant.double().T
    assert (out.cpu().double() - expected).abs().max() / expected.abs().max() < 2e-3


@pytest.mark.skipif(INTERPRETED, reason="runs the tests under the interpreter")
def test_under_the_interpreter(run_interpreted: Callable[[Path], str]) -> None:
    assert "passed" in run_interpreted(Path(__file__))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("kinds", "columns", "pieces"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), 512, ["Q4_K", None]),
        (("Q4_K", "Q6_K", "Q4_1"), 512, ["Q4_K", None, "Q4_1"]),
        (("Q4_0", "Q4_K"), 288, ["Q4_0", None]),
        (("Q4_0", "Q4_1", "Q4_1"), 96, ["Q4_0", "Q4_1"]),
    ],
    ids=str,
)
def test_sources_of_several_types_stay_apart(
    kinds: tuple[str, ...], columns: int, pieces: list[str | None], tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Their order in the result is that of the sources; only what has no kernel is dense, and named."""
    blocked = [kind if columns % written.block_size(kind)[0] == 0 else "F32" for kind in kinds]
    checkpoint, spec, meant = checkpoint_of(*blocked, columns=columns, tied=tied, bias=True)
    checkpoint.storages |= {f"s{at}.weight": kind for at, kind in enumerate(kinds)}
    made = BlocksCudaQuantizer.create(need(device=DeviceFacts(type="cpu"), dtype="float32"), ALL)
    with caplog.at_level(logging.WARNING, "pegboard"):
        found = made.linear(spec, checkpoint, Shard())
    assert isinstance(found, GroupLinear)
    rows = [40 * len(list(run)) for _, run in groupby(blocked)]
    assert [piece.shape[0] for piece in found.pieces] == rows
    assert [isinstance(piece, TiledWeight) for piece in found.pieces] == [kind is not None for kind in pieces]
    held = [dense(untile(piece)) if isinstance(piece, TiledWeight) else piece for piece in found.pieces]
    torch.testing.assert_close(torch.cat(held), meant, rtol=0, atol=2.0**-8)
    table = 40 * len(kinds) * columns * 4 if tied else 0
    assert found.weight_bytes + table == made.bytes_for(spec, checkpoint.tensors(), Shard())
    left = sorted({kind for kind, block in zip(kinds, blocked, strict=True) if block not in KINDS})
    assert [record.args[1] for record in caplog.records if record.args] == left


@pytest.mark.gpu
def test_a_dense_source_beside_packed_ones_on_a_device() -> None:
    checkpoint, spec, meant = checkpoint_of("Q4_K", "Q4_K", "Q6_K", columns=768, bias=True)
    made = BlocksCudaQuantizer.create(need(storages=frozenset({"Q4_K", "Q6_K"})), ALL)
    found = made.linear(spec, checkpoint, Shard())
    assert found.weight is None
    assert found.weight_bytes == made.bytes_for(spec, checkpoint.tensors(), Shard())
    bias = torch.cat([checkpoint.stored[f"s{at}.bias"] for at in range(3)])
    for rows in (1, 3, 64, 400):
        x = torch.randn(rows, 768, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
        expected = x.double() @ meant.double().T + bias.double()
        error = (found(x.cuda()).cpu().double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-2


@pytest.mark.gpu
def test_an_engine_on_a_q4_k_m_file(make_engine: Callable[..., Any], tmp_path: Path) -> None:
    """`auto` takes it; log probabilities of a prompt are those of the dense weights but for 16-bit arithmetic."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    folder = tiny_model(tmp_path / "hf", std=0.05, num_hidden_layers=4, **sizes)
    path = write_llama(folder, tmp_path / "m.gguf", "Q4_K_M")
    prompt, scored = [1, 17, 42, 200, 3, 99, 99, 140, 7, 56, 23], SamplingParams(max_tokens=1, prompt_logprobs=0)

    def logprobs(**settings: Any) -> tuple[Any, Tensor]:
        engine = make_engine(path, device="cuda", dtype="bfloat16", max_length=64, **settings)
        output = engine.generate([prompt], scored)[0].raise_for_error()
        return engine.plan, torch.tensor([record.logprob for record in output.prompt_logprobs])

    plan, found = logprobs(objective="memory")
    dense_plan, expected = logprobs(quantizer="none")
    assert plan.parts["quantizer"].name == "blocks-cuda"
    assert plan.memory.weights < dense_plan.memory.weights
    assert (found - expected).norm() / (expected - expected.mean()).norm() < 0.15


@pytest.mark.parametrize(
    ("objective", "below", "packed"),
    [("throughput", None, False), ("memory", None, True), ("memory", 4000, False), ("latency", 3840, True)],
)
def test_small_linears_are_dense(
    objective: str, below: int | None, packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Where dense products are faster, unless memory is what counts, or an option says so; without a warning."""
    checkpoint, spec, meant = checkpoint_of("Q4_1", columns=96)
    asked = need(device=DeviceFacts(type="cpu"), dtype="float32", objective=objective)
    made = BlocksCudaQuantizer.create(asked, BlocksCudaOptions(dense_below=below))
    with caplog.at_level(logging.WARNING, "pegboard"):
        found = made.linear(spec, checkpoint, Shard())
    assert isinstance(found, GroupLinear) == packed
    assert found.weight_bytes == made.bytes_for(spec, checkpoint.tensors(), Shard())
    assert packed or torch.equal(found(torch.eye(96)).T, meant)
    assert not caplog.records


def test_the_report_says_what_is_small() -> None:
    [plain] = BlocksCudaQuantizer.create(need(), BlocksCudaOptions()).notes()
    assert "others become dense, and so do linears of fewer than 8,388,608 weights" in plain
    [all_kept] = BlocksCudaQuantizer.create(need(objective="memory"), BlocksCudaOptions()).notes()
    assert all_kept.endswith("others become dense")


def test_the_report_says_what_is_rounded() -> None:
    [exact] = BlocksCudaQuantizer.create(need(), ALL).notes()
    [rounded] = BlocksCudaQuantizer.create(need(storages=frozenset({"Q4_1", "Q4_K", "Q6_K"})), ALL).notes()
    assert "blocks of Q4_1 stay packed" in exact
    assert "rounded" not in exact
    assert "blocks of Q4_1 and Q4_K stay packed" in rounded
    assert "Q4_K are rounded to float16" in rounded


@pytest.mark.gpu
def test_what_has_no_kernel_is_dense(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint, spec, meant = checkpoint_of("Q5_0", "Q8_0")
    made = BlocksCudaQuantizer.create(need(), ALL)
    with caplog.at_level(logging.WARNING, "pegboard"):
        found = made.linear(spec, checkpoint, Shard())
        made.linear(spec, checkpoint, Shard())
    assert [record.message for record in caplog.records] == [
        "proj holds Q5_0 and Q8_0 in 96 columns, for which quantizer 'blocks-cuda' has no kernel: they are "
        "dequantised to bfloat16, and so are all such"
    ]
    assert found.weight is not None
    assert torch.equal(found.weight.cpu(), meant.to(torch.bfloat16))

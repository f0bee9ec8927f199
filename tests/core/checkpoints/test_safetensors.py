from __future__ import annotations

import gc
import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from pegboard.checkpoints.safetensors import SafetensorsCheckpoint
from pegboard.checkpoints.safetensors_header import DTYPES
from pegboard.errors import CheckpointError

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4}


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))


def write_single(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    write_config(folder)
    save_file(tensors, folder / name)
    return folder / name


def write_raw(folder: Path, header: object, data: bytes = b"") -> Path:
    write_config(folder)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None = None) -> None:
    write_config(folder)
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    index = index or {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def random_tensor(dtype: torch.dtype) -> torch.Tensor:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (3 * 5 * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(3, 5)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    original = random_tensor(dtype)
    write_single(tmp_path, {"a": torch.zeros(1, dtype=torch.uint8), "w": original, "z": torch.zeros(2)})
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    read = checkpoint.read("w")
    assert read.dtype == dtype
    assert read.shape == (3, 5)
    assert torch.equal(read.contiguous().view(torch.uint8), original.view(torch.uint8))
    assert checkpoint.tensors()["w"].storage == str(dtype).removeprefix("torch.")
    assert checkpoint.tensors()["w"].nbytes == 15 * dtype.itemsize


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_narrowing_and_conversion(tmp_path: Path, dim: int) -> None:
    original = torch.randn(6, 8).to(torch.bfloat16)
    write_single(tmp_path, {"w": original})
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    part = checkpoint.read("w", dtype="float32", dim=dim, start=2, length=3)
    assert torch.equal(part, original.narrow(dim, 2, 3).float())
    assert torch.equal(checkpoint.read("w", dim=dim, start=4), original.narrow(dim, 4, original.shape[dim] - 4))


def test_unconverted_reads_share_the_mapped_memory(tmp_path: Path) -> None:
    write_single(tmp_path, {"w": torch.randn(6, 8)})
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    whole, part = checkpoint.read("w"), checkpoint.read("w", dim=1, start=3, length=2)
    assert part.data_ptr() == whole.data_ptr() + 3 * 4
    assert checkpoint.read("w").data_ptr() == whole.data_ptr()


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    write_single(tmp_path, {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)})
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    assert checkpoint.read("scalar").item() == 3.5
    assert checkpoint.read("empty").shape == (0, 4)
    with pytest.raises(CheckpointError, match="scalar"):
        checkpoint.read("scalar", start=1)


@pytest.mark.parametrize(
    "arguments",
    [{"start": 4}, {"start": -1}, {"length": 4}, {"start": 2, "length": 2}, {"dim": 2}, {"length": -1}],
    ids=str,
)
def test_ranges_outside_are_refused(tmp_path: Path, arguments: dict[str, int]) -> None:
    write_single(tmp_path, {"w": torch.randn(3, 2)})
    with pytest.raises(CheckpointError, match="tensor w of shape"):
        SafetensorsCheckpoint.open(tmp_path).read("w", **arguments)


def test_an_unknown_name_or_dtype_says_what_would_be_right(tmp_path: Path) -> None:
    write_single(tmp_path, {"model.norm.weight": torch.ones(2)})
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"nearest names are model\.norm\.weight"):
        checkpoint.read("model.norm.wieght")
    with pytest.raises(CheckpointError, match="not a torch dtype"):
        checkpoint.read("model.norm.weight", dtype="float31")


def open_files() -> list[str]:
    return [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]


def test_close_unmaps_and_leaves_living_views_alone(tmp_path: Path) -> None:
    path = str(write_single(tmp_path, {"w": torch.arange(1000.0)}))
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    view = checkpoint.read("w", start=10, length=5)
    assert path in maps.read_text()
    assert path in open_files()
    checkpoint.close()
    checkpoint.close()
    assert view.tolist() == [10, 11, 12, 13, 14]
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("w")
    del view
    gc.collect()
    assert path not in maps.read_text()
    assert path not in open_files()


def test_a_refused_checkpoint_leaves_nothing_open(tmp_path: Path) -> None:
    shards = {"a.safetensors": {"x": torch.ones(1)}, "b.safetensors": {"y": torch.ones(1)}}
    write_shards(tmp_path, shards, {"x": "a.safetensors", "z": "b.safetensors"})
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    with pytest.raises(CheckpointError):
        SafetensorsCheckpoint.open(tmp_path)
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_write_into_a_view_never_reaches_the_file(tmp_path: Path) -> None:
    path = write_single(tmp_path, {"w": torch.zeros(4)})
    before = path.read_bytes()
    SafetensorsCheckpoint.open(tmp_path).read("w").fill_(1.0)
    assert path.read_bytes() == before


def test_a_misaligned_file_is_read(tmp_path: Path) -> None:
    values = torch.randn(4)
    header = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    for pad in range(4):
        write_raw(tmp_path, json.dumps(header).encode() + b" " * pad, values.numpy().tobytes())
        assert torch.equal(SafetensorsCheckpoint.open(tmp_path).read("w"), values)


def test_shards(tmp_path: Path) -> None:
    first, second = {"a": torch.randn(2), "b": torch.randn(3)}, {"c": torch.randn(4)}
    write_shards(tmp_path, {"m-1.safetensors": first, "m-2.safetensors": second})
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        checkpoint = SafetensorsCheckpoint.open(path)
        for name, wanted in (first | second).items():
            assert torch.equal(checkpoint.read(name), wanted)


def test_the_index_decides_what_belongs_to_the_model(tmp_path: Path) -> None:
    write_shards(tmp_path, {"m.safetensors": {"a": torch.ones(1), "extra": torch.ones(1)}}, {"a": "m.safetensors"})
    assert set(SafetensorsCheckpoint.open(tmp_path).tensors()) == {"a"}


def test_faults_of_shards(tmp_path: Path) -> None:
    shards = {"m-1.safetensors": {"a": torch.ones(1)}, "m-2.safetensors": {"b": torch.ones(1)}}
    write_shards(tmp_path, shards, {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"shards lack: c \(in m-2"):
        SafetensorsCheckpoint.open(tmp_path)
    write_shards(tmp_path, shards, {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"b \(in m-1"):
        SafetensorsCheckpoint.open(tmp_path)
    write_shards(tmp_path, {**shards, "m-2.safetensors": {"a": torch.ones(1), "b": torch.ones(1)}})
    write_shards(tmp_path, {"m-1.safetensors": {"a": torch.ones(1)}}, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    with pytest.raises(CheckpointError, match="'a' is in two shards"):
        SafetensorsCheckpoint.open(tmp_path)
    (tmp_path / "m-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 shards: m-2\.safetensors"):
        SafetensorsCheckpoint.open(tmp_path)
    write_shards(tmp_path, {}, {"a": "../elsewhere.safetensors"})
    with pytest.raises(CheckpointError, match="beside its index"):
        SafetensorsCheckpoint.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        SafetensorsCheckpoint.open(tmp_path)


def test_folders_that_hold_no_safetensors_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        SafetensorsCheckpoint.open(tmp_path / "nowhere")
    write_config(tmp_path)
    with pytest.raises(CheckpointError, match="no safetensors file"):
        SafetensorsCheckpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=r"pickle .*never loaded.* convert them to safetensors"):
        SafetensorsCheckpoint.open(tmp_path)
    for name in ("a", "b"):
        save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files but neither"):
        SafetensorsCheckpoint.open(tmp_path)


def test_a_lone_file_of_any_name_is_found(tmp_path: Path) -> None:
    path = write_single(tmp_path, {"w": torch.ones(2)}, "weights.safetensors")
    for given_path in (path, tmp_path):
        assert SafetensorsCheckpoint.recognises(given_path)
        assert SafetensorsCheckpoint.open(given_path).read("w").tolist() == [1, 1]
    assert not SafetensorsCheckpoint.recognises(tmp_path / "model.gguf")


@pytest.mark.parametrize("text", [None, "{", "[1]", "\xff"])
def test_a_bad_config_is_named(tmp_path: Path, text: str | None) -> None:
    write_single(tmp_path, {"w": torch.ones(2)})
    if text is None:
        (tmp_path / "config.json").unlink()
    else:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        SafetensorsCheckpoint.open(tmp_path)


def test_config_generation_and_tokenizer_files(tmp_path: Path) -> None:
    write_single(tmp_path, {"w": torch.ones(2)})
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    assert checkpoint.config == CONFIG
    assert checkpoint.generation == {}
    assert checkpoint.tokenizer.tokenizer_json is None
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<old>", "eos_token": "</s>"}')
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "chat_template": "in config"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    assert checkpoint.generation == {"eos_token_id": [1, 2]}
    assert checkpoint.tokenizer.tokenizer_json == tmp_path / "tokenizer.json"
    assert checkpoint.tokenizer.config == {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "in config"}
    (tmp_path / "chat_template.jinja").write_text("in a file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert checkpoint.tokenizer.config["chat_template"] == [
        {"name": "default", "template": "in a file"},
        {"name": "tool_use", "template": "with tools"},
    ]


def entry(begin: int, end: int, dtype: object = "U8", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100000, "not valid JSON"),
        (b'{"a": {}, "a": {}}', "'a' appears twice"),
        ([], "not a JSON object"),
        ({"a": 1}, "no dtype, shape and data_offsets"),
        ({"a": entry(0, 4, "Q9")}, "dtype 'Q9'; supported: F64"),
        ({"a": entry(0, 4, ["U8"])}, "dtype"),
        ({"a": entry(0, 4, shape=[-4])}, "shape"),
        ({"a": entry(0, 4, shape=[2.0, 2])}, "shape"),
        ({"a": entry(0, 0, shape=[0, 1 << 70])}, "shape"),
        ({"a": entry(0, 4, shape=[5])}, "takes 5 bytes"),
        ({"a": entry(0, 4, "F32", [1, 2])}, "takes 8 bytes"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}}, "data_offsets"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, True]}}, "data_offsets"),
        ({"a": entry(0, 5), "b": entry(4, 8)}, "'b' overlaps tensor 'a'"),
        ({"a": entry(0, 3), "b": entry(4, 8)}, "'b' leaves a gap after tensor 'a'"),
        ({"a": entry(0, 9)}, "truncated"),
        ({"a": entry(0, 7)}, "1 bytes follow"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: object, message: str) -> None:
    write_raw(tmp_path, header, b"12345678")
    with pytest.raises(CheckpointError, match=message):
        SafetensorsCheckpoint.open(tmp_path)


def test_a_header_that_would_be_too_large(tmp_path: Path) -> None:
    path = write_single(tmp_path, {"w": torch.ones(2)})
    path.write_bytes(struct.pack("<Q", 1 << 63) + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="the format allows 100000000"):
        SafetensorsCheckpoint.open(tmp_path)


def test_a_pointer_to_the_file_is_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"Git LFS pointer.*git lfs pull"):
        SafetensorsCheckpoint.open(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool])
def test_whole_numbers_are_no_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    write_single(tmp_path, {"a": torch.ones(2, 3, dtype=dtype), "b": torch.ones(2)})
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"a holds whole numbers .*quantization_config"):
        checkpoint.read("a", dtype="float32")
    assert checkpoint.read("a").dtype == dtype
    checkpoint.close()


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_single(tmp_path, {"a": torch.randn(3, 2), "b": torch.randn(5).half()})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            SafetensorsCheckpoint.open(tmp_path)


@settings(max_examples=100 * (1 + 20 * int(os.environ.get("PEGBOARD_FULL", "0"))), deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_are_refused_or_read_but_never_crash(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("changed")
    write_config(folder)
    content = bytearray(save({"a": torch.ones(3, 2), "b": torch.ones(5, dtype=torch.int16)}))
    for at, value in changes:
        content[at % len(content)] = value
    (folder / "model.safetensors").write_bytes(content)
    try:
        checkpoint = SafetensorsCheckpoint.open(folder)
    except CheckpointError:
        return
    for name, info in checkpoint.tensors().items():
        assert checkpoint.read(name).shape == info.shape

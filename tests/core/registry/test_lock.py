"""A lock says what a config may run with, and an engine that requires it runs with nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pegboard import ConfigError, Engine, Part, Registry, hookimpl, load_config
from pegboard.assembly import assemble, restore
from pegboard.cli.main import main
from pegboard.config import check_config
from pegboard.registry.digests import digest_of
from pegboard.registry.lock import lock_problems, lock_text, make_lock, read_lock

MANIFEST = """
from pegboard import Part, hookimpl

@hookimpl
def pegboard_parts():
    return [Part(role="observer", name="{part}", factory="{package}.parts:Quiet", summary="Says nothing")]
"""
PARTS = """
from pegboard.contracts.observer import Observer

class Quiet(Observer):
    @classmethod
    def refusals(cls, need, options):
        return []
"""
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


class Site:
    """A folder of installed distributions, as an installer leaves them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def install(self, name: str, version: str = "1.0", *, editable: Path | None = None) -> Path:
        """The folder of its package. With `editable` the package lies there, and only metadata here."""
        package = f"{name.replace('-', '_')}_lockable"
        code = (editable or self.folder) / package
        files = {
            f"{package}/__init__.py": MANIFEST.format(part=name, package=package),
            f"{package}/parts.py": PARTS,
            f"{package}/data.txt": "one",
        }
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        metadata_files = {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{info}/entry_points.txt": f"[pegboard]\n{name} = {package}\n",
            f"{info}/INSTALLER": "pip\n",
        }
        if editable:
            metadata_files[f"{info}/direct_url.json"] = json.dumps({"dir_info": {"editable": True}, "url": "file:///x"})
            for path, text in files.items():
                write(editable / path, text)
            recorded = metadata_files
        else:
            recorded = files | metadata_files
        for path, text in recorded.items():
            write(self.folder / path, text)
        rows = [*(f"{path},{record_hash(text)},{len(text)}" for path, text in recorded.items()), f"{info}/RECORD,,"]
        rows += [f"../../bin/{name},,", f"{package}/__pycache__/parts.cpython-311.pyc,,"]
        write(self.folder / info / "RECORD", "\n".join(rows))
        return code

    def remove(self, name: str, version: str = "1.0") -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        for file in info.iterdir():
            file.unlink()
        info.rmdir()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def record_hash(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(made.folder))
    yield made
    for name in [name for name in sys.modules if "_lockable" in name]:
        del sys.modules[name]


@pytest.fixture
def problems(tmp_path: Path) -> Callable[..., str]:
    """problems(**config): lock what is there if it is not locked yet, and say how what is there now differs from it."""
    file = tmp_path / "pegboard.lock"

    def find(**fields: Any) -> str:
        plugins = {**fields.pop("plugins", {}), "lock": file}
        config = load_config({"model": "m", "plugins": plugins, **fields})
        if not file.exists():
            file.write_text(lock_text(make_lock(Registry.discover(), config)))
        return "\n".join(lock_problems(config, Registry.discover()))

    return find


def test_a_lock_names_what_the_config_may_use(site: Site) -> None:
    """Pegboard itself, what is named, and what `auto` may choose from; nothing else that is installed."""
    for name in ("named", "Allowed_One", "other"):
        site.install(name)
    registry = Registry.discover()
    config = load_config({"model": "m", "observers": ["named"], "plugins": {"allow": ["allowed-one"]}})
    lock = make_lock(registry, config)
    assert [found.name for found in lock.distributions] == ["allowed-one", "named", "pegboard"]
    named = lock.distributions[1]
    assert (named.version, named.editable, named.contracts) == ("1.0", False, {"observer": 1})
    assert lock.contracts["scheduler"] == 1
    everything = {found.name for found in make_lock(registry).distributions}
    assert {"allowed-one", "named", "other", "pegboard"} <= everything


def test_the_file_says_all_of_it(site: Site, tmp_path: Path) -> None:
    site.install("named")
    lock = make_lock(Registry.discover())
    file = tmp_path / "pegboard.lock"
    file.write_text(lock_text(lock))
    assert read_lock(file) == lock


def test_what_is_locked_has_no_problems(site: Site, problems: Callable[..., str]) -> None:
    site.install("named")
    assert problems(observers=["named"]) == ""
    assert problems(observers=["named"]) == ""


def test_another_version_is_refused(site: Site, problems: Callable[..., str]) -> None:
    site.install("named")
    assert problems(observers=["named"]) == ""
    site.remove("named")
    site.install("named", "1.1")
    said = problems(observers=["named"])
    assert "distribution named: version 1.0 is locked, 1.1 is installed: install 1.0" in said
    assert "`pegboard plugins lock`" in said


@pytest.mark.parametrize("change", ["edit", "delete", "data"])
def test_another_content_of_the_same_version_is_refused(site: Site, problems: Callable[..., str], change: str) -> None:
    package = site.install("named")
    assert problems(observers=["named"]) == ""
    if change == "edit":  # RECORD still says what was installed
        (package / "parts.py").write_text(PARTS + "# changed\n")
    elif change == "delete":
        (package / "parts.py").unlink()
    else:
        (package / "data.txt").write_text("two")
    said = problems(observers=["named"])
    assert "distribution named 1.0: its files have changed (locked sha256:" in said
    assert "found sha256:" in said
    assert "reinstall what was locked" in said


def test_what_the_place_adds_does_not_matter(site: Site, problems: Callable[..., str]) -> None:
    """Bytecode, scripts, and who installed it from where: the same wheel has one digest everywhere."""
    package = site.install("named")
    assert problems(observers=["named"]) == ""
    write(package / "__pycache__" / "parts.cpython-311.pyc", "bytes")
    info = site.folder / "named-1.0.dist-info"
    (info / "INSTALLER").write_text("another")
    (info / "direct_url.json").write_text('{"url": "file:///wheel", "archive_info": {}}')
    assert problems(observers=["named"]) == ""


def test_of_an_editable_install_the_packages_count(site: Site, problems: Callable[..., str], tmp_path: Path) -> None:
    """As they are now, files that RECORD knows nothing of included."""
    source = tmp_path / "source"
    source.mkdir()
    sys.path.insert(0, str(source))
    try:
        package = site.install("named", editable=source)
        assert problems(observers=["named"]) == ""
        write(package / "__pycache__" / "x.pyc", "bytes")
        write(source / "tests" / "test_it.py", "")
        assert problems(observers=["named"]) == ""
        write(package / "new.py", "")
        assert "its files have changed" in problems(observers=["named"])
    finally:
        sys.path.remove(str(source))


def test_an_editable_install_is_not_the_wheel(site: Site, problems: Callable[..., str], tmp_path: Path) -> None:
    site.install("named")
    assert problems(observers=["named"]) == ""
    site.remove("named")
    site.install("named", editable=site.folder)
    assert "an installed distribution is locked, this is an editable install" in problems(observers=["named"])


def test_pegboard_itself_is_locked(problems: Callable[..., str], tmp_path: Path) -> None:
    assert problems() == ""
    file = tmp_path / "pegboard.lock"
    locked = metadata.version("pegboard")
    file.write_text(file.read_text().replace(f'version = "{locked}"', 'version = "0.0.1"'))
    assert f"distribution pegboard: version 0.0.1 is locked, {locked} is installed" in problems()


def test_a_distribution_that_the_lock_lacks_is_refused(site: Site, problems: Callable[..., str]) -> None:
    assert problems() == ""
    site.install("named")
    assert problems() == ""  # installed, and no matter of this config
    assert "may use distribution named, which" in problems(observers=["named"])
    assert "may use distribution named, which" in problems(plugins={"allow": ["named"]})


def test_other_contract_versions_are_refused(site: Site, problems: Callable[..., str], tmp_path: Path) -> None:
    site.install("named")
    assert problems(observers=["named"]) == ""
    file = tmp_path / "pegboard.lock"
    text = file.read_text()
    file.write_text(text.replace("\nsampler = 1\n", "\nsampler = 0\n"))
    assert "for version 0 of the sampler contract, this pegboard speaks 1" in problems(observers=["named"])
    file.write_text(text.replace("contracts = { observer = 1 }", "contracts = { observer = 2 }"))
    assert "contracts {'observer': 2} are locked, {'observer': 1} are offered" in problems(observers=["named"])


def test_objects_cannot_be_locked(problems: Callable[..., str], tmp_path: Path) -> None:
    assert problems() == ""

    class Plugin:
        @hookimpl
        def pegboard_parts(self) -> list[Part]:
            return [Part(role="observer", name="mine", factory=Plugin, summary="An object")]

    config = load_config({"model": "m", "plugins": {"lock": tmp_path / "pegboard.lock"}})
    (said,) = lock_problems(config, Registry.discover([Plugin()]))
    assert "observer 'mine', and objects can't be locked" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "can't be read"),
        ("nonsense", "can't be read"),
        ("format = 1\n[contracts]\nattention = 1\n", "missing required field `distribution`"),
        ("format = 1\nextra = 1\ndistribution = []\n[contracts]\n", "unknown field `extra`"),
        ("format = 9\ndistribution = []\n[contracts]\n", "has format 9, this pegboard reads 1"),
    ],
)
def test_a_file_that_is_no_lock_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "pegboard.lock"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_lock(file)


def test_a_config_that_names_nobody_cannot_be_locked() -> None:
    config = load_config({"model": "m", "scheduler": "nobody", "plugins": {"allow": ["no-such-distribution"]}})
    with pytest.raises(ConfigError) as caught:
        make_lock(Registry.discover(), config)
    assert len(caught.value.reasons) == 2
    assert "scheduler: no scheduler named 'nobody'" in caught.value.reasons[0]


def test_the_digest_is_over_names_and_contents(site: Site) -> None:
    package = site.install("named")
    found = metadata.distribution("named")
    names = [
        "named_lockable/__init__.py",
        "named_lockable/parts.py",
        "named_lockable/data.txt",
        "named-1.0.dist-info/METADATA",
        "named-1.0.dist-info/entry_points.txt",
    ]
    lines = [f"{name}\0{hashlib.sha256((site.folder / name).read_bytes()).hexdigest()}\n" for name in sorted(names)]
    assert digest_of(found, []) == f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"
    assert package.exists()


# -- where it is required


@pytest.mark.supports("Plugins", "a lock: other versions or contents than those that were locked are refused")
def test_an_engine_refuses_what_differs_from_the_lock(site: Site, tmp_path: Path) -> None:
    """Before the model is looked for, and at every way in."""
    package = site.install("named")
    file = tmp_path / "pegboard.lock"
    config = tmp_path / "engine.toml"
    config.write_text(f'model = "missing.gguf"\nobservers = ["named"]\n[plugins]\nlock = "{file}"\n')
    assert main(["plugins", "lock", "-c", str(config), "-o", str(file)]) == 0
    assert main(["config", "check", str(config)]) == 0
    (package / "parts.py").write_text("")
    assert main(["config", "check", str(config)]) == 2
    for arguments in ({"config": config}, {"config": {"observers": ["named"]}, "plugins": {"lock": file}}):
        with pytest.raises(ConfigError, match=r"distribution named 1\.0: its files have changed"):
            Engine("missing.gguf" if "plugins" in arguments else None, **arguments)


def test_a_plan_elsewhere_requires_the_lock_too(tmp_path: Path) -> None:
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(SHAPE))
    file = tmp_path / "pegboard.lock"
    config = load_config({"model": f"random:{shape}", "device": "cpu", "plugins": {"lock": str(file)}})
    registry = Registry.discover()
    lock = make_lock(registry, config)
    file.write_text(lock_text(lock))
    encoded = assemble(config, registry).plan.encode()
    restore(encoded)
    file.write_text(lock_text(lock).replace("sha256:", "sha256:0"))
    with pytest.raises(ConfigError, match=r"distribution pegboard .* its files have changed"):
        restore(encoded)


def test_config_check_lists_it_among_the_other_reasons(tmp_path: Path) -> None:
    config = load_config({"model": "m", "scheduler": "nobody", "plugins": {"lock": str(tmp_path / "none.lock")}})
    reasons = check_config(config, Registry.discover())
    assert [reason for reason in reasons if "none.lock can't be read" in reason]
    assert [reason for reason in reasons if "nobody" in reason]


def test_the_command_writes_what_it_says(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("named")
    file = tmp_path / "own.lock"
    assert main(["plugins", "lock", "-o", str(file), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {found["name"]: found["digest"] for found in data["distribution"]} == {
        found.name: found.digest for found in read_lock(file).distributions
    }
    assert main(["plugins", "lock", "-o", str(tmp_path / "no" / "folder")]) == 2
    assert "can't be written" in capsys.readouterr().err

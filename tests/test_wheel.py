"""The package as pip installs it, in an environment that has vLLM and nothing of this checkout.

The environment is made of links to the packages of this one, but for ours and for the empty
distribution called ``vllm``. So servers start as docs/serving.md says for use without the checkout.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import dllm
from bench.servers import reserve_port
from tests.support.server_harness import Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
# What pip needs of a checkout. The folders are reached through links of `dllm`.
SOURCES = ("pyproject.toml", "packaging", "LICENSE", "dllm", "attention", "quant")
OURS = ("dllm-", "__editable__", "vllm-0")  # beginnings of names
INSTALLED = ("pip", "install", "--no-deps", "--no-build-isolation", "--no-compile")
KINDS = {".py", ".toml", ".jsonl", ".html", ".typed"}
DISTRIBUTION = f"dllm-{dllm.__version__}.dist-info"
QUESTION = "Write name, age and city as JSON: Lou is 28 and lives in Baku."
PLAIN = {"PYTHONPATH": "", "VLLM_PLUGINS": "dllm,dllm_namesakes"}


class Environment(NamedTuple):
    """A virtual environment; ``new`` are the names that appeared in its site-packages."""

    python: Path
    packages: Path
    new: set[str]


def run(*command: str | Path, folder: Path) -> str:
    """What a command prints; it runs in ``folder``, and does not see the checkout."""
    finished = subprocess.run(
        [str(each) for each in command],
        cwd=folder,
        env=os.environ | PLAIN,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    return finished.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout's files, as a clone has them."""
    clone = tmp_path_factory.mktemp("clone")
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *SOURCES)
    for name in run(*listed, folder=ROOT).splitlines():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (clone / name).symlink_to((ROOT / name).readlink())
        elif (ROOT / name).exists():
            (clone / name).write_bytes((ROOT / name).read_bytes())
    return clone


@pytest.fixture(scope="module")
def sdist(clone: Path) -> Path:
    """The unpacked archive of sources."""
    build = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    name = run(sys.executable, "-c", build, folder=clone).splitlines()[-1]
    with tarfile.open(clone / "dist" / name) as archive:
        archive.extractall(clone / "dist", filter="data")
    return clone / "dist" / name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Environment]:
    """Makes an environment in which pip has installed what its arguments name."""

    def install(*arguments: str, folder: Path) -> Environment:
        path = tmp_path_factory.mktemp("environment")
        run(sys.executable, "-m", "venv", "--without-pip", path, folder=path)
        python = path / "bin/python"
        where = run(
            python, "-c", "import sysconfig as s; print(s.get_path('purelib'))", folder=path
        )
        packages = Path(where.strip())
        for package in Path(sysconfig.get_path("purelib")).iterdir():
            if package.name != "dllm" and not package.name.startswith(OURS):
                (packages / package.name).symlink_to(package)
        before = set(packages.iterdir())
        run(python, "-m", *INSTALLED, *arguments, folder=folder)
        return Environment(python, packages, {it.name for it in set(packages.iterdir()) - before})

    return install


@pytest.fixture(scope="module")
def environment(installed: Callable[..., Environment], clone: Path) -> Environment:
    """An environment with the package, installed from a clone."""
    return installed(".", folder=clone)


def test_only_dllm_appears_with_all_of_its_files(environment: Environment, clone: Path) -> None:
    assert environment.new == {"dllm", DISTRIBUTION}
    there = environment.packages / "dllm"
    files = {path.relative_to(there) for path in there.rglob("*") if path.is_file()}
    folders = {"dllm": Path(), "attention": Path("attention"), "quant": Path("quant")}
    wanted = {
        folder / path.relative_to(clone / name)
        for name, folder in folders.items()
        for path in (clone / name).rglob("*")
        if path.suffix in KINDS
    }
    assert files == wanted and len(wanted) > 200


def test_an_archive_of_sources_installs_the_same(
    environment: Environment, installed: Callable[..., Environment], sdist: Path
) -> None:
    other = installed(".", folder=sdist)
    assert other.new == environment.new
    digests = [
        {line for line in record.read_text().splitlines() if line.startswith("dllm/")}
        for here in (environment, other)
        for record in [here.packages / DISTRIBUTION / "RECORD"]
    ]
    assert digests[0] == digests[1] and len(digests[0]) > 200


def test_an_editable_installation_is_called_dllm_too(
    installed: Callable[..., Environment], clone: Path
) -> None:
    editable = installed("--editable", ".", folder=clone)
    assert all(re.match(r"(__editable__+\.?)?dllm\b|.*_dllm_", name) for name in editable.new)
    assert imported(editable) == str(clone / "dllm")


def test_what_is_installed_is_what_is_imported(environment: Environment) -> None:
    assert imported(environment) == str(environment.packages / "dllm")


def imported(environment: Environment) -> str:
    """Where `dllm` is imported from; `attention` and `quant` alone must not be there."""
    code = """
import importlib.util as u, dllm, dllm.attention, dllm.quant, pathlib
assert u.find_spec("attention") is None and u.find_spec("quant") is None
print(pathlib.Path(dllm.__file__).parent)
"""
    return run(environment.python, "-c", code, folder=environment.python.parent).strip()


@pytest.mark.parametrize("model", ["tiny-ar", "tiny-dllm"])
def test_it_serves_from_outside_of_the_checkout(
    environment: Environment, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    api_server = (str(environment.python), "-m", "vllm.entrypoints.openai.api_server", "--model")
    flags = ("--served-model-name=it", "--enforce-eager", "--max-model-len=256")
    checkpoint = ROOT / "checkpoints" / model
    with Server(checkpoint, tmp_path / "log", flags, PLAIN, command=api_server) as server:
        server.wait_until_ready()
        answer = server.client().chat.completions.create(
            model="it", seed=1, temperature=0, messages=[{"role": "user", "content": QUESTION}]
        )
    said = json.loads(answer.choices[0].message.content or "")
    assert said == {"name": "Lou", "age": 28, "city": "Baku"}


def test_its_commands_work_outside_of_the_checkout(
    environment: Environment, tmp_path: Path
) -> None:
    def ours(*arguments: str | Path) -> str:
        return run(environment.python, "-m", "dllm.cli", *arguments, folder=tmp_path)

    target, model = ROOT / "checkpoints/tiny-ar", ROOT / "checkpoints/tiny-dllm"
    with reserve_port() as place:
        port = str(place.getsockname()[1])
    found = json.loads(ours("doctor", model, "--port", port, "--json"))
    assert {"model", "memory"} <= {each["name"] for each in found if each["status"] == "ok"}

    few = ["--steps=1", "--batch-size=1", "--num-prompts=1", "--heldout=1", "--max-tokens=8"]
    train = ("train", "drafter", "--target", target, "--out", "run", "--mask-token-id", "4", *few)
    with pytest.raises(AssertionError, match="target_layer_ids"):  # the bundled file is read
        ours(*train, "--config", "smollm2")
    assert "run/model" in ours(*train)

    quantize = ("quantize", model, "--scheme", "fp8-dynamic", "--out", "quantized")
    with pytest.raises(AssertionError, match="--python quant-env/bin/python"):
        ours(*quantize)
    if (python := ROOT / ".venv-quant/bin/python").exists():
        ours(*quantize, "--python", python)
        assert "no problem found" in ours("check-quant", "quantized", "--against", model)

"""Runs vLLM's own tests with our checkpoints.

``run.py FOLDER [--part short] [--only GROUP] [...]``: FOLDER holds ``tests`` and ``examples`` of
vLLM's sources, and ``tools``: packages that the tests need (`make test-vllm` fetches them).
``suite.toml`` says which tests are asked of which checkpoint, ``left_out.toml`` what is left out of
that, and why. Every other argument goes to pytest.

The tests name models as Hugging Face's hub does. They run in a folder in which each such name is a
link to a checkpoint of ours: vLLM and transformers take a relative path for a model.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
from left_out import LeftOut
from servers import SharedServers

HERE = Path(__file__).parent
CHECKPOINTS = HERE.parents[1] / "checkpoints"


def main() -> int:
    """Each group in a process of its own: a group decides which model a name means."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=["short", "whole"], default="whole")
    parser.add_argument("--only", help="the group of suite.toml to run")
    given, pytest_arguments = parser.parse_known_args()
    suite = tomllib.loads((HERE / "suite.toml").read_text())
    if given.only:
        return run_group(suite, given.folder.resolve(), given.only, given.part, pytest_arguments)
    codes = []
    for group, asked in suite["group"].items():
        if given.part == "whole" or "short" in asked:
            print(f"\n{group}", flush=True)
            command = [sys.executable, *sys.argv, f"--only={group}"]
            codes.append(subprocess.run(command, check=False).returncode)
    return max(codes)


def run_group(suite: dict, folder: Path, group: str, part: str, arguments: list[str]) -> int:
    """Run one group of ``suite.toml`` in this process."""
    asked = suite["group"][group]
    files = [*asked.get("short", []), *(asked.get("long", []) if part == "whole" else [])]
    sys.path.append(str(folder / "tools"))
    os.environ.update(suite["environment"])
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as names:
        for name in suite["names"]:
            _link(Path(names) / name, CHECKPOINTS / asked["checkpoint"])
        for name, checkpoint in asked.get("other_names", {}).items():
            _link(Path(names) / name, CHECKPOINTS / checkpoint)
        os.chdir(names)
        # Of adapters, whose names are links, too.
        huggingface_hub.HfApi.snapshot_download = lambda api, repo_id, **_: repo_id
        options = ["-c", str(folder / "pyproject.toml"), f"--rootdir={folder}"]
        options += ["-p", "no:xdist", "-p", "no:cacheprovider", "--tb=short", "-q", "-rfE"]
        options += ["-o", "asyncio_mode=strict", "--timeout=1800"]
        plugins = [
            AsOnCuda(asked.get("as_on_cuda", [])),
            DraftOptions(asked.get("draft_options", {})),
            LeftOut(HERE / "left_out.toml", group, files),
            SharedServers(
                suite["names"],
                [*suite["flags"], *asked.get("flags", [])],
                suite["dropped"],
                folder / f"servers-{group}.log",
            ),
        ]
        chosen = [str(folder / "tests" / file) for file in files]
        return pytest.main([*options, *arguments, *chosen], plugins=plugins)


class AsOnCuda:
    """Plugin of pytest: files that skip themselves without CUDA are read as if there were CUDA."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        from vllm.platforms import current_platform

        if collector.nodeid.removeprefix("tests/") in self.files:
            with mock.patch.object(type(current_platform), "is_cuda", return_value=True):
                return (yield)
        return (yield)


class DraftOptions:
    """Plugin of pytest: engines with drafts that a test starts itself have these options, too."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def pytest_collection(self) -> None:
        from vllm import EngineArgs

        theirs = EngineArgs.__init__

        def init(arguments: Any, *args: Any, **given: Any) -> None:
            options = self.options if given.get("speculative_config") else {}
            theirs(arguments, *args, **(given | options))

        EngineArgs.__init__ = init


def _link(link: Path, checkpoint: Path) -> None:
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(checkpoint)


if __name__ == "__main__":
    sys.exit(main())

"""Runs the real ``vllm bench serve``, and Hugging Face's ``generate``, in forked processes.

``vllm bench serve`` takes longer to import vLLM than most runs here take. So a process imports it
once and is forked for every run (multiprocessing's forkserver); what runs in the fork is the
``vllm`` command's own main function with the arguments of a command line.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.servers import child_environment, tail

TIMEOUT_S = 600
# What `vllm bench serve` imports, lazily, from main().
PRELOADED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.run_batch",
    "vllm.entrypoints.cli.collect_env",
    "vllm.benchmarks.serve",
)


class Client:
    """Runs one thing at a time; ``folder`` gets a log and a result of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ.update(child_environment())  # the fork server inherits it once, when it starts
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))

    def bench_serve(self, name: str, url: str, model: str, flags: Sequence[str]) -> dict[str, Any]:
        """What ``vllm bench serve --save-detailed`` saved.

        Raises:
            RuntimeError: it failed; with the end of its log.
        """
        arguments = command(url, model, flags, self.folder, f"{name}.json")
        return self.call(name, run_vllm, arguments)

    def call(self, name: str, function: Callable[..., None], *arguments: object) -> dict[str, Any]:
        """Run ``function(*arguments)`` in a fork and read the ``<name>.json`` that it wrote.

        Raises:
            RuntimeError: it failed, took more than ``TIMEOUT_S``, or wrote nothing.
        """
        log, result = self.folder / f"{name}.log", self.folder / f"{name}.json"
        log.touch()
        process = self._context.Process(target=_logged, args=(log, function, arguments))
        process.start()
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
            raise RuntimeError(f"{name} took more than {TIMEOUT_S} s:\n{tail(log)}")
        if process.exitcode or not result.exists():
            raise RuntimeError(f"{name} failed with code {process.exitcode}:\n{tail(log)}")
        saved: dict[str, Any] = json.loads(result.read_text())
        return saved


def command(url: str, model: str, flags: Sequence[str], folder: Path, filename: str) -> list[str]:
    """The arguments of ``vllm``: a user could type them."""
    fixed = ["--base-url", url, "--model", model, *flags, "--disable-tqdm"]
    saving = ["--save-result", "--save-detailed", "--result-dir", str(folder)]
    return ["bench", "serve", *fixed, *saving, "--result-filename", filename]


def run_vllm(arguments: Sequence[str]) -> None:
    """The ``vllm`` command."""
    sys.argv = ["vllm", *arguments]
    from vllm.entrypoints.cli.main import main

    main()


def _logged(log: Path, function: Callable[..., None], arguments: Sequence[object]) -> None:
    """Run in the fork, with everything that it prints in a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    function(*arguments)

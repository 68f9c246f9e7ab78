"""Two commits side by side: is this one slower than that one?

    python -m bench.compare main            # HEAD against main
    python -m bench.compare v1 --head v2    # any two
    make bench-compare BASE=main

Both are checked out into temporary git worktrees, which are removed at the end, and served by plain
``vllm serve`` with the worktree first on Python's path. Benchmark, checkpoint and flags are this
checkout's for both, so that only the product differs; what is not committed is not measured. The
short set (questions, adaptive, and random tokens with fixed denoise steps) alternates between the
two, and the ratios are head / base, pair by pair. Nothing is written.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.client import Client
from bench.command import add_serve_flags, canvas_length, reporting_failures
from bench.context import ROOT, progress
from bench.measure import OVERLAPPED, Measurement
from bench.race import Contestant, Race, admit, start_all
from bench.report import tables
from bench.servers import Server, ServerOptions
from bench.workloads import ADAPTIVE, FIXED, QUESTIONS, RANDOM, Shape, Workload, card_accuracy

STEPS = 16


@dataclass(frozen=True)
class Options:
    """The command line; ``refs`` are (head, base)."""

    repository: Path
    refs: tuple[str, str]
    model: Path
    shape: Shape
    rounds: int
    num_requests: int
    concurrencies: tuple[int, ...]
    serve_flags: tuple[str, ...]


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both and print the tables."""
    options = parse(arguments)
    measured = measure(options)
    print(f"\n{tables(measured)}")
    return 1 if any(one.problem for _, one in measured) else 0


def measure(options: Options) -> list[tuple[Workload, Measurement]]:
    """All rounds.

    Raises:
        GateError: outputs are wrong.
        RuntimeError: a commit cannot be checked out or served.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-compare-")))
        contestants = []
        for side, ref in zip(("head", "base"), options.refs, strict=True):
            commit = short_hash(options.repository, ref)
            source = folder / side
            stack.enter_context(worktree(options.repository, commit, source))
            served = ServerOptions(
                f"{side} {commit}", str(options.model), options.serve_flags, environment(source)
            )
            contestants.append(
                Contestant(
                    f"{side} {commit}",
                    options.model,
                    OVERLAPPED,
                    Server(served, folder / f"{side}.log"),
                    expected=card_accuracy(options.model),
                )
            )
        progress(f"starting {' and '.join(one.name for one in contestants)}")
        start_all([one.server for one in contestants if one.server], stack)
        for contestant in contestants:
            admit(contestant, options.shape)
        return Race(contestants, short_set(options), options.rounds, Client(folder)).run()


def short_set(options: Options) -> list[Workload]:
    """Questions and random tokens; the fixed steps are arguments of each request."""
    fixed = json.dumps({"vllm_xargs": {"diffusion_max_steps": STEPS, "diffusion_confidence": 0}})
    return [
        Workload(
            FIXED if prompts == RANDOM else ADAPTIVE,
            prompts,
            options.num_requests + 2 * concurrency,
            options.shape,
            concurrency,
            steps_per_block=STEPS if prompts == RANDOM else None,
            sent=fixed if prompts == RANDOM else "",
        )
        for prompts in (QUESTIONS, RANDOM)
        for concurrency in options.concurrencies
    ]


@contextmanager
def worktree(repository: Path, commit: str, folder: Path) -> Iterator[Path]:
    """A commit's files in a folder, while the context lasts.

    Raises:
        RuntimeError: git refuses.
    """
    git(repository, "worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        yield folder
    finally:
        git(repository, "worktree", "remove", "--force", str(folder))


def environment(source: Path) -> tuple[tuple[str, str], ...]:
    """The variables under which Python imports the plugin from ``source``.

    Raises:
        RuntimeError: it is imported from somewhere else.
    """
    found = (("PYTHONPATH", os.pathsep.join([str(source), *_inherited_path()])),)
    imported = subprocess.run(
        [sys.executable, "-c", "import dllm; print(dllm.__file__)"],
        env=os.environ | dict(found),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if Path(imported.stdout.strip()) != source / "dllm/__init__.py":
        raise RuntimeError(
            f"{source} is first on Python's path, but the plugin comes from "
            f"{imported.stdout.strip() or imported.stderr[-300:]}"
        )
    return found


def short_hash(repository: Path, ref: str) -> str:
    """Of a commit.

    Raises:
        RuntimeError: there is no such commit.
    """
    return git(repository, "rev-parse", "--short", "--verify", f"{ref}^{{commit}}")


def git(repository: Path, *arguments: str) -> str:
    """What a git command prints.

    Raises:
        RuntimeError: it failed; with what it says.
    """
    done = subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _inherited_path() -> list[str]:
    """PYTHONPATH without this checkout."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [entry for entry in entries if entry and Path(entry).resolve() != ROOT]


def parse(arguments: Sequence[str] | None) -> Options:
    """Read the command line; exits with a message when it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="commit, branch or tag to compare with")
    parser.add_argument("--head", default="HEAD", help="(HEAD)")
    parser.add_argument("--repository", type=Path, default=ROOT, help="(this one)")
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints/tiny-dllm")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--num-requests", type=int, default=30, help="of a run, at least")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    add_serve_flags(parser)
    given = parser.parse_args(arguments)
    canvas = canvas_length(parser, given.model)
    return Options(
        repository=given.repository,
        refs=(given.head, given.base),
        model=given.model.resolve(),
        shape=Shape(canvas, input_len=2 * canvas, output_len=2 * canvas),
        rounds=given.rounds,
        num_requests=given.num_requests,
        concurrencies=tuple(given.concurrency),
        serve_flags=tuple(given.serve_flags),
    )


if __name__ == "__main__":
    sys.exit(main())

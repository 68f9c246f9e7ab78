"""Two commits side by side: is this one slower than that one?

    python -m bench.compare main            # HEAD against main
    python -m bench.compare v1 --head v2    # any two
    make bench-compare BASE=main

(Two settings of one commit: ``bench.serve --contestants``.)

Both are checked out into temporary git worktrees, which are removed at the end, and served by plain
``vllm serve`` with the worktree first on Python's path. Benchmark, checkpoint and flags are this
checkout's for both, so that only the product differs; what is not committed is not measured. The
two take turns on a short set, questions with adaptive denoise steps and random tokens with fixed
ones, and the ratios are head / base, pair by pair. Nothing is written.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.client import Client
from bench.context import ROOT, as_text, command_line, reporting_failures
from bench.measure import OVERLAPPED, csv_rows
from bench.race import Contestant, Measured, Race, start_all
from bench.serve import add_serve_flags, canvas_length
from bench.servers import Server, ServerOptions
from bench.tables import load_tables
from bench.workloads import ADAPTIVE, FIXED, Shape, Workload, card_accuracy

STEPS = 16


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both and print the tables."""
    options = parse(arguments)
    measured = measure(options)
    print(f"\n{load_tables(as_text(csv_rows(measured, {})))}")
    return 1 if any(one.problem for _, one in measured) else 0


def measure(options: argparse.Namespace) -> Measured:
    """All rounds.

    Raises:
        GateError: outputs are wrong.
        RuntimeError: a commit cannot be checked out or served.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-compare-")))
        contestants = []
        for side, ref in (("head", options.head), ("base", options.base)):
            commit = short_hash(options.repository, ref)
            source = folder / side
            stack.enter_context(worktree(options.repository, commit, source))
            served = ServerOptions(
                f"{side} {commit}",
                str(options.model),
                tuple(options.serve_flags),
                environment(source),
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
        start_all(contestants, options.shape, max(options.concurrency), stack)
        return Race(contestants, short_set(options), options.rounds, Client(folder)).run()


def short_set(options: argparse.Namespace) -> list[Workload]:
    """Questions and random tokens; the fixed steps are arguments of each request."""
    fixed = json.dumps({"vllm_xargs": {"diffusion_max_steps": STEPS, "diffusion_confidence": 0}})
    sizes = [(n, options.num_requests + 2 * n) for n in options.concurrency]
    return [
        *(Workload(ADAPTIVE, count, options.shape, n) for n, count in sizes),
        *(
            Workload(FIXED, count, options.shape, n, steps_per_block=STEPS, sent=fixed)
            for n, count in sizes
        ),
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
    found = (("PYTHONPATH", str(source)),)
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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with a message when it is wrong."""
    parser = command_line(__doc__, writes=False)
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
    given.shape = Shape(canvas, input_len=2 * canvas, output_len=2 * canvas)
    given.model = given.model.resolve()
    return given


if __name__ == "__main__":
    sys.exit(main())

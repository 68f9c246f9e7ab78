"""Two commits side by side: is this one slower than that one?

    python -m bench.compare main --concurrency 1 8 32    # HEAD, or --head; options of bench.serve
    make bench-compare BASE=main

Both are served from temporary git worktrees. Everything else is ``bench.serve`` of this checkout,
so that only the product differs; what is not committed is not measured. Ratios are head / base,
pair by pair. Then each starts alone, in turn: seconds until it is ready, and the memory that its
processes hold by then (``--starts 0`` leaves that out). Nothing is written.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from bench import serve
from bench.context import ROOT, command_line, read_csv, reporting_failures, write_csv
from bench.serve import OURS, Spec
from bench.servers import Server
from bench.tables import load_tables, markdown, ratios, spread

# Of bench.serve; given ones go before.
SHORT = "--rounds 4 --num-requests 30 --concurrency 1 8 --rates --minutes 60"


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, writes=False)
    parser.add_argument("base", help="commit, branch or tag to compare with")
    parser.add_argument("--head", default="HEAD", help="(HEAD)")
    parser.add_argument("--starts", type=int, default=3, help="starts of each that are timed (3)")
    given, more = parser.parse_known_args(arguments)  # more: options of bench.serve
    options = serve.parse([*SHORT.split(), *more, "--contestants", OURS])
    if options.no_http:
        parser.error("--no-http: both sides would import the plugin of this tree.")
    options.model = options.model.resolve()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-compare-")))
        options.contestants = []
        for side, ref in (("head", given.head), ("base", given.base)):
            found = git("rev-parse", "--short", "--verify", f"{ref}^{{commit}}")
            source = stack.enter_context(worktree(found, folder / side))
            options.contestants.append(Spec(f"{side} {found}", OURS, source=source))
        path = folder / "rows.csv"
        serve.measure(options, lambda rows: write_csv(path, rows))
        rows = read_csv(path)
        print(f"\n{load_tables(rows)}")
        if given.starts:
            print(f"\n{starts(options.contestants, str(options.model), folder, given.starts)}")
    return int(any(row["problem"] for row in rows))


def starts(sides: Sequence[Spec], model: str, folder: Path, count: int) -> str:
    """A table of starts, one server after the other; the first, which compiles, is not counted."""
    rows = []
    for number in range(-1, count):
        for side in sides:
            server = Server(
                side.name, model, folder / "start.log", environment={"PYTHONPATH": str(side.source)}
            )
            begin = time.monotonic()
            with server:
                server.wait_until_ready()
                row = {"contestant": side.name, "pair": str(number)}
                row["start, s"] = f"{time.monotonic() - begin:.2f}"
                row["idle memory, MiB"] = f"{held_mib(server.process.pid):.0f}"
            rows += [row] * (number >= 0)
    head, base = ([row for row in rows if row["contestant"] == side.name] for side in sides)
    lines = [
        [column, spread(head, column), spread(base, column), ratios(head, base, column)]
        for column in ("start, s", "idle memory, MiB")
    ]
    return markdown(["", *(side.name for side in sides), "head / base"], lines)


def held_mib(pid: int) -> float:
    """What a process and those that it started hold; shared pages are counted once (PSS)."""
    parent = psutil.Process(pid)
    found = (parent, *parent.children(recursive=True))
    return float(sum(one.memory_full_info().pss for one in found)) / 2**20


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """A commit's files in a folder, from which the plugin is imported, while the context lasts.

    Raises RuntimeError: git refuses, or the plugin is imported from somewhere else.
    """
    git("worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        command = [sys.executable, "-c", "import dllm; print(dllm.__file__)"]
        env = os.environ | {"PYTHONPATH": str(folder)}
        done = subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, check=False
        )
        if Path(done.stdout.strip()) != folder / "dllm/__init__.py":
            found = done.stdout.strip() or done.stderr[-300:]
            raise RuntimeError(f"{folder} is first on the path, but the plugin comes from {found}")
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

"""Measures what our pages show, one benchmark after the other, and writes the pages anew.

    python -m bench.figures [NAME ...]

All of them take some three hours, on a machine that does nothing else. They are measured on the
commit that is checked out, and ``bench/results`` is written when the last one has ended; so all
rows name one commit. One that fails leaves its files as they were. Exit code 1 if one failed, 2 if
tracked files differ from the commit.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import readme
from bench.context import RESULTS, ROOT, commit, progress, read_csv, write_csv

SERVED, PILOT = "serve_compiled.csv", "runs/pilot"


@dataclass(frozen=True)
class Figures:
    """One benchmark.

    Attributes:
        command: a module and its arguments.
        files: what it writes, and under which names that is kept. Files with one name are joined.
        before: a command that makes what the benchmark needs.
    """

    command: str
    files: tuple[tuple[str, str], ...]
    before: str = ""


def _same(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, name) for name in names)


ADAPTIVE = "bench.serve --schedule adaptive --rounds 5 --questions 0"
ALL = {
    "serve": Figures(
        f"{ADAPTIVE} --contestants ours built-in tiny-ar transformers --rates 24 --minutes 20 "
        "--num-requests 200",
        _same(SERVED),
    ),
    "fixed": Figures(
        "bench.serve --schedule fixed --contestants ours built-in --concurrency 1 --rounds 5 "
        "--minutes 5 --num-requests 60",
        _same(SERVED),
    ),
    "settings": Figures(
        f"{ADAPTIVE} --contestants ours 'built-in --max-num-seqs 64' "
        "'ours --additional-config.dllm.denoise_loop_ms 0' --concurrency 32 --rates 24 --minutes 7",
        ((SERVED, "serve_settings.csv"),),
    ),
    "answers": Figures(
        "bench.serve --schedule adaptive --rounds 1 --minutes 2 --concurrency 1",
        _same("answers.csv"),
    ),
    "families": Figures("bench.families --rounds 5", _same("families.csv")),
    "drafter": Figures(
        f"bench.drafter --pilot {PILOT} --num-requests 48 --rounds 5 --concurrency 1 8 "
        "--families schema --minutes 24",
        _same("drafter.csv"),
        before="dllm.cli train pilot --target checkpoints/tiny-ar "
        f"--drafter checkpoints/tiny-drafter --out {PILOT}",
    ),
    "structured": Figures(
        "bench.structured --rounds 5", _same("structured.csv", "structured_cost.csv")
    ),
    "watching": Figures("bench.watching --rounds 12", _same("watching.csv")),
    "remote": Figures("bench.remote --rounds 5 --requests 48", _same("remote.csv")),
    "plan-steps": Figures("bench.plan_steps --rounds 5", _same("plan_steps.csv")),
    "step-time": Figures(
        "bench.profile_step --mode compiled --server ours --concurrency 1 8 32 --steps 32 "
        "--rounds 5 --coverage 0.8",
        _same("profile_cpu.csv"),
    ),
    "sampling-step": Figures("bench.sampling_step --rounds 5", _same("sampling_step_cpu.csv")),
    "grammar-build": Figures("bench.grammar_build", _same("grammar_build.csv")),
    "recovery": Figures("bench.recovery --num 30 --flags=--enforce-eager", _same("recovery.csv")),
    "roofline": Figures("bench.roofline", _same("roofline.csv")),
    "tiles": Figures("bench.tiles", _same("tiles.csv")),
    "soak": Figures("bench.soak --minutes 60", _same("soak.csv")),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, copy, and write the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALL)}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - set(ALL)):
        parser.error(f"{', '.join(unknown)}: no such figures; allowed: {', '.join(ALL)}.")
    if commit().endswith("-dirty"):
        print("Tracked files differ from the commit; commit or stash them first.", file=sys.stderr)
        return 2
    names = [name for name in ALL if name in given.names or not given.names]
    with tempfile.TemporaryDirectory(prefix="dllm-figures-") as folder:
        failed = [name for name in names if not measured(ALL[name], Path(folder, name))]
        keep(Path(folder), [name for name in names if name not in failed], given.results)
    readme.main([])
    for name in failed:
        print(f"{name} failed; its figures are those of an earlier commit.", file=sys.stderr)
    return 1 if failed else 0


def measured(figures: Figures, folder: Path) -> bool:
    """Whether the benchmark, and what it needs, ended well; its files are in ``folder``."""
    commands = [figures.before] if figures.before else []
    commands.append(f"{figures.command} --results {folder}")
    for command in commands:
        progress(command)
        words = [sys.executable, "-m", *shlex.split(command)]
        if subprocess.run(words, cwd=ROOT, check=False).returncode:
            return False
    return True


def keep(folder: Path, names: Sequence[str], results: Path) -> None:
    """Copy the files of these figures, joined; one of which a part is missing stays as it was."""
    parts: dict[str, list[Path]] = defaultdict(list)
    for name, figures in ALL.items():
        for written, kept in figures.files:
            parts[kept].append(Path(folder, name, written) if name in names else Path())
    for kept, paths in parts.items():
        if all(path.is_file() for path in paths):
            write_csv(results / kept, [row for path in paths for row in rows_of(path)])


def rows_of(path: Path) -> list[dict[str, str]]:
    """Its rows; the folder, which is temporary, is called DIR in their command."""
    return [
        row | {"command": row["command"].replace(str(path.parent), "DIR")} for row in read_csv(path)
    ]


if __name__ == "__main__":
    sys.exit(main())

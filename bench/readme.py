"""Rewrites the marked sections of our pages from bench/results/*.csv, so that no figure is typed.

    python -m bench.readme            # rewrite README.md and docs/*.md
    python -m bench.readme --check    # exit code 1 if a page and the CSV files disagree

A section is what stands between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; NAME is a key of
``SECTIONS``, whose value turns the folder of the CSV files into Markdown. To add one, write such a
function beside the command that makes its CSV file (``bench.tables`` has the pieces), and put the
marks where the text shall stand. ``tests/bench/test_bench_readme.py`` fails when they disagree.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.comparison import comparison
from bench.context import RESULTS, ROOT
from bench.drafter_tables import drafting
from bench.profile_step import step_time
from bench.recovery import recovery
from bench.remote import remote
from bench.roofline import floors
from bench.sampler import sampling_step
from bench.soak_report import soak
from bench.tables import families, markdown, serving

MARKED = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
# Before a link that a section writes: paths are relative to the top of the repository.
LINK = re.compile(r"\]\((?=bench/|checkpoints/)")

MODELS = ("tiny-dllm", "tiny-ar", "tiny-sdar", "tiny-llada2")
GOOD = 95.0  # per cent


def models(_results: Path) -> str:
    """Size, training and right answers of the bundled models, from their model cards."""
    header = ["", "parameters", "training, one core", f"families with {GOOD:g} % or more"]
    return markdown(([*header, "the hardest", "all"], [_model(name) for name in MODELS]))


def _model(name: str) -> list[str]:
    card = ROOT / "checkpoints" / name / "README.md"
    text = card.read_text()
    scores = dict(re.findall(r"^\| (\w+) \| ([^|]+?) \|", text.split("## Held-out")[1], re.M))
    of_all = scores.pop("all")
    del scores["family"]
    percents = {family: float(score.split(" %")[0]) for family, score in scores.items()}
    hardest = min(percents, key=lambda family: percents[family])
    size = re.search(r"of ([\d.]+M) parameters", text)
    assert size, f"{card} does not say how many parameters"
    minutes = sum(map(int, re.findall(r"^- (\d+) minutes (?:of training )?on", text, re.M)))
    return [
        f"[{name}](checkpoints/{name}/README.md)",
        size[1],
        f"{minutes} minutes",
        f"{sum(percent >= GOOD for percent in percents.values())} of {len(percents)}",
        f"{hardest}: {scores[hardest]}",
        of_all,
    ]


SECTIONS: dict[str, Callable[[Path], str]] = {
    "models": models,
    "comparison": comparison,
    "serving": serving,
    "step-time": lambda results: step_time(results / "profile_cpu.csv"),
    "recovery": recovery,
    "families": families,
    "sampling-step": sampling_step,
    "soak": soak,
    "drafting": drafting,
    "remote": remote,
    "floors": floors,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the pages, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", type=Path, nargs="*", default=pages(ROOT))
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if they disagree")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    given = parser.parse_args(arguments)
    status = 0
    for page in given.pages:
        before = page.read_text()
        after = document(before, given.results, "../" if page.parent.name == "docs" else "")
        if not given.check:
            page.write_text(after)
        elif after != before:
            print(f"{page} differs from {given.results}: python -m bench.readme", file=sys.stderr)
            status = 1
    return status


def pages(root: Path) -> list[Path]:
    """README.md and docs/*.md."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def document(text: str, results: Path, to_root: str = "") -> str:
    """The text with every marked section written anew.

    Args:
        to_root: what leads from the folder of the page to the top of the repository.

    Raises:
        ValueError: a mark names no section.
    """

    def written(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in SECTIONS:
            raise ValueError(f"bench:{name}: no such section; allowed: {', '.join(SECTIONS)}.")
        section = LINK.sub(f"]({to_root}", SECTIONS[name](results))
        return f"{begin}{section}\n{end}"

    return MARKED.sub(written, text)


if __name__ == "__main__":
    sys.exit(main())

"""Rewrites the marked sections of README.md from bench/results/*.csv, so that no figure is typed.

    python -m bench.readme            # rewrite
    python -m bench.readme --check    # exit code 1 if README and the CSV files disagree

A section is what stands between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; NAME is a key of
``SECTIONS``, whose value turns the folder of the CSV files into Markdown. To add one, write such a
function (``bench.markdown`` has the pieces), and put the marks where the text shall stand.
``tests/test_bench_readme.py`` fails when they disagree.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.context import RESULTS, ROOT, read_csv
from bench.markdown import Rows, figure, markdown, measured_with
from bench.measure import OURS
from bench.readme_step import floors, step_growth, step_time
from bench.recovery_report import family_table
from bench.recovery_report import notes as recovery_notes
from bench.recovery_report import table as recovery_table
from bench.report import Spread
from dllm.eval_report import wilson_interval
from dllm.train.tasks import FAMILIES

MARKED = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite README.md, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if they disagree")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    given = parser.parse_args(arguments)
    before = given.readme.read_text()
    after = document(before, given.results)
    if given.check and after != before:
        print(
            f"{given.readme} differs from {given.results}: python -m bench.readme", file=sys.stderr
        )
        return 1
    if not given.check:
        given.readme.write_text(after)
    return 0


def document(text: str, results: Path) -> str:
    """The text with every marked section written anew.

    Raises:
        ValueError: a mark names no section.
    """

    def written(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in SECTIONS:
            raise ValueError(f"bench:{name}: no such section; allowed: {', '.join(SECTIONS)}.")
        return f"{begin}{SECTIONS[name](results)}\n{end}"

    return MARKED.sub(written, text)


# --- pieces --------------------------------------------------------------------------------------


def middle(rows: Rows, column: str, decimals: int = 1) -> str:
    """The median of the rows that have a value, or a dash."""
    values = [float(row[column]) for row in rows if row[column]]
    return f"{Spread.of(values).median:.{decimals}f}" if values else "-"


def ratios(rows: Rows, others: Rows, column: str) -> str:
    """``rows / others`` pair by pair, median and range, or a dash."""
    ours = {row["pair"]: float(row[column]) for row in rows if row[column]}
    theirs = {row["pair"]: float(row[column]) for row in others if row[column]}
    both = [ours[pair] / theirs[pair] for pair in ours if theirs.get(pair)]
    return Spread.of(both).text(2) if both else "-"


def correct(rows: Rows) -> str:
    """``right / asked``, where questions were asked."""
    asked = [row for row in rows if row["num_correct"]]
    right = sum(int(row["num_correct"]) for row in asked)
    return f"{right} / {sum(int(row['num_requests']) for row in asked)}" if asked else "-"


def share(right: int, asked: int) -> str:
    """Per cent, with the Wilson interval at 95%."""
    low, high = (100 * bound for bound in wilson_interval(right, asked))
    return f"{100 * right / asked:.1f} % [{low:.0f} .. {high:.0f}]"


# --- sections ------------------------------------------------------------------------------------

SERVING_COLUMNS = (
    ("tokens_per_s", "tokens/s", 0),
    ("ttft_ms", "TTFT, ms", 0),
    ("latency_ms", "latency p50, ms", 0),
    ("latency_p99_ms", "p99, ms", 0),
    ("steps_per_block", "denoise steps per block", 2),
    ("passes_per_block", "passes per block", 2),
    ("tokens_per_pass", "tokens per pass", 1),
    ("peak_memory_mib", "peak MiB", 0),
)


def serving(results: Path) -> str:
    """All contestants at all loads, compiled."""
    return _serving(results, "compiled")


def _serving(results: Path, mode: str) -> str:
    rows = read_csv(results / f"serve_{mode}.csv")
    if not rows:
        return "Not measured yet: `make bench`."
    source = measured_with(rows, f"serve_{mode}.csv")
    parts = [f"Medians; ratios pair by pair, [lowest .. highest]. {source}"]
    for schedule, prompts in dict.fromkeys((row["schedule"], row["prompts"]) for row in rows):
        here = [row for row in rows if (row["schedule"], row["prompts"]) == (schedule, prompts)]
        parts += [f"**{schedule} denoise steps, {prompts}**", _load_table(here)]
    parts += [*_problems(rows), *figure(results, f"latency_{mode}", "Throughput and latency")]
    return "\n\n".join(parts)


def _load_table(rows: Rows) -> str:
    """One line a load and contestant; ours comes first at every load."""
    header = ["load", "", *(heading for _, heading, _ in SERVING_COLUMNS), "correct", "ours / this"]
    lines = []
    for load in dict.fromkeys((row["concurrency"], row["rate"]) for row in rows):
        here = [row for row in rows if (row["concurrency"], row["rate"]) == load]
        ours = [row for row in here if row["contestant"] == OURS]
        title = f"{load[0]} at once" if load[0] else f"{float(load[1]):g} per s"
        for name in sorted({row["contestant"] for row in here}, key=lambda n: (n != OURS, n)):
            own = [row for row in here if row["contestant"] == name]
            numbers = [middle(own, column, decimals) for column, _, decimals in SERVING_COLUMNS]
            ratio = "" if name == OURS else ratios(ours, own, "tokens_per_s")
            lines.append([title, name, *numbers, correct(own), ratio])
    return markdown(header, lines)


def _problems(rows: Rows) -> list[str]:
    """What was wrong with runs that have no speed."""
    wrong = (f"* {row['contestant']}: {row['problem']}" for row in rows if row["problem"])
    lines = list(dict.fromkeys(wrong))
    return ["\n".join(["No speed is reported where answers were wrong:", *lines])] if lines else []


def refusals(results: Path) -> str:
    """What each server does with a temperature, a seed and many requests."""
    rows = read_csv(results / "serve_facts.csv")
    if not rows:
        return "Not measured yet: `make bench`."
    running = next(column for column in rows[0] if column.startswith("running_of_"))
    header = (
        "",
        "`temperature`",
        "`seed`",
        f"at once, of {running.split('_')[2]}",
        "first request",
    )
    lines = [
        (
            row["contestant"],
            f"HTTP {row['http_status_with_temperature']}",
            f"HTTP {row['http_status_with_seed']}",
            row[running],
            f"{float(row['first_request_s']):.1f} s",
        )
        for row in rows
    ]
    return markdown(header, lines)


def answers(results: Path) -> str:
    """Right answers and denoise steps per block by family."""
    rows = read_csv(results / "answers.csv")
    if not rows:
        return "Not measured yet: `make bench`."
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    lines = []
    asked = {row["family"] for row in rows}
    for family in (*(family for family in FAMILIES if family in asked), "all"):
        cells = [family]
        for name in names:
            own = [r for r in rows if r["contestant"] == name and family in (r["family"], "all")]
            steps, blocks = (_sum(own, column) for column in ("denoise_steps", "blocks"))
            cells.append(share(int(_sum(own, "correct")), len(own)))
            cells[-1] += f", {steps / blocks:.1f} steps" if blocks else ""
        lines.append(cells)
    parts = [markdown(["", *names], lines), measured_with(rows, "answers.csv")]
    return "\n\n".join([*parts, *figure(results, "steps", "Denoise steps per block by family")])


def switches(results: Path) -> str:
    """What each of our switches saves."""
    rows = read_csv(results / "switches.csv")
    if not rows:
        return "Not measured yet: `python -m bench.switches`."
    header = (
        "on / off",
        "at once",
        "tokens/s",
        "latency p50",
        "denoise steps per block",
        "passes per block",
        "correct, on",
        "correct, off",
    )
    lines = []
    for name, load in dict.fromkeys((row["switch"], row["concurrency"]) for row in rows):
        here = [row for row in rows if (row["switch"], row["concurrency"]) == (name, load)]
        on_label, off_label = dict.fromkeys(row["contestant"] for row in here)
        on = [row for row in here if row["contestant"] == on_label]
        off = [row for row in here if row["contestant"] == off_label]
        columns = ("tokens_per_s", "latency_ms", "steps_per_block", "passes_per_block")
        changes = [ratios(on, off, column) for column in columns]
        scores = [
            share(int(_sum(side, "num_correct")), int(_sum(side, "num_requests")))
            for side in (on, off)
        ]
        lines.append((f"{on_label} / {off_label}", load, *changes, *scores))
    return markdown(header, lines) + f"\n\n{measured_with(rows, 'switches.csv')}"


def recovery(results: Path) -> str:
    """What quantized checkpoints keep of the answers, over all families and by family."""
    rows = read_csv(results / "recovery.csv")
    if not rows:
        return "Not measured yet: `python -m bench.recovery`."
    whole, by_family = markdown(*recovery_table(rows)), markdown(*family_table(rows))
    computed_by = "\n".join(["What computed each score:", "", *recovery_notes(rows)])
    return "\n\n".join([whole, computed_by, by_family, measured_with(rows, "recovery.csv")])


def _sum(rows: Rows, column: str) -> float:
    return sum(float(row[column]) for row in rows if row[column])


SECTIONS: dict[str, Callable[[Path], str]] = {
    "serving": serving,
    "refusals": refusals,
    "answers": answers,
    "switches": switches,
    "recovery": recovery,
    "step-time": step_time,
    "step-growth": step_growth,
    "floors": floors,
}


if __name__ == "__main__":
    sys.exit(main())

"""README sections about servers side by side: speed, answers, what each of them refuses."""

from pathlib import Path

from bench.context import read_csv
from bench.markdown import Rows, figure, markdown, measured_with
from bench.measure import AUTOREGRESSIVE, BUILTIN, OURS, REFERENCE
from bench.report import Spread
from bench.workloads import ADAPTIVE, QUESTIONS
from dllm.tasks.suite import FAMILIES
from dllm.tools.eval_report import wilson_interval

# --- pieces --------------------------------------------------------------------------------------


def middle(rows: Rows, column: str, decimals: int = 1) -> str:
    """The median of the rows that have a value, or a dash."""
    values = [float(row[column]) for row in rows if row[column]]
    return f"{Spread.of(values).median:.{decimals}f}" if values else "-"


def spread(rows: Rows, column: str, decimals: int = 1) -> str:
    """The median of the rows that have a value with their range, or a dash."""
    values = [float(row[column]) for row in rows if row[column]]
    return Spread.of(values).text(decimals) if values else "-"


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


def percent(right: int, asked: int) -> str:
    """Per cent, with the Wilson interval at 95%."""
    low, high = (100 * bound for bound in wilson_interval(right, asked))
    return f"{100 * right / asked:.1f} % [{low:.0f} .. {high:.0f}]"


def total(rows: Rows, column: str) -> float:
    """The sum of the rows that have a value."""
    return sum(float(row[column]) for row in rows if row[column])


# --- sections ------------------------------------------------------------------------------------

# Beside ours in the short table.
SHORT = (BUILTIN, AUTOREGRESSIVE, REFERENCE)


def headline(results: Path) -> str:
    """Tokens per second on questions, adaptive schedule: ours, and ours over each of the others."""
    rows = [
        row
        for row in read_csv(results / "serve_compiled.csv")
        if (row["schedule"], row["prompts"]) == (ADAPTIVE, QUESTIONS)
    ]
    if not rows:
        return "Not measured yet: `make bench`."
    present = [name for name in SHORT if any(row["contestant"] == name for row in rows)]
    lines = []
    for load in dict.fromkeys(row["concurrency"] for row in rows if row["concurrency"]):
        here = [row for row in rows if row["concurrency"] == load]
        by_name = {
            name: [row for row in here if row["contestant"] == name] for name in (OURS, *present)
        }
        ours = by_name[OURS]
        cells = [f"{load} at once", middle(ours, "tokens_per_s", 0), middle(ours, "latency_ms", 0)]
        cells += [ratios(ours, by_name[name], "tokens_per_s") for name in present]
        lines.append(cells)
    header = ["", "ours, tokens/s", "latency p50, ms", *(f"ours / {name}" for name in present)]
    return f"{markdown(header, lines)}\n\n{measured_with(rows, 'serve_compiled.csv')}"


SERVING_COLUMNS = (
    ("tokens_per_s", "tokens/s", 0, spread),
    ("ttft_ms", "TTFT, ms", 0, middle),
    ("latency_ms", "latency p50, ms", 0, spread),
    ("latency_p99_ms", "p99, ms", 0, middle),
    ("steps_per_block", "denoise steps per block", 2, middle),
    ("passes_per_block", "passes per block", 2, middle),
    ("tokens_per_pass", "tokens per pass", 1, middle),
    ("peak_memory_mib", "peak MiB", 0, middle),
)


def serving(results: Path) -> str:
    """All contestants at all loads, compiled."""
    rows = read_csv(results / "serve_compiled.csv")
    if not rows:
        return "Not measured yet: `make bench`."
    source = measured_with(rows, "serve_compiled.csv")
    parts = [f"Medians, ratios pair by pair, [lowest .. highest] of the rounds. {source}"]
    parts += [*_tables(rows), *figure(results, "latency_compiled", "Throughput and latency")]
    return "\n\n".join(parts)


def serving_wide(results: Path) -> str:
    """Ours and the built-in with as many rows, at 32 at once."""
    rows = read_csv(results / "wide" / "serve_compiled.csv")
    if not rows:
        return "Not measured yet: `python -m bench.serve --results bench/results/wide ...`."
    return "\n\n".join([*_tables(rows), measured_with(rows, "wide/serve_compiled.csv")])


def _tables(rows: Rows) -> list[str]:
    """A title and a table for every schedule and kind of prompt, then what was wrong."""
    parts = []
    for schedule, prompts in dict.fromkeys((row["schedule"], row["prompts"]) for row in rows):
        here = [row for row in rows if (row["schedule"], row["prompts"]) == (schedule, prompts)]
        rounds = len({row["pair"] for row in here})
        parts += [f"**{schedule} denoise steps, {prompts}** (rounds: {rounds})", _load_table(here)]
    return [*parts, *_problems(rows)]


def _load_table(rows: Rows) -> str:
    """One line a load and contestant; ours comes first at every load."""
    header = ["load", "", *(heading for _, heading, *_ in SERVING_COLUMNS), "correct"]
    header += ["ours / this: latency p50", "ours / this: tokens/s"]
    lines = []
    for load in dict.fromkeys((row["concurrency"], row["rate"]) for row in rows):
        here = [row for row in rows if (row["concurrency"], row["rate"]) == load]
        ours = [row for row in here if row["contestant"] == OURS]
        title = f"{load[0]} at once" if load[0] else f"{float(load[1]):g} per s"
        for name in sorted({row["contestant"] for row in here}, key=lambda n: (n != OURS, n)):
            own = [row for row in here if row["contestant"] == name]
            numbers = [show(own, column, n) for column, _, n, show in SERVING_COLUMNS]
            compared = ["", ""]
            if name != OURS:
                compared = [ratios(ours, own, column) for column in ("latency_ms", "tokens_per_s")]
            lines.append([title, name, *numbers, correct(own), *compared])
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
            steps, blocks = (total(own, column) for column in ("denoise_steps", "blocks"))
            cells.append(percent(int(total(own, "correct")), len(own)))
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
            percent(int(total(side, "num_correct")), int(total(side, "num_requests")))
            for side in (on, off)
        ]
        lines.append((f"{on_label} / {off_label}", load, *changes, *scores))
    return markdown(header, lines) + f"\n\n{measured_with(rows, 'switches.csv')}"

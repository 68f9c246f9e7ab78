"""Tables of ``bench.drafter``: all of them on the terminal, a few lines in docs/drafter.md."""

import statistics
from pathlib import Path

from bench.context import Rows, read_csv
from bench.inflate import WEIGHTS_RATIO
from bench.tables import (
    Table,
    markdown,
    measured_with,
    middle,
    names_of,
    of,
    problems,
    ratios,
    values,
)
from bench.workloads import MIXED

FILE = "drafter.csv"
PLAIN, IN_PROCESS = "plain", "plain, in process"
# What docs/drafter.md shows of each target (costs: of the last one); the CSV file has the rest.
SHOWN = [(MIXED, "1"), ("schema", "1")]
POSITIONS = (1, 2, 4, 7, 15)  # of a draft block, whose acceptance is shown

SPEED_NOTE = (
    f'Ratios of tokens/s in the same round: median [min .. max]; in parentheses to "{IN_PROCESS}"; '
    "behind the dot, tokens per step that verified drafts."
)
COST_NOTE = (
    "Mixed questions, one at a time. Accepted: the share of verifying steps that kept the draft at "
    "this position and all before it. Memory: weights as stored, with the pilot's, and the bytes "
    "that a token adds to the KV cache; in parentheses the target's."
)


def drafting(results: Path) -> str:
    """Section of docs/drafter.md."""
    rows = read_csv(results / FILE)
    if not rows:
        return "Not measured yet: `python -m bench.drafter`."
    shown = [row for row in rows if (row["family"], row["concurrency"]) in SHOWN]
    last = next(reversed(targets_of(shown).values()), [])
    return f"{sections(shown, last)}\n\n{measured_with(rows, FILE)}"


def sections(rows: Rows, costed: Rows) -> str:
    """Speeds, costs of some of the rows, and what was wrong."""
    parts = [markdown(speeds(rows)), SPEED_NOTE]
    if (costs_of := costs(costed))[1]:
        parts += [markdown(costs_of), COST_NOTE]
    parts += [step_note] if (step_note := steps_in_passes(rows)) else []
    return "\n\n".join([*parts, *problems(rows)])


def targets_of(rows: Rows) -> dict[str, Rows]:
    """The rows of each target."""
    names = dict.fromkeys(row["target"] for row in rows)
    return {name: [row for row in rows if row["target"] == name] for name in names}


def speeds(rows: Rows) -> Table:
    """A line for each load: tokens/s of plain decoding, and of the others their ratio to it."""
    others = [name for name in names_of(rows) if name != PLAIN]
    lines = []
    for load in dict.fromkeys((row["target"], row["family"], row["concurrency"]) for row in rows):
        here = [row for row in rows if (row["target"], row["family"], row["concurrency"]) == load]
        plain, in_process = of(here, PLAIN), of(here, IN_PROCESS)
        cells = [*load, middle(plain, "tokens_per_s", 0)]
        for name in others:
            own = of(here, name)
            cell = ratios(own, plain, "tokens_per_s")
            if name != IN_PROCESS and (beside := ratios(own, in_process, "tokens_per_s")) != "-":
                cell += f" ({beside.split(' ')[0]})"
            if (length := middle(own, "acceptance_length")) != "-":
                cell += f" · {length}"
            cells.append(cell)
        lines.append(cells)
    header = ["target", "questions", "at once", "plain, tokens/s"]
    return [*header, *(f"{one} / plain" for one in others)], lines


def costs(rows: Rows) -> Table:
    """A line for each target and way to decode: what a user waits for, and what it takes."""
    lines = []
    for target, found in targets_of(rows).items():
        here = [row for row in found if (row["family"], row["concurrency"]) == SHOWN[0]]
        for name in names_of(here):
            own = of(here, name)
            if own[0]["draft_mb"]:  # measured at all
                lines.append([target, name, *_cost(own)])
    header = ["target", "", "TTFT, ms", "ms a draft pass"]
    positions = ", ".join(map(str, POSITIONS))
    return [*header, f"accepted at {positions}", "MB", "KV bytes a token"], lines


def _cost(rows: Rows) -> list[str]:
    """Of one way to decode."""
    first = rows[0]
    mb = float(first["draft_mb"]) + float(first["pilot_mb"])
    return [
        middle(rows, "ttft_ms"),
        middle(rows, "ms_per_draft_pass"),
        accepted(rows),
        f"{mb:.1f} ({float(first['target_mb']):.1f})",
        f"{first['draft_kv_bytes']} ({first['target_kv_bytes']})",
    ]


def accepted(rows: Rows) -> str:
    """Medians of the shares at ``POSITIONS``, as far as there are any."""
    runs = [row["accepted_by_position"].split() for row in rows if row["accepted_by_position"]]
    columns = [statistics.median(map(float, column)) for column in zip(*runs, strict=True)]
    return ", ".join(f"{columns[n - 1]:.2f}" for n in POSITIONS if n <= len(columns)) or "-"


# --- a step and a pass of the drafter ------------------------------------------------------------


def step_and_pass(rows: Rows) -> tuple[float, float] | None:
    """Medians in ms of a step without drafting and of a draft pass, one request at a time."""
    alone = [row for row in rows if row["concurrency"] == "1"]
    steps, passes = (
        values(of(alone, IN_PROCESS), "ms_per_token"),
        values(alone, "ms_per_draft_pass"),
    )
    return (statistics.median(steps), statistics.median(passes)) if steps and passes else None


def steps_in_passes(rows: Rows) -> str:
    """What a step of each target costs, in passes of the drafter; empty without figures."""
    found = {name: step_and_pass(here) for name, here in targets_of(rows).items()}
    said = [f"{name} {one[0] / one[1]:.1f}" for name, one in found.items() if one]
    if not said:
        return ""
    return (
        f"A step without drafting costs as much as so many passes of the drafter: "
        f"{', '.join(said)}; by the weights read, Qwen3-8B with its drafter {WEIGHTS_RATIO:.1f}."
    )

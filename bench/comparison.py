"""The table of README: ours beside everything that a user might take instead, wins and losses.

It reads the CSV files of ``bench.serve`` and ``bench.drafter``.
"""

from dataclasses import dataclass
from pathlib import Path

from bench.context import Rows, read_csv
from bench.drafter_tables import FILE as DRAFTER
from bench.drafter_tables import PLAIN
from bench.serve import AUTOREGRESSIVE, BUILTIN, OURS, PIPELINE, REFERENCE
from bench.tables import markdown, of, ratios
from bench.workloads import ADAPTIVE, MIXED

LOADS = ("1", "8", "32")  # requests at once
SERVING, SETTINGS, FAMILIES = "serve_compiled.csv", "serve_settings.csv", "families.csv"


@dataclass(frozen=True)
class Line:
    """Two contestants of one CSV file.

    Attributes:
        where: the values that a row of the file has in these columns.
    """

    title: str
    other_title: str
    file: str
    ours: str
    other: str
    where: tuple[tuple[str, str], ...]


DIFFUSION, BLOCKS = "DiffusionGemma", "SDAR, blocks of {} tokens"
DRAFTS = "autoregressive, with our DFlash drafter"
OF_SERVING, OF_DRAFTER = (("schedule", ADAPTIVE),), (("target", "tiny-ar"), ("family", MIXED))
LINES = (
    Line(DIFFUSION, "vLLM's built-in DiffusionGemma", SERVING, OURS, BUILTIN, OF_SERVING),
    Line(
        DIFFUSION,
        "the same with `--max-num-seqs 64` (default: 8)",
        SETTINGS,
        OURS,
        f"{BUILTIN} --max-num-seqs 64",
        OF_SERVING,
    ),
    Line(DIFFUSION, "Hugging Face's `generate`", SERVING, OURS, REFERENCE, OF_SERVING),
    Line(DIFFUSION, "an autoregressive model", SERVING, OURS, AUTOREGRESSIVE, OF_SERVING),
    *(
        Line(
            BLOCKS.format(size),
            "diffusers' pipeline",
            FAMILIES,
            OURS,
            PIPELINE,
            (("canvas_length", size),),
        )
        for size in ("32", "4")
    ),
    Line(DRAFTS, "vLLM without drafts", DRAFTER, "adaptive", PLAIN, OF_DRAFTER),
    Line(DRAFTS, "vLLM's n-gram drafts", DRAFTER, "adaptive", "n-gram", OF_DRAFTER),
    Line(DRAFTS, "vLLM's drafts of a small model", DRAFTER, "adaptive", "draft model", OF_DRAFTER),
)


def comparison(results: Path) -> str:
    """Our tokens/s, divided by the other's, at each load."""
    files = {name: read_csv(results / name) for name in (SERVING, SETTINGS, FAMILIES, DRAFTER)}
    if not all(files.values()):
        return "Not measured yet: `make bench`."
    header = ["ours", "beside", *(f"{load} at once" for load in LOADS), "commit"]
    table = markdown((header, [cells(line, files[line.file]) for line in LINES]))
    first = files[SERVING][0]
    return f"{table}\n\n{first['machine']}, {first['versions']}."


def cells(line: Line, rows: Rows) -> list[str]:
    """One line of the table, with the commit that was measured, linked to its CSV file."""
    rows = [row for row in rows if all(row[column] == value for column, value in line.where)]
    compared = []
    for load in LOADS:
        here = [row for row in rows if row["concurrency"] == load]
        compared.append(ratios(of(here, line.ours), of(here, line.other), "tokens_per_s"))
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return [line.title, line.other_title, *compared, f"[{commits}](bench/results/{line.file})"]

"""Rewrites the marked sections of our pages from bench/results/*.csv, so that no figure is typed.

    python -m bench.readme            # rewrite README.md and docs/*.md
    python -m bench.readme --check    # exit code 1 if a page and the CSV files disagree

A section is what stands between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; NAME is a key of
``SECTIONS``, whose value turns the folder of the CSV files into Markdown, or of ``OPTIONS``.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from bench import decisions, drafter, profile, remote, soak
from bench.context import ROOT, Rows, command_line, read_csv
from bench.drafter import FILE as DRAFTER
from bench.runs import ADAPTIVE, MIXED
from bench.serve import AUTOREGRESSIVE, BUILTIN, ENGINE, OURS, PIPELINE, REFERENCE, SERVING
from bench.tables import Section, contestant_table, load_tables, markdown, of, ratios
from dllm.settings.decisions import DecisionOptions
from dllm.settings.drafting import DrafterOptions
from dllm.settings.remote import RemoteOptions

MARKED = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
# Before a link that a section writes: paths are relative to the top of the repository.
LINK = re.compile(r"\]\((?=bench/|checkpoints/)")

LOADS = ("1", "8", "32")  # requests at once
SETTINGS, FAMILIES = "serve_settings.csv", "families.csv"
SMOLLM2, NEMOTRON = "smollm2.csv", "serve_nemotron.csv"


class Line(NamedTuple):
    title: str
    other_title: str
    file: str
    ours: str
    other: str
    where: dict[str, str]


DIFFUSION, ALONE = "DiffusionGemma", "the same without HTTP: `LLM.chat`"
DRAFTS, LOOKUP = "SmolLM2-135M, our drafter, `adaptive`", "the same with prompt lookup"
MORE_TITLE, MORE = "the same with `--max-num-seqs 64` (default: 8)", f"{BUILTIN} --max-num-seqs 64"
QUESTIONS, PAIR = {"schedule": ADAPTIVE}, {"target": "smollm2", "family": MIXED}
LINES = (
    Line(DIFFUSION, "vLLM's built-in DiffusionGemma", SERVING, OURS, BUILTIN, QUESTIONS),
    Line(DIFFUSION, MORE_TITLE, SETTINGS, OURS, MORE, QUESTIONS),
    Line(DIFFUSION, "Hugging Face's `generate`, no server", SERVING, OURS, REFERENCE, QUESTIONS),
    Line(DIFFUSION, "an autoregressive model", SERVING, OURS, AUTOREGRESSIVE, QUESTIONS),
    Line(ALONE, "vLLM's built-in DiffusionGemma", ENGINE, OURS, BUILTIN, QUESTIONS),
    Line(ALONE, "an autoregressive model", ENGINE, OURS, AUTOREGRESSIVE, QUESTIONS),
    Line(
        "SDAR, blocks of 32", "diffusers' pipeline, no server", FAMILIES, OURS, PIPELINE, QUESTIONS
    ),
    Line(DRAFTS, "vLLM without drafts", SMOLLM2, "adaptive", drafter.PLAIN, PAIR),
    Line(LOOKUP, "vLLM without drafts", SMOLLM2, "adaptive, lookup", drafter.PLAIN, PAIR),
    Line(LOOKUP, "vLLM's n-gram drafts", SMOLLM2, "adaptive, lookup", "n-gram", PAIR),
)


def comparison(results: Path) -> str:
    """Our tokens/s, divided by the other's, at each load; lines of files that are there."""
    files = {line.file: read_csv(results / line.file) for line in LINES}
    lines = [line for line in LINES if files[line.file]]
    if not lines:
        return "Not measured yet: `make bench`."
    header = ["ours", "beside", *(f"{load} at once" for load in LOADS), "commit"]
    table = markdown(header, [cells(line, files[line.file]) for line in lines])
    first = [files[line.file][0] for line in lines]
    machines = " or ".join(dict.fromkeys(row["machine"] for row in first))
    return f"{table}\n\n{machines}, {first[0]['versions']}."


def cells(line: Line, rows: Rows) -> list[str]:
    rows = [row for row in rows if line.where.items() <= row.items()]
    compared = []
    for load in LOADS:
        here = [row for row in rows if row["concurrency"] == load]
        compared.append(ratios(of(here, line.ours), of(here, line.other), "tokens_per_s"))
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return [line.title, line.other_title, *compared, f"[{commits}](bench/results/{line.file})"]


TYPES = {"string": "a text", "boolean": "a flag", "array": "a list", "object": "an object"}


def options_table(kind: type) -> str:
    fields = TypeAdapter(kind).json_schema()["properties"]
    lines = [
        [
            f"`{name}`",
            allowed(one),
            "-" if one.get("default") in (None, []) else f"`{str(one['default']).lower()}`",
            " ".join(one["description"].split()),
        ]
        for name, one in fields.items()
    ]
    return markdown(["option", "allowed", "default", "meaning"], lines)


def allowed(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema of a field allows, in words; null is its default."""
    if "anyOf" in schema:
        return " or ".join(allowed(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if schema["type"] in TYPES:
        return TYPES[schema["type"]]
    above, low, high = (schema.get(k) for k in ("exclusiveMinimum", "minimum", "maximum"))
    least = f"{low:g}" if above is None else f"above {above:g}"
    return f"at least {least}" if high is None else f"{least} to {high:,g}"


SECTIONS: dict[str, Callable[[Path], str]] = {
    "comparison": comparison,
    "serving": Section(SERVING, "make bench", load_tables),
    "context": profile.BEHIND_PROMPTS,
    "step-time": profile.STEP_TIME,
    "ways": Section(
        NEMOTRON,
        f"python -m bench.serve --model checkpoints/tiny-nemotron --file {NEMOTRON}",
        contestant_table,
    ),
    "soak": soak.SECTION,
    "drafting": Section(DRAFTER, "python -m bench.drafter", drafter.tables),
    "passes": Section("passes.csv", "python -m bench.drafter --passes 2 4", drafter.tables),
    "smollm2": Section(SMOLLM2, "python -m bench.drafter", drafter.tables),
    "remote": remote.SECTION,
    "decisions": decisions.SECTION,
}
# Tables of options come from the models that check them.
OPTIONS: dict[str, type] = {
    "drafter-options": DrafterOptions,
    "remote-options": RemoteOptions,
    "decision-options": DecisionOptions,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("pages", type=Path, nargs="*", default=pages(ROOT))
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if they disagree")
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
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def document(text: str, results: Path, to_root: str = "") -> str:
    """``to_root`` leads from the folder of the page to the top of the repository."""

    def written(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        section = options_table(OPTIONS[name]) if name in OPTIONS else SECTIONS[name](results)
        return f"{begin}{LINK.sub(f']({to_root}', section)}\n{end}"

    return MARKED.sub(written, text)


if __name__ == "__main__":
    sys.exit(main())

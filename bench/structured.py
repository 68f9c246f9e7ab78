"""Structured outputs: valid and right answers, and denoise steps.

    python -m bench.structured                  # the table of docs/structured.md
    python -m bench.structured --num 20

Two servers answer the same held-out questions in forms that the models were, or were not, trained
to write (``bench.structured_tasks``): tiny-dllm with our plugin, and its autoregressive twin
tiny-ar with vLLM's own masks from left to right.

Writes ``structured.csv``, one row a form.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.context import (
    RESULTS,
    ROOT,
    Rows,
    as_text,
    progress,
    provenance,
    reporting_failures,
    write_csv,
)
from bench.servers import SERVE_FLAGS, Server, ServerOptions
from bench.structured_tasks import FORMATS, Format, is_valid_answer
from bench.tables import Table, markdown, section
from dllm.tasks.suite import Question, questions
from dllm.tools.client import Connection, connect
from dllm.tools.eval_report import Answer
from dllm.tools.eval_server import denoise_counts

MODELS = {"tiny-dllm": ROOT / "checkpoints/tiny-dllm", "tiny-ar": ROOT / "checkpoints/tiny-ar"}
MAX_TOKENS = 96
CONCURRENCY = 8
SEED = 100


@dataclass(frozen=True)
class Score:
    """What one model made of the questions of one form."""

    form: str
    model: str
    num_questions: int
    num_valid: int
    num_right: int
    steps: int | None
    blocks: int | None


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the CSV files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=50, help="questions of each form (50)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    options = parser.parse_args(arguments)
    about = provenance("bench.structured")
    scores: list[Score] = []
    with tempfile.TemporaryDirectory() as folder:
        for model, path in MODELS.items():
            flags = (*SERVE_FLAGS, "--max-num-seqs", "32")
            log = Path(folder) / f"{model}.log"
            with Server(ServerOptions(model, str(path), flags), log) as server:
                server.start()
                server.wait_until_ready()
                connection = connect(server.url, None)
                for form in FORMATS:
                    scores.append(score(connection, model, form, options.num))
                    progress(str(scores[-1]))
    rows = [asdict(one) | about for one in scores]
    write_csv(options.results / "structured.csv", rows)
    print(markdown(table(as_text(rows))))
    return 0


def score(connection: Connection, model: str, name: str, count: int) -> Score:
    """Ask for answers in one form."""
    form = FORMATS[name]
    asked = asked_of(form, count)
    texts, steps, blocks = ask(connection, form.body, asked)
    is_valid = [is_valid_answer(form, text) for text in texts]
    is_right = [
        valid and form.is_right(question, text)
        for valid, question, text in zip(is_valid, asked, texts, strict=True)
    ]
    return Score(name, model, len(asked), sum(is_valid), sum(is_right), steps, blocks)


def asked_of(form: Format, count: int) -> list[Question]:
    """Held-out questions that can be answered in this form."""
    drawn = questions([form.family], "heldout", 4 * count)
    return list(itertools.islice(filter(form.concerns, drawn), count))


def ask(
    connection: Connection, body: Any, asked: Sequence[Question]
) -> tuple[list[str], int | None, int | None]:
    """(texts, denoise steps, blocks); steps and blocks are None for tiny-ar."""

    def one(index: int) -> Answer:
        completion = connection.client.chat.completions.create(
            model=connection.model,
            messages=[{"role": "user", "content": asked[index].prompt}],
            max_tokens=MAX_TOKENS,
            seed=SEED + index,
            extra_body=body,
        )
        used = completion.usage
        text = completion.choices[0].message.content or ""
        return Answer(text, used.completion_tokens if used else None)

    before = connection.metrics()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(one, range(len(asked))))
    steps, blocks = denoise_counts(before, connection.metrics(), answers)
    return [answer.text for answer in answers], steps, blocks


# --- tables --------------------------------------------------------------------------------------


def table(rows: Rows) -> Table:
    """One line a form: both models."""
    heading = ["form of the answer", "tiny-dllm valid", "right", "denoise steps a block"]
    heading += ["tiny-ar valid", "right"]
    lines = []
    for form in dict.fromkeys(row["form"] for row in rows):
        of_model = {row["model"]: row for row in rows if row["form"] == form}
        ours, theirs = of_model["tiny-dllm"], of_model["tiny-ar"]
        lines.append([form, *counts(ours), steps_per_block(ours), *counts(theirs)])
    return heading, lines


def counts(row: dict[str, str]) -> list[str]:
    """How many answers are valid, and how many right."""
    return [f"{row[name]} / {row['num_questions']}" for name in ("num_valid", "num_right")]


def steps_per_block(row: dict[str, str]) -> str:
    """A dash where the server counts none."""
    return f"{int(row['steps']) / int(row['blocks']):.2f}" if row["steps"] else "-"


def structured(results: Path) -> str:
    """Section of docs/structured.md."""
    return section(
        results / "structured.csv", "python -m bench.structured", lambda rows: markdown(table(rows))
    )


if __name__ == "__main__":
    sys.exit(main())

"""Structured outputs: valid and right answers, and denoise steps.

    python -m bench.structured [--num 20]       # the table of docs/structured.md

Two servers answer the same held-out questions in forms that the models were, or were not, trained
to write: tiny-dllm with our plugin, and its autoregressive twin tiny-ar with vLLM's own masks from
left to right. Writes ``structured.csv``, one row a form and model.
"""

import argparse
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

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
from bench.tables import Table, markdown, section
from dllm.tasks.suite import Question, questions
from dllm.tools.client import Connection, connect
from dllm.tools.eval_report import Answer
from dllm.tools.eval_server import denoise_counts

MODELS = ("tiny-dllm", "tiny-ar")
MAX_TOKENS, CONCURRENCY, SEED = 96, 8, 100
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


@dataclass(frozen=True)
class Form:
    """A form of answers.

    Attributes:
        family: of the questions.
        rule: a JSON schema, or a regular expression.
        is_right: whether a valid answer (JSON, or the text) is the known one (the same).
        word: that a question has to have, to be answered in this form.
    """

    family: str
    rule: dict[str, Any] | str
    is_right: Callable[[Any, Any], bool]
    word: str = ""

    @property
    def body(self) -> dict[str, Any]:
        """Of a request."""
        if isinstance(self.rule, str):
            return {"structured_outputs": {"regex": self.rule}}
        schema = {"name": "answer", "schema": self.rule}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}

    def judged(self, question: Question, text: str) -> tuple[bool, bool]:
        """Whether a text has the form, and whether it is also right."""
        known = min(question.accepted)
        if isinstance(self.rule, str):
            is_valid = re.fullmatch(self.rule, text) is not None
            return is_valid, is_valid and self.is_right(text, known)
        try:
            found = json.loads(text)
            jsonschema.validate(found, self.rule)
        except (ValueError, jsonschema.ValidationError):
            return False, False
        return True, self.is_right(found, json.loads(known))


def _closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


AGE = {"type": "string", "pattern": "^[0-9]{2}$"}
FORMS: dict[str, Form] = {
    "as trained": Form("extract", _closed(name=TEXT, age=WHOLE, city=TEXT), lambda a, b: a == b),
    "age as a string": Form(
        "extract",
        _closed(name=TEXT, age=AGE, city=TEXT),
        lambda a, b: a | {"age": int(a["age"])} == b,
    ),
    "two of three keys": Form(
        "extract", _closed(name=TEXT, city=TEXT), lambda a, b: a == {k: b[k] for k in a}
    ),
    "keys in another order": Form(
        "extract", _closed(city=TEXT, age=WHOLE, name=TEXT), lambda a, b: a == b
    ),
    "one level deeper": Form(
        "extract",
        _closed(person=_closed(name=TEXT, age=WHOLE, city=TEXT)),
        lambda a, b: a["person"] == b,
    ),
    "dates with slashes": Form(
        "convert",
        r"[0-9]{4}/(0[1-9]|1[0-2])/[0-3][0-9]",
        lambda a, b: a.replace("/", "-") == b,
        "ISO",
    ),
    "a word in front": Form("compare", r"Answer: [A-Z][a-z]+\.", lambda a, b: a == f"Answer: {b}."),
}


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the CSV file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=50, help="questions of each form (50)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    options = parser.parse_args(arguments)
    about = provenance("bench.structured")
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            flags = (*SERVE_FLAGS, "--max-num-seqs", "32")
            served = ServerOptions(model, str(ROOT / "checkpoints" / model), flags)
            with Server(served, Path(folder) / f"{model}.log") as server:
                server.start()
                server.wait_until_ready()
                connection = connect(server.url, None)
                for name in FORMS:
                    rows.append(score(connection, model, name, options.num) | about)
                    progress(f"{model}, {name}")
    write_csv(options.results / "structured.csv", rows)
    print(markdown(table(as_text(rows))))
    return 0


def score(connection: Connection, model: str, name: str, count: int) -> dict[str, object]:
    """Ask for answers in one form."""
    form = FORMS[name]
    drawn = (q for q in questions([form.family], "heldout", 4 * count) if form.word in q.prompt)
    asked = list(itertools.islice(drawn, count))

    def one(index: int) -> Answer:
        completion = connection.client.chat.completions.create(
            model=connection.model,
            messages=[{"role": "user", "content": asked[index].prompt}],
            max_tokens=MAX_TOKENS,
            seed=SEED + index,
            extra_body=form.body,
        )
        used = completion.usage
        text = completion.choices[0].message.content or ""
        return Answer(text, used.completion_tokens if used else None)

    before = connection.metrics()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(one, range(len(asked))))
    steps, blocks = denoise_counts(before, connection.metrics(), answers)
    judged = [form.judged(q, a.text) for q, a in zip(asked, answers, strict=True)]
    return {
        "form": name,
        "model": model,
        "num_questions": len(asked),
        "num_valid": sum(valid for valid, _ in judged),
        "num_right": sum(right for _, right in judged),
        "steps": steps,
        "blocks": blocks,
    }


def table(rows: Rows) -> Table:
    """One line a form: both models."""
    lines = []
    for form in dict.fromkeys(row["form"] for row in rows):
        ours, theirs = (
            next(r for r in rows if (r["form"], r["model"]) == (form, one)) for one in MODELS
        )
        steps = f"{int(ours['steps']) / int(ours['blocks']):.2f}" if ours["steps"] else "-"
        counts = [
            [f"{row[name]} / {row['num_questions']}" for name in ("num_valid", "num_right")]
            for row in (ours, theirs)
        ]
        lines.append([form, *counts[0], steps, *counts[1]])
    heading = ["form of the answer", "tiny-dllm valid", "right", "denoise steps a block"]
    return [*heading, "tiny-ar valid", "right"], lines


def structured(results: Path) -> str:
    """Section of docs/structured.md."""
    path, command = results / "structured.csv", "python -m bench.structured"
    return section(path, command, lambda rows: markdown(table(rows)))


if __name__ == "__main__":
    sys.exit(main())

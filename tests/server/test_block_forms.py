"""The table of docs/structured.md: answers of trained models with blocks, in given forms.

Each form is asked for beside free text on the same held-out questions. All answers have to be
valid; ``-s`` prints how many are right, and in how many steps.
"""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from dllm.tasks.suite import Question, questions
from dllm.tools.eval_server import PASSES
from tests.support.server_harness import MODEL, Server

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
NUM = 25
FLAGS = (
    f"--served-model-name={MODEL}",
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=512",
    "--max-num-seqs=8",
)


class Form(NamedTuple):
    """Of answers: which questions, in what form, and when a valid answer is right."""

    family: str
    rule: dict[str, Any] | str  # a JSON schema, or a regular expression
    is_right: Callable[[Any, Any], bool]  # of the answer and the known one, both read
    word: str = ""  # that the questions have

    @property
    def body(self) -> dict[str, Any]:
        kind = "regex" if isinstance(self.rule, str) else "json"
        return {"structured_outputs": {kind: self.rule}}

    def judged(self, question: Question, text: str) -> bool:
        """Whether a valid answer is right; one that is not valid raises."""
        known = min(question.accepted)
        if isinstance(self.rule, str):
            assert re.fullmatch(self.rule, text), text
            return self.is_right(text, known)
        found = json.loads(text)
        jsonschema.validate(found, self.rule)
        return self.is_right(found, json.loads(known))


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
AGE = {"type": "string", "pattern": "^[0-9]{2}$"}
FORMS = {
    "as trained": Form("extract", closed(name=TEXT, age=WHOLE, city=TEXT), lambda a, b: a == b),
    "age as a string": Form(
        "extract",
        closed(name=TEXT, age=AGE, city=TEXT),
        lambda a, b: a | {"age": int(a["age"])} == b,
    ),
    "two of three keys": Form(
        "extract", closed(name=TEXT, city=TEXT), lambda a, b: a == {key: b[key] for key in a}
    ),
    "keys in another order": Form(
        "extract", closed(city=TEXT, age=WHOLE, name=TEXT), lambda a, b: a == b
    ),
    "one level deeper": Form(
        "extract",
        closed(person=closed(name=TEXT, age=WHOLE, city=TEXT)),
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


@pytest.fixture(
    scope="module",
    params=[("tiny-sdar", 32), ("tiny-sdar", 8), ("tiny-sdar", 4), ("tiny-llada2", 32)],
    ids=lambda given: f"{given[0]}-{given[1]}",
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int, Server]]:
    name, block = request.param
    log = tmp_path_factory.mktemp(name) / "log"
    blocks = f'--hf-overrides={{"block_size": {block}}}'
    with Server(CHECKPOINTS / name, log, (*FLAGS, blocks)) as running:
        running.wait_until_ready()
        yield name, block, running


def test_every_answer_has_its_form(served):
    name, block, server = served
    for title, form in FORMS.items():
        drawn = (q for q in questions([form.family], "heldout", 4 * NUM) if form.word in q.prompt)
        asked = list(islice(drawn, NUM))
        texts, free_steps = answers(server, block, asked, {})
        free = sum(q.is_correct(text) for q, text in zip(asked, texts, strict=True))
        texts, steps = answers(server, block, asked, form.body)
        right = sum(form.judged(q, text) for q, text in zip(asked, texts, strict=True))
        cells = (f"{free} / {len(asked)}", f"{free_steps:.2f}", f"{right}", f"{steps:.2f}")
        print(f"| {name}, B = {block} | {title} |", " | ".join(cells), "|")
        if title == "as trained":
            assert right == free


def answers(
    server: Server, block: int, asked: list[Question], body: dict[str, Any]
) -> tuple[list[str], float]:
    """(greedy answers, denoise steps a block)."""

    def one(question: Question) -> tuple[str, int]:
        completion = server.client().chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question.prompt}],
            max_tokens=96,
            temperature=0,
            extra_body=body,
        )
        start = completion.usage.prompt_tokens
        end = start + completion.usage.completion_tokens
        return completion.choices[0].message.content or "", -(-end // block) - start // block

    (before,) = server.metrics(PASSES)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, asked))
    (after,) = server.metrics(PASSES)
    return [text for text, _ in found], (after - before) / sum(blocks for _, blocks in found)

"""Figures of docs/structured.md and docs/streaming.md, of trained models; ``-s`` prints them.

Answers in given forms: each form is asked for beside free text on the same held-out questions. All
answers have to be valid; what is printed is how many are right, and in how many steps. And holes:
the middle third of held-out answers, filled in within a block.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jsonschema
import openai
import pytest
from tokenizers import Tokenizer

from bench.toys.suite import FAMILIES, Question, questions
from tests.support.server_harness import CHECKPOINTS, COMMON_FLAGS, MODEL, Server, ask_chat, serving

pytest_plugins = ["tests.support.sdar_server"]

pytestmark = pytest.mark.slow

PASSES = "vllm:diffusion_num_denoising_steps_total"


class Served(NamedTuple):
    """A server, its checkpoint and the tokens of its blocks."""

    server: Server
    name: str
    block: int


SERVERS = [
    pytest.param((name, block), id=f"{name}-{block}")
    for name, block in (("tiny-sdar", 32), ("tiny-llada2", 32), ("tiny-sdar", 8), ("tiny-sdar", 4))
]


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    name, block = request.param
    if request.param == ("tiny-sdar", 32):
        yield Served(request.getfixturevalue("sdar_server"), name, block)
        return
    flags = (*COMMON_FLAGS, f'--hf-overrides={{"block_size": {block}}}')
    for server in serving(CHECKPOINTS / name, tmp_path_factory, flags):
        yield Served(server, name, block)


# --- forms ----------------------------------------------------------------------------------------

NUM = 25


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


@pytest.mark.parametrize("served", SERVERS, indirect=True)
def test_every_answer_has_its_form(served):
    server, name, block = served
    free_answers: dict[tuple[str, str], tuple[list[str], float]] = {}  # many forms ask the same
    for title, form in FORMS.items():
        drawn = (q for q in questions([form.family], "heldout", 4 * NUM) if form.word in q.prompt)
        asked = list(islice(drawn, NUM))
        kind = form.family, form.word
        if kind not in free_answers:
            free_answers[kind] = answers(server, block, asked, {})
        texts, free_steps = free_answers[kind]
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
        options = {"max_tokens": 96, "temperature": 0, "extra_body": body}
        completion = ask_chat(server.client(), question.prompt, **options)
        start = completion.usage.prompt_tokens
        end = start + completion.usage.completion_tokens
        return completion.choices[0].message.content or "", -(-end // block) - start // block

    (before,) = server.metrics(PASSES)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, asked))
    (after,) = server.metrics(PASSES)
    return [text for text, _ in found], (after - before) / sum(blocks for _, blocks in found)


# --- holes ----------------------------------------------------------------------------------------

TOKENIZER = Tokenizer.from_file(str(CHECKPOINTS / "tiny-sdar" / "tokenizer.json"))  # of both models


@pytest.mark.parametrize("served", SERVERS[:2], indirect=True)
def test_holes_that_fit_their_block_are_found(served):
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(partial(filled, served), questions(FAMILIES, "heldout", 20)):
            counts.update(found)
    print(f"\n{served.name}: {dict(counts)}")
    # Trained models are sometimes wrong; a broken search finds few.
    assert counts["found"] > 0.9 * counts["fits"] > 0
    assert counts["refused"] > 0


def filled(served: Served, question: Question) -> list[str]:
    """What happened to a question whose answer lacks its middle third."""
    server, _, block = served
    ids = TOKENIZER.encode(question.answer, add_special_tokens=False).ids
    first, last = len(ids) // 3, len(ids) - len(ids) // 3
    suffix = TOKENIZER.decode(ids[last:])
    if first == 0 or TOKENIZER.encode(suffix, add_special_tokens=False).ids != ids[last:]:
        return ["short, or not spelled the same way"]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": question.prompt}]}
    prompt = server.ask("/tokenize", asked)["tokens"] + ids[:first]
    # Hole, suffix and the token that ends the answer.
    seen = ["fits"] if len(ids) - first + 1 <= block - len(prompt) % block else ["does not fit"]
    try:
        (choice,) = (
            server.client()
            .completions.create(
                model=MODEL,
                prompt=prompt,
                suffix=suffix,
                max_tokens=16,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            .choices
        )
    except openai.BadRequestError as error:
        assert error.param == "suffix" and seen == ["does not fit"], error
        return [*seen, "refused"]
    if choice.token_ids != ids[first:last]:
        return seen
    return [*seen, "found"]

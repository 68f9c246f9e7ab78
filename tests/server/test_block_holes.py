"""The figures of docs/streaming.md: the middle third of held-out answers, filled in within a block.

``-s`` prints them. A server serves trained models with blocks of 32.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tokenizers import Tokenizer

from dllm.tasks.suite import FAMILIES, Question, questions
from tests.server.test_block_forms import CHECKPOINTS, FLAGS
from tests.support.server_harness import MODEL, Server

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

BLOCK = 32
TOKENIZER = Tokenizer.from_file(str(CHECKPOINTS / "tiny-sdar" / "tokenizer.json"))  # of both models


@pytest.fixture(scope="module", params=["tiny-sdar", "tiny-llada2"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log: Path = tmp_path_factory.mktemp(request.param) / "log"
    with Server(CHECKPOINTS / request.param, log, FLAGS) as running:
        running.wait_until_ready()
        yield running


def test_holes_that_fit_their_block_are_found(server, request):
    counts: Counter[str] = Counter()
    for question in questions(FAMILIES, "heldout", 20):
        counts.update(filled(server, question))
    print(f"\n{request.node.name}: {dict(counts)}")
    # Trained models are sometimes wrong; a broken search finds few.
    assert counts["found"] > 0.9 * counts["fits"] > 0
    assert counts["refused"] > 0


def filled(server: Server, question: Question) -> list[str]:
    """What happened to a question whose answer lacks its middle third."""
    ids = TOKENIZER.encode(question.answer, add_special_tokens=False).ids
    first, last = len(ids) // 3, len(ids) - len(ids) // 3
    suffix = TOKENIZER.decode(ids[last:])
    if first == 0 or TOKENIZER.encode(suffix, add_special_tokens=False).ids != ids[last:]:
        return ["short, or not spelled the same way"]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": question.prompt}]}
    prompt = json.loads(server.post("/tokenize", asked).text)["tokens"] + ids[:first]
    # Hole, suffix and the token that ends the answer.
    seen = ["fits"] if len(ids) - first + 1 <= BLOCK - len(prompt) % BLOCK else ["does not fit"]
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

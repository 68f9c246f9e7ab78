"""Requests with grammars in the API server: they wait for their turn, or are refused."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.reasoning import ReasoningParserManager

from dllm.api.http_request import HttpRequest, handling
from dllm.grammar.compile import MOST_AT_ONCE, MOST_WAITING, Grammars, Spec, Tokens
from dllm.patches import grammars as patches
from tests.support.patience import HANG_S

MOST = MOST_AT_ONCE + MOST_WAITING


class Held:
    """Children that compile when a test says so."""

    def __init__(self):
        self.may_go = threading.Event()
        self.made: list[str] = []
        config = SimpleNamespace(reasoning_parser="")
        processor = SimpleNamespace(structured_outputs_config=config)
        self.engine = SimpleNamespace(input_processor=processor)
        self.grammars = Grammars(lambda: Tokens([b"a"], {}), children=self)

    def table(self, asked):
        self.made.append(asked["text"])
        assert self.may_go.wait(HANG_S)
        return asked["text"].encode()


@pytest.fixture
def held(monkeypatch):
    made = Held()
    begin = made.grammars.begin
    monkeypatch.setattr(patches, "_begin", lambda engine, spec: begin(spec, frozenset([1])))
    yield made
    made.may_go.set()


def request(held, text: str) -> asyncio.Task:
    serialized = patches.serialized_grammar(held.engine, Spec("regex", text), "", None, {})
    return asyncio.create_task(serialized)


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test, HANG_S))


def test_so_many_wait_and_further_ones_are_refused(held):
    async def test():
        requests = [request(held, f"a{{{number}}}") for number in range(MOST)]
        await asyncio.sleep(0)
        for number in range(6):
            with pytest.raises(VLLMValidationError, match="16 other grammars wait"):
                await request(held, f"b{{{number}}}")
        assert not any(one.done() for one in requests)
        assert len(held.made) <= MOST_AT_ONCE
        held.may_go.set()
        assert all(await asyncio.gather(*requests))
        assert await request(held, "b")  # not remembered
        assert len(held.made) == MOST + 1

    run(test())


def test_one_in_memory_does_not_wait(held):
    async def test():
        held.may_go.set()
        assert await request(held, "known")
        held.may_go.clear()
        requests = [request(held, f"a{{{number}}}") for number in range(MOST)]
        await asyncio.sleep(0)
        assert await request(held, "known")
        assert not any(one.done() for one in requests)
        held.may_go.set()
        await asyncio.gather(*requests)

    run(test())


def test_equal_requests_have_one_turn_and_none_is_ended_with_another(held):
    async def test():
        requests = [request(held, "a") for _ in range(2 * MOST)]
        await asyncio.sleep(0)
        requests[0].cancel()
        requests[-1].cancel()
        other = request(held, "b")
        held.may_go.set()
        assert all(await asyncio.gather(*requests[1:-1], other))
        assert sorted(held.made) == ["a", "b"]

    run(test())


@pytest.mark.parametrize("vocabulary", [{}, {"</t>": 2}], ids=["no token", "none of the model"])
def test_a_stream_waits_for_all_that_may_refuse_it(held, monkeypatch, vocabulary):
    """Also for thoughts that no token ends: behind HTTP 200 nothing can be refused."""

    def parser(tokenizer: Any) -> Any:
        return SimpleNamespace(reasoning_end_str="</t>", is_reasoning_end=lambda ids: False)

    monkeypatch.setattr(ReasoningParserManager, "get_reasoning_parser", lambda name: parser)
    monkeypatch.setattr(patches, "needs_table", lambda *request: True)
    processor = held.engine.input_processor
    processor.structured_outputs_config = SimpleNamespace(
        reasoning_parser="some", enable_in_reasoning=False
    )
    processor.tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary)
    processor.model_config = SimpleNamespace(get_vocab_size=lambda: 2)
    held.may_go.set()

    async def test(*reasoning: Any):
        one = HttpRequest(asyncio.Semaphore())
        prompt = {"prompt_token_ids": [1]}
        with handling(one):
            patches.wait_before_the_stream(held.engine, prompt, Spec("regex", "a"), reasoning)
            await one.compilations[0]()

    run(test(True, {}))
    with pytest.raises(VLLMValidationError, match="not one token"):
        run(test(None, {}))

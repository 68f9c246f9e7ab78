"""``replaces``: ours is called with vLLM's function, and a base keeps its own."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest

from dllm.patches.replace import replaces
from dllm.patches.served import Server


class Theirs:
    def method(self, given=1):
        return self, given

    async def iterated(self):
        yield "theirs"

    def made(self, model_config=None):
        return "theirs"


class Owner(Theirs):
    """What it inherits is replaced."""


def test_ours_is_called_with_the_function_behind_it():
    @replaces(Owner)
    def method(theirs, *args, **options):
        return [theirs(*args, **options)] * 2

    one, base = Owner(), Theirs()
    assert one.method(given=3) == [(one, 3)] * 2 and base.method() == (base, 1)
    assert inspect.signature(one.method) == inspect.signature(base.method)


def test_an_async_generator_is_iterated_as_before():
    @replaces(Owner)
    async def iterated(theirs, self):
        async for each in theirs(self):
            yield "ours", each

    async def answers():
        return [each async for each in Owner().iterated()]

    assert asyncio.run(answers()) == [("ours", "theirs")]


@pytest.mark.parametrize(
    ("given", "whose"),
    [((), "theirs"), (("Qwen3ForCausalLM",), "theirs"), (("SDARForCausalLM",), "ours")],
)
def test_ours_is_called_for_models_of_ours_alone(given, whose):
    @replaces(Owner, of=Server.CANVASES)
    def made(theirs, self, model_config=None):
        return "ours"

    assert Owner().made(*(SimpleNamespace(architecture=name) for name in given)) == whose

"""``replaces``: ours is called with vLLM's function, and what it replaces stays of its kind."""

import asyncio
import inspect

from dllm.patches.replace import replaces


class Theirs:
    @property
    def kept(self):
        return "theirs"

    @classmethod
    def of_class(cls, given=1):
        return cls, given

    def method(self, given=1):
        return self, given

    async def iterated(self):
        yield "theirs"


class Owner(Theirs):
    """What it inherits is replaced; the base keeps its own."""


def test_each_kind_is_called_with_the_function_behind_it():
    for name in ("kept", "of_class", "method"):
        replaces(Owner, name)(lambda theirs, *args, **options: [theirs(*args, **options)] * 2)
    one = Owner()
    assert (one.kept, Theirs().kept) == (["theirs"] * 2, "theirs")
    assert Owner.of_class(given=3) == one.of_class(3) == [(Owner, 3)] * 2
    assert one.method(given=3) == [(one, 3)] * 2
    assert inspect.signature(one.method) == inspect.signature(Theirs().method)


def test_an_async_generator_is_iterated_as_before():
    @replaces(Owner)
    async def iterated(theirs, self):
        async for each in theirs(self):
            yield "ours", each

    async def answers():
        return [each async for each in Owner().iterated()]

    assert asyncio.run(answers()) == [("ours", "theirs")]

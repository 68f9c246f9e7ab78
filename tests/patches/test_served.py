"""``derives``: an object that vLLM makes for a server of ours is of our class, and no other one."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from dllm.engine.derived import as_one_of
from dllm.patches.contract import CPU_WORKER
from dllm.patches.served import Server, derives, served_as


def config(architecture: str = "Qwen3ForCausalLM", worker: str = "theirs") -> Any:
    made = SimpleNamespace(
        model_config=SimpleNamespace(architecture=architecture),
        parallel_config=SimpleNamespace(worker_cls=worker),
    )
    made.served = served_as(made)
    return made


CANVASES = config("SDARForCausalLM")


@pytest.mark.parametrize(
    ("given", "whose"),
    [
        (CANVASES, Server.CANVASES),
        (config("NemotronLabsDiffusionForCausalLM"), Server.TOKENS),
        (config(worker=CPU_WORKER), Server.TARGET),
        (config(), None),
    ],
)
def test_whom_a_server_is(given, whose):
    assert served_as(given) is whose


@pytest.fixture
def derived() -> SimpleNamespace:
    class Theirs:
        def __init__(self, vllm_config: Any, number: int = 1) -> None:
            self.vllm_config, self.number = vllm_config, number

        def called(self) -> list[str]:
            return ["theirs"]

    class Special(Theirs):
        def called(self) -> list[str]:
            return ["special", *super().called()]

    class Ours(Theirs):
        def called(self) -> list[str]:
            return ["ours", *super().called()]

    derives(Theirs, {Server.CANVASES: Ours})
    return SimpleNamespace(Theirs=Theirs, Special=Special, Ours=Ours)


def test_a_server_of_ours_gets_ours_and_another_one_vllms(derived):
    ours = derived.Theirs(vllm_config=CANVASES, number=3)
    assert type(ours) is derived.Ours and ours.number == 3
    assert type(derived.Theirs(config())) is derived.Theirs
    assert type(copy.copy(ours)) is type(copy.deepcopy(ours)) is derived.Ours


def test_of_a_class_that_somebody_else_has_derived_ours_is_in_front(derived):
    both = derived.Special(CANVASES)
    assert isinstance(both, derived.Special) and type(both) is type(derived.Special(CANVASES))
    assert both.called() == ["ours", "special", "theirs"]
    assert derived.Special(config()).called() == ["special", "theirs"]


def test_a_single_class_is_for_all_servers():
    class Theirs:
        pass

    class Ours(Theirs):
        pass

    derives(Theirs, Ours)
    assert type(Theirs()) is type(Ours()) is Ours


def test_one_of_ours_has_what_vllms_has(derived):
    theirs = derived.Theirs(config(), 5)
    ours = as_one_of(derived.Ours, theirs)
    assert type(ours) is derived.Ours and vars(ours) == vars(theirs) and ours is not theirs

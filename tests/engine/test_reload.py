"""New weights in a running engine (vLLM's ``reload_weights``), as a trainer sends them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.engine.test_blocks import prompt
from tests.support.engine_harness import Engine, get_engine
from tests.support.family_checkpoints import LLADA2, NEMOTRON, SDAR, write

CONFIGS = {"sdar": SDAR, "llada2": LLADA2, "nemotron": NEMOTRON}
OPTIONS = dict(max_num_batched_tokens=250)  # no other test gets these engines
# Ids that every vocabulary has.
CONTEXTS = [[one % 500 for one in prompt(length, salt=length)] for length in (70, 21, 130)]


def answers(engine: Engine) -> list[list[int]]:
    greedy = dict(max_tokens=40, ignore_eos=True)
    params = [SamplingParams(seed=at, temperature=float(at), **greedy) for at in range(3)]
    return engine.generate(CONTEXTS, params)


def load(engine: Engine, folder: Path) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


@pytest.mark.parametrize("kind", ["gemma", "sdar", "llada2", "nemotron"])
def test_tokens_are_those_of_a_fresh_engine_and_the_way_back_is_exact(
    kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """An engine keeps pages of the weights before, until its prefix cache is reset."""
    if kind == "gemma":
        first, second = checkpoint(seed=3), checkpoint(seed=4)
    else:
        first, second = (write(tmp_path / str(seed), CONFIGS[kind], seed) for seed in range(2))
    engine = get_engine(first, **OPTIONS)
    before, after = answers(engine), answers(get_engine(second, **OPTIONS))
    assert before != after
    load(engine, second)
    assert answers(engine) not in (before, after), "there was no page of the weights before"
    engine.reset_prefix_cache()
    assert answers(engine) == after
    load(engine, first)
    engine.reset_prefix_cache()
    assert answers(engine) == before

"""Fast-dLLM v2, token for token, against a plain loop on transformers' Qwen2, in fp32.

The loop is written after arXiv 2509.26328, section 3.3, and ``generate`` of the checkpoints' remote
code: a causal pass over whole blocks gives the token behind them; the rest of a block is filled in
by sub-blocks, in each of which a step replaces all masks that it is sure of, and the surest one.
Here each pass computes the whole sequence, without a cache.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams

from dllm.models.unmasking.reference import load_model
from tests.support.async_engine import get_async_engine
from tests.support.engine_harness import Engine, get_engine
from tests.support.family_checkpoints import MASK
from tests.support.masked_pass import logits_of_all, random_prompts

SIZE = 32
# Around the ends of blocks and sub-blocks. The reference itself does not read a prompt of one whole
# block: it computes no causal pass up to there.
PROMPTS = random_prompts([1, 8, 31, 32, 33, 64, 75], seed=4)


class Setting(NamedTuple):
    threshold: float
    small_block_size: int

    def of_request(self) -> dict[str, float]:
        return {"diffusion_threshold": self.threshold, "diffusion_sub_block": self.small_block_size}


SETTINGS = {"default": Setting(0.9, 8), "many": Setting(0.5, 4), "one": Setting(1.0, 32)}


class Loop:
    """The model in transformers."""

    def __init__(self, path: Path) -> None:
        self.model = load_model(path)
        assert type(self.model).__name__ == "Qwen2ForCausalLM"

    def logits(self, ids: list[int]) -> torch.Tensor:
        """``[L, V]``, block-causal; row i is for token i + 1."""
        (logits,) = logits_of_all(self.model, [ids], [len(ids)], SIZE)
        logits[:, MASK] = -torch.inf
        return logits

    def answer(self, prompt: list[int], setting: Setting) -> tuple[list[int], int]:
        """Up to the end of the second block behind the prompt, and the number of passes."""
        ids, passes = list(prompt), 0
        end = (len(prompt) // SIZE + 2) * SIZE
        while len(ids) < end:
            if len(ids) % SIZE == 0:
                ids.append(int(self.logits(ids)[-1].argmax()))
                passes += 1
            ids += [MASK] * (-len(ids) % SIZE)
            for low in range(len(ids) - SIZE, len(ids), setting.small_block_size):
                passes += self.fill(ids, range(low, low + setting.small_block_size), setting)
        return ids[len(prompt) :], passes

    def fill(self, ids: list[int], sub_block: range, setting: Setting) -> int:
        passes = 0
        while masks := [at for at in sub_block if ids[at] == MASK]:
            p, tokens = self.logits(ids)[[at - 1 for at in masks]].softmax(-1).max(-1)
            passes += 1
            for n, at in enumerate(masks):
                if p[n] > setting.threshold or n == int(p.argmax()):
                    ids[at] = int(tokens[n])
        return passes


@pytest.fixture(scope="module")
def path(family: Callable[[str], Path]) -> Path:
    return family("fast-dllm")


@pytest.fixture(scope="module")
def loop(path: Path) -> Loop:
    return Loop(path)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return get_engine(path, max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def expected(loop: Loop) -> Callable[[str], list[tuple[list[int], int]]]:
    found: dict[str, Any] = {}

    def of(name: str) -> list[tuple[list[int], int]]:
        if name not in found:
            found[name] = [loop.answer(prompt, SETTINGS[name]) for prompt in PROMPTS]
        return found[name]

    return of


def params(prompt: list[int], **extra: Any) -> SamplingParams:
    num_tokens = 2 * SIZE - len(prompt) % SIZE
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, extra_args=extra)


def served(engine: Engine, **extra: Any) -> list[list[int]]:
    engine.reset_prefix_cache()
    return engine.generate(PROMPTS, [params(prompt, **extra) for prompt in PROMPTS])


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_the_loop(engine: Engine, expected: Any, name: str) -> None:
    """All prompts in one batch, which has no room for every canvas behind its prompt."""
    found = served(engine, **SETTINGS[name].of_request())
    assert found == [ids for ids, _ in expected(name)]
    assert name != "default" or found == served(engine)


def test_a_block_takes_the_passes_of_the_loop(engine: Engine, expected: Any) -> None:
    """The causal pass in front of a block is the first one of its canvas, too."""
    setting = SETTINGS["many"].of_request()
    for prompt, (tokens, passes) in list(zip(PROMPTS, expected("many"), strict=True))[-3:]:
        engine.reset_prefix_cache()
        with engine.watch() as watched:
            assert engine.generate([prompt], params(prompt, **setting)) == [tokens]
        (steps,) = watched.values()
        assert len(steps) == passes < len(tokens)


@pytest.mark.parametrize("schedule", ["separate", "asynchronous"])
def test_passes_of_their_own_give_the_same_tokens(path: Path, expected: Any, schedule: str) -> None:
    """A prompt or an emitted block in a pass in front of its canvas's: its last row is kept."""
    options: dict[str, Any] = {"max_num_batched_tokens": 256}
    if schedule == "asynchronous":
        engine = get_async_engine(path, **options)
    else:
        separate = {"dllm": {"separate_passes": True}}
        engine = get_engine(path, additional_config=separate, **options)
    found = served(engine, **SETTINGS["many"].of_request())
    assert found == [ids for ids, _ in expected("many")]

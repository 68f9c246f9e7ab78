"""Nemotron-Labs-Diffusion in vLLM's engine: canvases of masks that start where the prompt ends.

What it shares with DiffusionGemma (causal heads, commits, pins) and with the models with blocks
(how masks are replaced). Schedules are in ``test_scenarios``, numbers in ``test_nemotron_parity``,
grammars in ``test_family_grammars``.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from dllm.models.nemotron.reference import load_reference
from tests.engine.test_blocks import prompt
from tests.engine.test_grammars import KINDS, params, text_of
from tests.support.engine_harness import Engine, get_engine
from tests.support.family_checkpoints import MASK, NEMOTRON
from tests.support.nemotron_reference import logits_of

LENGTH = NEMOTRON["block_size"]


@pytest.fixture(scope="module")
def path(family: Callable[[str], Path]) -> Path:
    return family("nemotron")


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return get_engine(path, max_num_batched_tokens=256)


def of(blocks: int, **options) -> SamplingParams:
    extra = {"diffusion_threshold": 0.3} | options.pop("extra_args", {})
    options = {"temperature": 0, "ignore_eos": True, "extra_args": extra} | options
    return SamplingParams(max_tokens=blocks * LENGTH, **options)


def several() -> tuple[list[list[int]], list[SamplingParams]]:
    contexts = [prompt(length, salt=length) for length in (3, 32, 61, 150, 160)]
    return contexts, [of(3, seed=at, temperature=float(at % 2)) for at in range(len(contexts))]


def test_every_pin_is_emitted_wherever_the_prompt_ends(engine: Engine) -> None:
    places = {0: 40, 9: 300, LENGTH - 1: 41, LENGTH: 42, 2 * LENGTH + 5: 43}
    for mode in ("hold", "hint"):
        pins = {
            "diffusion_pin_at": [*places],
            "diffusion_pin_ids": [*places.values()],
            "diffusion_pin_mode": mode,
        }
        for tokens in engine.generate([prompt(21), prompt(50)], of(3, extra_args=pins)):
            assert {place: tokens[place] for place in places} == places


def test_a_canvas_is_as_wide_as_a_request_asks(engine: Engine) -> None:
    with engine.watch() as watched:
        engine.generate([prompt(40)], of(1, extra_args={"diffusion_canvas_length": 5}))
    (steps,) = watched.values()
    assert {len(step.canvas) for step in steps} == {5}


def test_logprobs_of_a_prompt_are_those_token_by_token(engine: Engine, path: Path) -> None:
    ids = prompt(60)
    (output,) = engine.outputs([ids], of(1, prompt_logprobs=0))
    logits = logits_of(load_reference(path), ids, len(ids))
    logits[:, MASK] = -torch.inf  # a mask is never an answer
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    found = [
        given[token].logprob
        for given, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    ]
    assert found == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_grammar_holds_beside_requests_without_one(engine: Engine) -> None:
    expected = engine.generate(*several())
    contexts, asked = several()
    bound = [params("json", 128, seed=1), params("regex", 128, temperature=0.0)]
    outputs = engine.outputs([*contexts, prompt(20), prompt(33)], [*asked, *bound])
    assert [list(one.outputs[0].token_ids) for one in outputs[:-2]] == expected
    for kind, output in zip(("json", "regex"), outputs[-2:], strict=True):
        assert KINDS[kind][1](text_of(engine, output.outputs[0]))

"""Nemotron-Labs-Diffusion against transformers' Ministral 3 and a plain loop, on random weights.

Prompts and finished canvases are seen causally, and a canvas sees itself whole, wherever it starts.
The loop computes the whole sequence in every step, under a 4-D mask. Positions go far beyond those
at which the scaling of queries and YaRN begin. ``test_backbones`` has the logits of every step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Ministral3ForCausalLM
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from dllm.models.unmasking.reference import DecodingRule, generate_blocks, load_model
from tests.support.engine_harness import Engine, get_engine
from tests.support.family_checkpoints import MASK
from tests.support.masked_pass import decoded, logits_of, random_prompts, sure
from tests.support.recorded_calls import record_calls

LENGTH, THRESHOLD = 32, 0.9
# Every length modulo 32, and longer ones, which are apart: the loop pads a batch to its longest.
PROMPTS = random_prompts([*range(1, 33), 64, 100, 201], seed=1)
BATCHES = [PROMPTS[:32], PROMPTS[32:]]
# A step holds a canvas of each of its requests; a long prompt is read in two.
OPTIONS = dict(max_num_seqs=12, max_num_batched_tokens=384, long_prefill_token_threshold=128)


@pytest.fixture(scope="module")
def path(family: Callable[[str], Path]) -> Path:
    return family("nemotron")


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return get_engine(path, **OPTIONS)


@pytest.fixture(scope="module")
def model(path: Path) -> Ministral3ForCausalLM:
    return load_model(path)


def looped(
    model: Ministral3ForCausalLM,
    prompts: list[list[int]],
    threshold: float = THRESHOLD,
    **options: Any,
) -> list[list[int]]:
    """The tokens of two canvases behind each prompt."""
    answers = decoded(model, prompts, LENGTH, MASK, sure(threshold), **options)
    return [answer.tokens for answer in answers]


def served(engine: Engine, prompts: list[list[int]], **extra: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=2 * LENGTH, temperature=0, ignore_eos=True, extra_args=extra)
    return engine.generate(prompts, params)


def test_tokens_are_those_of_the_loop(engine: Engine, model: Ministral3ForCausalLM) -> None:
    for some in BATCHES:
        assert served(engine, some) == looped(model, some)


@pytest.fixture(scope="module")
def causal(path: Path) -> Engine:
    """As Hugging Face's loop begins a canvas."""
    return get_engine(path, override_generation_config={"first_token": "causal"}, **OPTIONS)


def test_a_canvas_may_begin_with_the_causal_passs_token(
    causal: Engine, engine: Engine, model: Ministral3ForCausalLM
) -> None:
    for some in BATCHES:
        found = served(causal, some)
        assert found == looped(model, some, begins_causally=True)
        assert found != served(engine, some)


def test_a_canvas_that_begins_so_takes_a_pass_more(causal: Engine, monkeypatch) -> None:
    """Two canvases: the prompt and the first of them have passes of their own."""
    passes = record_calls(monkeypatch, causal.scheduler, "schedule")
    with causal.watch() as watched, causal.one_pass_a_step():
        served(causal, [PROMPTS[5]])
    (steps,) = watched.values()
    assert len(passes) == len(steps) + 2
    assert {step.causal_len for step in steps} == {0}


def test_first_tokens_follow_from_the_seed_and_a_grammar_begins_with_masks(causal: Engine) -> None:
    options = dict(max_tokens=2 * LENGTH, ignore_eos=True, temperature=1.0)
    drawn = [SamplingParams(seed=seed, **options) for seed in (1, 1, 2)]
    one, again, other = causal.generate([PROMPTS[3]] * 3, drawn)
    assert one == again != other
    structured = StructuredOutputsParams(regex="[0-9]{40}")
    (answer,) = causal.outputs(
        [PROMPTS[3]], SamplingParams(max_tokens=2 * LENGTH, structured_outputs=structured)
    )
    text = causal.llm.get_tokenizer().decode(answer.outputs[0].token_ids, skip_special_tokens=True)
    assert text.isdecimal() and len(text) == 40


def test_a_request_has_its_own_threshold(engine: Engine, model: Ministral3ForCausalLM) -> None:
    some = PROMPTS[::7]
    found = served(engine, some, diffusion_threshold=0.3)
    assert found == looped(model, some, 0.3)
    assert found != served(engine, some)


def test_the_reference_of_quantization_and_evaluation_is_this_loop(
    path: Path, model: Ministral3ForCausalLM
) -> None:
    some = PROMPTS[::11]
    found = generate_blocks(model, some, DecodingRule.of_checkpoint(path), 2 * LENGTH)
    rule = DecodingRule.of_checkpoint(path)
    loops = looped(model, some)
    for expected, answer in zip(loops, found.answers, strict=True):
        stop = next((i for i, token in enumerate(expected) if token in rule.stop_ids), 2 * LENGTH)
        assert answer[: stop + 1] == expected[: stop + 1]


def test_logprobs_of_a_prompt_are_those_token_by_token(engine, model) -> None:
    ids = PROMPTS[-1]
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (output,) = engine.outputs([ids], sampling)
    logits = logits_of(model, ids, len(ids))
    logits[:, MASK] = -torch.inf  # a mask is never an answer
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    found = [
        given[token].logprob
        for given, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    ]
    assert found == pytest.approx(expected.tolist(), abs=1e-4)

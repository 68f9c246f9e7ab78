"""Thinking budgets through vLLM's real engine: every thought ends where its budget does, or before.

Also where a model would never end a thought by itself. Preempted: ``test_drawn_scenarios``.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from tests.engine.test_parity import prompt
from tests.engine.test_sampling_engine import assert_seen
from tests.support.engine_models import Model
from tests.support.grammar_paths import as_on_a_gpu
from tests.support.tape_jobs import PARSER, write_with_thoughts

START, END = 7, 8  # under the names that PARSER reads
FOR_EVER = {START: -100.0, END: -100.0}  # the model begins and ends no thought
ENDS_AND_BEGINS = {START: 9.0, END: 9.0}  # again and again


@pytest.fixture(scope="module")
def model(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """With these names in its tokenizer."""
    path = tmp_path_factory.mktemp("thoughts") / "model"
    return replace(model, path=write_with_thoughts(model.path, path))


def full_thoughts(context: Sequence[int], answer: Sequence[int], budget: int) -> list[int]:
    """Where a thought of the answer has as many tokens as its budget, read from left to right.

    Raises:
        AssertionError: a thought goes on there.
    """
    begin, full = None, []
    for place, token in enumerate([*context, *answer], -len(context)):
        if place >= 0 and begin is not None and place - begin >= budget:
            assert token == END, (place, budget, answer)
            full.append(place)
        if token == START:
            begin = place + 1
        elif token == END:
            begin = None
    return full


def ends_of(answer: Sequence[int]) -> list[int]:
    return [place for place, token in enumerate(answer) if token == END]


def engine_of(model: Model, **options: Any) -> Any:
    return model.engine(reasoning_parser=PARSER, **options)


def budgets(model: Model) -> list[int]:
    return [0, 1, model.size - 1, model.size, 2 * model.size + 3]


def asked(model: Model, budget: int | None, blocks: float = 4, **options: Any) -> SamplingParams:
    return model.params(blocks, thinking_token_budget=budget, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_thought_without_end_ends_where_its_budget_does(model, temperature):
    """To the token, and once; whatever stands in the block in front of the canvas."""
    engine, how = engine_of(model), {"temperature": temperature, "logit_bias": FOR_EVER, "seed": 3}
    many = [asked(model, budget, 3, **how) for budget in budgets(model)]
    for tail in (0, model.size - 1):
        # A thought of two tokens is in the prompt.
        context = [*prompt(model.size + tail), START, 40, 41]
        for one, tokens in zip(many, engine.generate([context] * len(many), many), strict=True):
            budget = one.thinking_token_budget
            assert ends_of(tokens) == [max(budget - 2, 0)], (tail, budget)
            assert full_thoughts(context, tokens, budget) == ends_of(tokens)


def test_the_model_sees_the_end_from_the_first_step_on(model):
    engine, context = engine_of(model), [*prompt(model.size + 3), START]
    for budget in (1, model.size + 1):
        tokens, steps = engine.denoised(context, asked(model, budget, 3, logit_bias=FOR_EVER))
        assert tokens[budget] == END
        assert_seen({budget: END}, steps, context)


def test_without_a_budget_or_a_thought_nothing_is_held(model):
    engine = engine_of(model)
    contexts = [[*prompt(9), START], [*prompt(9), START, 40, END], prompt(9)]
    free = asked(model, None, logit_bias=FOR_EVER)
    bound = asked(model, 3, logit_bias=FOR_EVER)
    beyond = asked(model, 10**9, logit_bias=FOR_EVER)
    expected = engine.generate(contexts, free)
    assert engine.generate(contexts, beyond) == expected
    assert engine.generate(contexts[1:], bound) == expected[1:]
    assert all(not ends_of(tokens) for tokens in expected)


WAYS: dict[str, list[dict[str, Any]]] = {
    "sdar": [{"diffusion_max_steps": 1}, {"diffusion_strategy": "sequential"}],
    "llada2": [
        {"diffusion_editing": 1, "diffusion_editing_threshold": at, "diffusion_max_post_steps": 3}
        for at in (0.0, 0.01)
    ],
}


def test_thoughts_that_begin_and_end_on_a_canvas(model):
    """Where the model begins and ends them itself, too, and again behind an end that was held."""
    engine, held, own = engine_of(model), 0, 0
    for extra in [{}, *WAYS.get(model.name, [])]:
        for budget in (0, 2, 5, model.size):
            how = {"logit_bias": ENDS_AND_BEGINS, "extra_args": extra, "temperature": 1.0}
            contexts = [[*prompt(9 + at, salt=at), START] for at in range(4)]
            many = [asked(model, budget, seed=at, blocks=3, **how) for at in range(4)]
            for context, tokens in zip(contexts, engine.generate(contexts, many), strict=True):
                full = full_thoughts(context, tokens, budget)
                held, own = held + len(full), own + len(ends_of(tokens)) - len(full)
    assert held > 20 and own > 5


def test_logprobs_and_samples(model):
    """The held token has the logprob that the model gives it; each sample has its own thought."""
    engine, budget = engine_of(model), model.size + 2
    how = {"logit_bias": {START: -100.0, END: -20.0}, "logprobs": 1, "n": 2, "temperature": 1.0}
    (output,) = engine.outputs([[*prompt(9), START]], asked(model, budget, **how))
    first, second = output.outputs
    assert list(first.token_ids) != list(second.token_ids)
    for answer in (first, second):
        assert answer.token_ids[budget] == END
        assert len(answer.logprobs) == len(answer.token_ids)
        assert answer.logprobs[budget][END].logprob < -5
        assert answer.logprobs[budget][END].rank > 1


@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_grammar_begins_behind_the_budget(model, is_on_device, monkeypatch):
    """Whether the thought begins in the prompt or does not; or ends by itself."""
    engine = engine_of(model)
    if is_on_device:
        as_on_a_gpu(engine, monkeypatch)
    grammar = StructuredOutputsParams(regex="(ab|cd|ef){3,9}!")
    cases = [
        (budget, bias, begin)
        for budget in budgets(model)
        for bias, begin in ((FOR_EVER, [START]), (FOR_EVER, []), ({START: -100, END: 4}, [START]))
    ]
    many = [
        SamplingParams(
            max_tokens=100 + budget,
            seed=budget,
            thinking_token_budget=budget,
            logit_bias=bias,
            temperature=float(budget % 2),
            structured_outputs=grammar,
        )
        for budget, bias, _ in cases
    ]
    outputs = engine.outputs([[*prompt(10), *begin] for _, _, begin in cases], many)
    for (budget, bias, begin), output in zip(cases, outputs, strict=True):
        (answer,) = output.outputs
        tokens = list(answer.token_ids)
        (end,) = ends_of(tokens)
        assert end == budget if bias is FOR_EVER else end <= budget, (budget, begin)
        text = engine.llm.get_tokenizer().decode(tokens[end + 1 :], skip_special_tokens=True)
        assert answer.finish_reason == "stop" and re.fullmatch("(ab|cd|ef){3,9}!", text)


def test_it_is_counted(model):
    engine = engine_of(model)
    engine.scheduler._counts.clear()
    contexts = [[*prompt(9), START], [*prompt(9), START, END]]
    how = asked(model, 2, blocks=2, logit_bias=FOR_EVER)
    engine.generate(contexts, how)
    assert engine.scheduler._counts == {("thoughts_ended_by_budget", ""): 1}

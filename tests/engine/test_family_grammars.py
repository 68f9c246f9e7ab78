"""Structured outputs of every way to denoise, through vLLM's engine, with random weights.

Forms, and how an answer of each is judged, are those of ``test_grammars``. Edits and random
grammars: ``tests/models/test_unmasking_grammars.py``.
"""

from typing import Any

import pytest
import torch

from dllm.engine.grammars import DeviceGrammars
from dllm.grammar.device import TablePool
from dllm.models.unmasking.rule import STRATEGIES
from tests.engine.test_grammars import KINDS, params, shortest_text, text_of
from tests.engine.test_parity import CANVAS, prompt
from tests.support.engine_models import Model
from tests.support.grammar_paths import as_on_a_gpu
from tests.support.recorded_calls import record_calls

MAX_TOKENS = 128
OF_MASKS: list[dict[str, Any]] = [
    {},
    {"diffusion_max_steps": 1},
    {"diffusion_threshold": 0.0},
    {"diffusion_threshold": 1.0},
    {"diffusion_max_steps": 3, "diffusion_threshold": 0.3},
]
OF_STRATEGIES = [{"diffusion_strategy": at, "diffusion_entropy_bound": 2.0} for at in STRATEGIES]
EDITING = [
    {"diffusion_editing": 1, "diffusion_editing_threshold": at, "diffusion_max_post_steps": 3}
    for at in (0.0, 0.1, 0.9)
]
# What decides which tokens stay, and in which order.
STEPS: dict[str, list[dict[str, Any]]] = {
    "gemma": [{}, *({"diffusion_max_steps": steps} for steps in (1, 2, 7))],
    "sdar": OF_MASKS + OF_STRATEGIES,
    "llada2": OF_MASKS + EDITING,
    "nemotron": OF_MASKS,  # strategies are SDAR's
}
SAMPLING = [
    {"temperature": 0.0},
    {},
    {"temperature": 2.0, "top_k": 5},
    {"min_p": 0.2, "top_p": 0.5},
]


@pytest.fixture(scope="module")
def engine(model: Model) -> Any:
    return model.engine()


@pytest.fixture(scope="module")
def wide_engine(model: Model) -> Any:
    """For many requests that need not be alone: they take a quarter of the steps."""
    return model.engine(max_num_seqs=16, max_num_batched_tokens=1024)


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_a_text_of_the_grammar(wide_engine, model, kind):
    """Whatever decides the order of the tokens, each with half of the ways to sample them."""
    cases = [
        (extra, how)
        for at, extra in enumerate(STEPS[model.name])
        for how in (SAMPLING[at % 4], SAMPLING[(at + 2) % 4])
    ]
    asked = [
        params(kind, MAX_TOKENS, seed=seed, extra_args=extra, **how)
        for seed, (extra, how) in enumerate(cases)
    ]
    outputs = wide_engine.outputs([prompt(20 + at) for at in range(len(asked))], asked)
    for case, output in zip(cases, outputs, strict=True):
        (answer,) = output.outputs
        assert answer.finish_reason == "stop", case
        assert KINDS[kind][1](text_of(wide_engine, answer)), case


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_a_text_is_complete_if_it_can_be_and_else_a_beginning(engine, model, kind):
    """Budgets from one token to more than is needed; canvases of many widths, or behind tails."""
    shortest = shortest_text(engine, params(kind))
    budgets = [*range(1, shortest + 9), 3 * shortest, MAX_TOKENS - CANVAS]
    asked = [
        params(
            kind,
            budget,
            seed=budget,
            extra_args={} if model.has_blocks else {"diffusion_canvas_length": 1 + budget % 9},
        )
        for budget in budgets
    ]
    outputs = engine.outputs([prompt(9 + budget % 5) for budget in budgets], asked)
    for budget, output in zip(budgets, outputs, strict=True):
        (answer,) = output.outputs
        assert len(answer.token_ids) <= budget
        if budget >= shortest:
            assert KINDS[kind][1](text_of(engine, answer)), (budget, answer)
        else:
            assert answer.finish_reason == "length"


def test_a_stop_token_of_the_request_comes_only_where_the_text_is_complete(engine):
    """Its text is decoded as part of the answer."""
    stops = [35, 60]
    bias = {"stop_token_ids": stops, "logit_bias": {35: 9.0, 60: 9.0}}
    (output,) = engine.outputs([prompt(10)], params("json", MAX_TOKENS, **bias))
    (answer,) = output.outputs
    *tokens, last = answer.token_ids
    text = engine.llm.get_tokenizer().decode(tokens, skip_special_tokens=True)
    assert last in stops and not set(tokens) & set(stops) and KINDS["json"][1](text)


def test_states_on_the_device_give_the_same_tokens(engine, monkeypatch):
    """What a GPU does, with the search of a CPU in the place of its kernels."""
    asked = [params(kind, seed=seed) for seed, kind in enumerate(KINDS)] + [params(None, seed=9)]
    contexts = [prompt(15, salt=seed) for seed in range(len(asked))]
    expected = engine.generate(contexts, asked)
    state, on_device = engine.runner.model_state, as_on_a_gpu(engine, monkeypatch)
    written = record_calls(monkeypatch, TablePool, "_write")
    memory = {name: part.data_ptr() for name, part in tensors_of(on_device)}
    few = slice(state.max_num_reqs)
    for _ in range(2):
        assert engine.generate(contexts[few], asked[few]) == expected[few]
    assert len(written) == len([*KINDS][few]), "each goes there once"
    assert engine.generate(contexts, asked) == expected
    assert memory == {name: part.data_ptr() for name, part in tensors_of(on_device)}
    assert engine.generate([prompt(9)], [params(None, max_tokens=4)])
    assert not any(on_device.slots), "a request that has ended has no grammar"


def tensors_of(on_device: DeviceGrammars) -> list[tuple[str, torch.Tensor]]:
    """The memory of all tables."""
    fields = on_device._pool.place([])[0]._asdict().items()
    return [(name, part) for name, part in fields if isinstance(part, torch.Tensor)]


def test_logprobs_are_of_the_masked_distribution(engine):
    (output,) = engine.outputs([prompt(10)], params("choice", logprobs=20))
    (answer,) = output.outputs
    first = {token: entry.logprob for token, entry in answer.logprobs[0].items()}
    text = engine.llm.get_tokenizer().decode
    possible = [token for token, logprob in first.items() if logprob > -torch.inf]
    assert answer.token_ids[0] in possible
    assert all(
        any(choice.startswith(text([token])) for choice in KINDS["choice"][0]["choice"])
        for token in possible
    )
    total = sum(torch.tensor([first[token] for token in possible]).exp())
    assert total == pytest.approx(1.0, abs=1e-5)

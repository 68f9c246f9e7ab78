"""Structured outputs of models with masks through vLLM's engine, with random weights.

Forms, and how an answer of each is judged, are those of ``test_grammars``.
"""

from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from dllm.models.unmasking.rule import STRATEGIES
from tests.engine.test_blocks import KINDS as BLOCKS
from tests.engine.test_blocks import Model, prompt
from tests.engine.test_engine import scheduler_watch
from tests.engine.test_grammars import (  # noqa: F401  two tests, with this file's engine
    BESIDE,
    KINDS,
    params,
    shortest_text,
    test_logprobs_are_of_the_masked_distribution,
    test_states_on_the_device_give_the_same_tokens,
    text_of,
)
from tests.support import family_checkpoints
from tests.support.engine_harness import TIGHT, assert_same_runs

# Of the last one canvases start where a prompt ends.
MODELS = BLOCKS | {"nemotron": family_checkpoints.NEMOTRON | {"block_size": 16}}
MAX_TOKENS = 128
STEPS = [
    {},
    {"diffusion_max_steps": 1},
    {"diffusion_threshold": 0.0},
    {"diffusion_threshold": 1.0},
    {"diffusion_max_steps": 3, "diffusion_threshold": 0.3},
]
OF_FAMILY: dict[str, list[dict[str, Any]]] = {
    "sdar": [{"diffusion_strategy": at, "diffusion_entropy_bound": 2.0} for at in STRATEGIES],
    "llada2": [
        {"diffusion_editing": 1, "diffusion_editing_threshold": at, "diffusion_max_post_steps": 3}
        for at in (0.0, 0.1, 0.9)
    ],
}
OF_FAMILY["nemotron"] = OF_FAMILY["sdar"]
SAMPLING = [
    {"temperature": 0.0},
    {},
    {"temperature": 2.0, "top_k": 5},
    {"min_p": 0.2, "top_p": 0.5},
]


@pytest.fixture(
    scope="module", params=[*BLOCKS, pytest.param("nemotron", marks=pytest.mark.nightly)]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = MODELS[request.param]
    path: Path = tmp_path_factory.mktemp(request.param) / "model"
    return Model(family_checkpoints.write(path, config), config["block_size"])


@pytest.fixture(scope="module")
def kind_of_model(model: Model) -> str:
    return next(name for name in MODELS if MODELS[name]["block_size"] == model.block_size)


@pytest.fixture(scope="module")
def engine(model: Model) -> Any:
    return model.engine()


def mixed(count: int) -> list[Any]:
    """A request of each form, one after the other, with different seeds; some are greedy."""
    return [
        params(kind, MAX_TOKENS, seed=at, temperature=float(at % 3 > 0))
        for at, kind in zip(range(count), [*KINDS] * count, strict=False)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_a_text_of_the_grammar(engine, kind, kind_of_model):
    """Whatever decides the order of the masks, behind tails of many lengths."""
    cases = [(extra, how) for extra in STEPS + OF_FAMILY[kind_of_model] for how in SAMPLING]
    asked = [
        params(kind, MAX_TOKENS, seed=seed, extra_args=extra, **how)
        for seed, (extra, how) in enumerate(cases)
    ]
    outputs = engine.outputs([prompt(20 + at) for at in range(len(asked))], asked)
    for case, output in zip(cases, outputs, strict=True):
        (answer,) = output.outputs
        assert answer.finish_reason == "stop" and KINDS[kind][1](text_of(engine, answer)), case


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_a_text_is_complete_if_it_can_be_and_else_a_beginning(engine, kind):
    shortest = shortest_text(engine, params(kind))
    budgets = [*range(1, shortest + 9), 3 * shortest]
    asked = [params(kind, budget, seed=budget) for budget in budgets]
    outputs = engine.outputs([prompt(9 + budget % 5) for budget in budgets], asked)
    for budget, output in zip(budgets, outputs, strict=True):
        (answer,) = output.outputs
        assert len(answer.token_ids) <= budget
        if budget >= shortest:
            assert KINDS[kind][1](text_of(engine, answer)), (budget, answer)
        else:
            assert answer.finish_reason == "length"


def test_neighbours_without_a_grammar_do_not_notice(engine, model):
    free = [model.params(blocks=3, seed=at, temperature=float(at)) for at in range(2)]
    contexts = [prompt(20), prompt(33), prompt(12), prompt(13)]
    engine.reset_prefix_cache()
    padding = [model.params(blocks=3, seed=9)] * 2
    alone = engine.runs(contexts, [*free, *padding])[:2]
    engine.reset_prefix_cache()
    bound = [params("json", MAX_TOKENS), params("regex", MAX_TOKENS, temperature=0.0)]
    assert_same_runs(engine.runs(contexts, [*free, *bound])[:2], alone)


def test_answers_do_not_depend_on_the_batch_and_follow_from_the_seed(engine):
    asked = mixed(9)
    contexts = [prompt(15 + at, salt=at) for at in range(len(asked))]
    together = engine.generate(contexts, asked)
    alone = [engine.generate([one], [of]) for one, of in zip(contexts, asked, strict=True)]
    assert [[tokens] for tokens in together] == alone
    (output,) = engine.outputs([prompt(10)], params("json", MAX_TOKENS, n=3))
    assert len({text_of(engine, answer) for answer in output.outputs}) == 3


def test_one_pass_a_visit_and_small_budgets_give_the_same_tokens(engine, model):
    asked = mixed(6)
    contexts = [prompt(15 + at, salt=at) for at in range(len(asked))]
    expected = engine.generate(contexts, asked)
    with engine.one_pass_a_visit():
        assert engine.generate(contexts, asked) == expected
    small = model.engine(max_num_batched_tokens=2 * model.block_size + 3)
    assert small.generate(contexts, asked) == expected


def test_preempted_requests_resume_with_the_same_tokens(engine, model, monkeypatch):
    tight = model.engine(**TIGHT | {"num_gpu_blocks_override": 14})
    asked = [params("regex", 126, seed) for seed in range(4)]
    for one in asked:  # every answer needs almost all of its tokens
        one.structured_outputs = StructuredOutputsParams(regex="([a-f]-){61}[0-9]")
    contexts = [prompt(160, salt=salt) for salt in range(4)]
    expected = [engine.generate([one], [of])[0] for one, of in zip(contexts, asked, strict=True)]
    preempted = scheduler_watch(monkeypatch, tight, "_preempt_request")
    with tight.one_pass_a_visit():  # so that it happens in the middle of blocks
        assert tight.generate(contexts, asked) == expected
    assert preempted, "the cache was large enough for everybody"


def test_answers_behind_a_prompt_from_the_cache_are_the_same(engine):
    page = engine.runner.block_tables.block_sizes[0]
    context, asked = [prompt(page + 9)], params("json", MAX_TOKENS, seed=1)
    engine.reset_prefix_cache()
    (cold,), (warm,) = (engine.outputs(context, asked) for _ in range(2))
    assert (cold.num_cached_tokens or 0, warm.num_cached_tokens) == (0, page)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.parametrize("options", BESIDE, ids=lambda options: ",".join(options))
def test_it_holds_beside_other_parameters(engine, options):
    (output,) = engine.outputs([prompt(10)], params("json", MAX_TOKENS, **options))
    assert KINDS["json"][1](text_of(engine, output.outputs[0]))


def test_a_stop_token_of_the_request_comes_only_where_the_text_is_complete(engine):
    """Its text is decoded as part of the answer."""
    stops = [35, 60]
    bias = {"stop_token_ids": stops, "logit_bias": {35: 9.0, 60: 9.0}}
    (output,) = engine.outputs([prompt(10)], params("json", MAX_TOKENS, **bias))
    (answer,) = output.outputs
    *tokens, last = answer.token_ids
    text = engine.llm.get_tokenizer().decode(tokens, skip_special_tokens=True)
    assert last in stops and not set(tokens) & set(stops) and KINDS["json"][1](text)

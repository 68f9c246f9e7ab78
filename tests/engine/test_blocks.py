"""Models with blocks through vLLM's real engine: tails, whole blocks, what a request may ask for.

SDAR with blocks of 4 and LLaDA2 with blocks of 32, random weights in fp32. Whatever else happens to
a request, ``test_scenarios`` has; the quiet run itself is held to diffusers in
``tests/models/test_llada2_parity.py``.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.test_engine import scheduled_spans
from tests.support import family_checkpoints
from tests.support.engine_harness import Engine, assert_same_runs
from tests.support.engine_models import BLOCKS, Model, model_of
from tests.support.recorded_calls import record_calls

MASK = family_checkpoints.MASK


def prompt(length: int, salt: int = 0) -> list[int]:
    """Ordinary tokens, none of them special."""
    return [20 + (7 * i + salt * 31 + i * i // 5) % 700 for i in range(length)]


@pytest.fixture(scope="module", params=BLOCKS)
def model(request: pytest.FixtureRequest, family: Callable[[str], Path]) -> Model:
    return model_of(request.param, family(request.param))


@pytest.fixture(scope="module")
def engine(model: Model) -> Engine:
    return model.engine()


# --- the core rule -------------------------------------------------------------------------------


def test_a_canvas_is_the_rest_of_its_block_and_tails_are_computed_with_it(engine, model):
    size = model.size
    length = 2 * size + 3
    with engine.one_pass_a_step():
        _, steps = engine.denoised(prompt(length), model.params(blocks=2))
    assert all(len(step.canvas) == size - step.canvas_start % size for step in steps)
    starts = list(dict.fromkeys(step.canvas_start for step in steps))
    assert starts == [length, 3 * size, 4 * size]
    causal_lens = [
        [step.causal_len for step in steps if step.canvas_start == start] for start in starts
    ]
    # The prompt; then its tail in every step. The block that the tail begins is committed as a
    # whole, and so is the next one. The last block is not.
    assert causal_lens[0] == [length] + [3] * (len(causal_lens[0]) - 1)
    assert causal_lens[1] == [size] + [0] * (len(causal_lens[1]) - 1)
    assert causal_lens[2] == [size] + [0] * (len(causal_lens[2]) - 1)


def test_worker_and_scheduler_count_the_same_whole_blocks(engine, model, monkeypatch):
    """vLLM's post-update subtracts what the sampler calls rejected from every row's query length.

    Prompt chunks included: their rows have no canvas, and end within a block.
    """
    small = model.engine(max_num_batched_tokens=2 * model.size + 3)
    counts = []
    for length in (2 * model.size, 5 * model.size + 1, model.size - 1):
        small.add(prompt(length, salt=length), model.params(blocks=2))
    with small.one_pass_a_step():
        while small.llm.llm_engine.has_unfinished_requests():
            small.step()
            states = small.runner.req_states
            for request in small.scheduler.running:
                slot = states.req_id_to_index[request.request_id]
                on_device = int(states.num_computed_tokens.gpu[slot])
                assert on_device == request.num_computed_tokens, request.request_id
                counts.append(on_device)
    assert counts and all(count % model.size == 0 for count in counts)


# --- key-value cache -----------------------------------------------------------------------------


def test_a_page_that_ends_within_a_block_is_refused(model):
    with pytest.raises(ValueError, match=r"--block-size 2: .* Allowed: a multiple of \d+"):
        Engine(model.path, block_size=2)


# --- batches, budgets, interruptions -------------------------------------------------------------


def test_prompts_in_chunks_and_budgets_smaller_than_the_batch(engine, model, monkeypatch):
    size = model.size
    small = model.engine(max_num_batched_tokens=2 * size + 3)
    contexts = [prompt(n, salt=n) for n in (7 * size + 2, 4 * size, size - 1)]
    expected = [engine.quiet_run(context, model.params()) for context in contexts]
    small.reset_prefix_cache()
    outputs = record_calls(monkeypatch, small.scheduler, "schedule")
    assert_same_runs(small.runs(contexts, model.params()), expected)
    chunks = [span[1:] for span in scheduled_spans(output for _, output in outputs)]
    # A chunk that is not the last ends with a block: no token is computed twice.
    assert (2 * size, 0) in chunks and (2 * size + 3, 0) not in chunks


# --- request options -----------------------------------------------------------------------------


def test_top_k_of_one_samples_what_greedy_samples(engine, model):
    """At temperature 1 the probabilities differ: the filter makes each of them 1."""
    extra = {"diffusion_max_steps": model.size, "diffusion_threshold": 1.0}
    context = prompt(model.size + 1)
    greedy = engine.quiet_run(context, model.params(blocks=1, extra_args=extra))
    first = model.params(blocks=1, temperature=1.0, top_k=1, extra_args=extra)
    run = engine.quiet_run(context, first)
    # Every mask is equally sure, so they are replaced from left to right, by the likeliest token.
    _, steps = engine.denoised(context, first)
    for step, following in itertools.pairwise(steps):
        if following.canvas_start != step.canvas_start:
            continue
        place = step.canvas.index(MASK)
        assert following.canvas[place] == int(step.logits[place].argmax())
    assert len(run.tokens) == len(greedy.tokens)


def test_allowed_tokens_biases_and_min_tokens_hold(engine, model):
    context = prompt(model.size + 1)
    allowed = [30, 31, 32]
    tokens = engine.quiet_run(context, model.params(allowed_token_ids=allowed)).tokens
    assert set(tokens) <= set(allowed)
    biased = engine.quiet_run(context, model.params(logit_bias={77: 100.0})).tokens
    assert set(biased) == {77}
    plain = engine.quiet_run(context, model.params()).tokens
    params = model.params(stop_token_ids=[plain[0]], min_tokens=model.size + 2)
    assert len(engine.quiet_run(context, params).tokens) >= model.size + 2


def test_a_bad_word_is_never_emitted_and_cuts_its_block(engine, model):
    context = prompt(model.size + 1)
    plain = engine.quiet_run(context, model.params(blocks=3)).tokens
    word = plain[1:3]
    params = model.params(blocks=3)
    params._bad_words_token_ids = [word]
    with engine.watch() as watched:
        (output,) = engine.outputs([context], params)
    tokens = list(output.outputs[0].token_ids)
    assert len(tokens) == len(plain)
    assert all(list(pair) != word for pair in itertools.pairwise(tokens))
    ends = {step.canvas_start + len(step.canvas) for step in watched[output.request_id]}
    assert all(end % model.size == 0 for end in ends)


def test_logprobs_are_of_the_step_that_decided_the_token(engine, model):
    context = prompt(model.size + 1)
    with engine.watch(keep_logits=True) as watched:
        (output,) = engine.outputs([context], model.params(blocks=2, logprobs=2))
    completion = output.outputs[0]
    steps = watched[output.request_id]
    expected: dict[int, torch.Tensor] = {}
    for step, following in itertools.zip_longest(steps, steps[1:]):
        is_last = following is None or following.canvas_start != step.canvas_start
        for place, token in enumerate(step.canvas):
            was_decided = is_last or following.canvas[place] != token
            if token == MASK and was_decided:
                scores = step.logits[place].log_softmax(-1)
                expected[step.canvas_start + place - len(context)] = scores
    assert len(completion.logprobs) == len(completion.token_ids)
    for place, (token, reported) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True)
    ):
        top = set(expected[place].topk(2).indices.tolist())
        assert set(reported) == top | {token}
        for candidate, logprob in reported.items():
            assert logprob.logprob == pytest.approx(float(expected[place][candidate]), abs=1e-4)


def test_a_request_chooses_sdars_strategy(tmp_path_factory):
    fields = family_checkpoints.SDAR | {"block_size": 8}
    path = family_checkpoints.write(tmp_path_factory.mktemp("sdar") / "model", fields)
    model = Model(path, 8)
    engine = model.engine()
    orders = {}
    for strategy, extra in (
        ("sequential", {"diffusion_max_steps": 4}),
        ("low_confidence_static", {"diffusion_max_steps": 4}),
        ("leftmost", {"diffusion_max_steps": 4, "diffusion_schedule": "cosine"}),
        ("entropy_bounded", {"diffusion_entropy_bound": 0.0}),
        ("low_confidence_dynamic", {"diffusion_threshold": 0.0}),
    ):
        params = model.params(1, extra_args={"diffusion_strategy": strategy} | extra)
        _, steps = engine.denoised(prompt(8), params)
        orders[strategy] = [[token == MASK for token in step.canvas] for step in steps]
    assert orders["sequential"] == [[place >= 2 * step for place in range(8)] for step in range(4)]
    assert [sum(masks) for masks in orders["low_confidence_static"]] == [8, 6, 4, 2]
    assert [sum(masks) for masks in orders["leftmost"]] == [8, 5, 2, 1]
    assert [sum(masks) for masks in orders["entropy_bounded"]] == list(range(8, 0, -1))
    assert len(orders["low_confidence_dynamic"]) == 1  # every probability is above 0

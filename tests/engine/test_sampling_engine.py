"""Sampling parameters through vLLM's real engine: what docs/sampling.md says of each."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.engine.test_engine import params, scheduled_spans
from tests.engine.test_parity import CANVAS, prompt
from tests.support import hf_reference
from tests.support.engine_harness import (
    DenoiseStep,
    Engine,
    assert_same_runs,
    blocks_of,
    get_engine,
)
from tests.support.naive_edits import edited, first_bad_word
from tests.support.recorded_calls import record_calls

STOPS = (1, 6)  # eos_token_id of the checkpoint's generation_config.json
MAX_STEPS = 16


def watched(
    engine: Engine, context: Sequence[int], sampling: SamplingParams
) -> tuple[list[int], list[DenoiseStep]]:
    """The tokens of one request, and its denoise steps."""
    engine.reset_prefix_cache()
    return engine.denoised(context, sampling)


def tokens_of(engine: Engine, context: Sequence[int], sampling: SamplingParams) -> list[int]:
    return engine.quiet_run(context, sampling).tokens


def emitting(steps: Sequence[DenoiseStep]) -> Iterator[tuple[DenoiseStep, int]]:
    """The steps that emitted, and how many their canvas took."""
    for place, step in enumerate(steps):
        if step.num_emitted:
            starts = [other.canvas_start for other in steps[: place + 1]]
            yield step, starts.count(step.canvas_start)


# --- edits of the logits -------------------------------------------------------------------------

CONTEXT = prompt(20)
EDITS = {
    "logit_bias": params(logit_bias={token: 8.0 for token in range(40, 60)}),
    "allowed_token_ids": params(allowed_token_ids=list(range(30, 130))),
    "min_tokens": params(min_tokens=70, logit_bias={1: 9.0, 6: 9.0}, ignore_eos=False),
    "repetition_penalty": params(repetition_penalty=1.8),
    "presence_penalty": params(presence_penalty=2.0),
    "frequency_penalty": params(frequency_penalty=2.0, logit_bias={33: 15.0}),
    "all of them": params(
        bad_word_ids=[[50], [51, 52], [53, 54, 55]],
        logit_bias={token: 9.0 for token in range(48, 58)},
        allowed_token_ids=list(range(30, 330)),
        min_tokens=40,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        temperature=0.8,
        top_k=200,
        top_p=0.95,
        min_p=0.001,
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_settled_block_is_the_argmax_of_logits_edited_from_left_to_right(engine, name):
    """The model's own logits of the converging step, edited in plain Python, give the block."""
    tokens, steps = watched(engine, CONTEXT, EDITS[name])
    settled = 0
    for step, num_steps in emitting(steps):
        start = step.canvas_start - len(CONTEXT)
        if num_steps == MAX_STEPS:
            continue
        settled += 1
        for place, token in enumerate(tokens[start : start + step.num_emitted]):
            output = tokens[: start + place]
            row = edited(step.logits[place], EDITS[name], CONTEXT, output, STOPS)
            assert row.argmax() == token, (start, place)
    assert settled > 0, "every block ran out of steps"
    assert tokens != tokens_of(engine, CONTEXT, params()), "the edit changed nothing"


@pytest.mark.parametrize("num_steps", [1, 3, MAX_STEPS])
def test_tokens_that_are_not_allowed_never_leave(engine, num_steps):
    extra = {"diffusion_max_steps": num_steps}
    plain = set(tokens_of(engine, CONTEXT, params(extra_args=extra)))
    biased = params(logit_bias=dict.fromkeys(plain, -100.0), extra_args=extra)
    assert not plain & set(tokens_of(engine, CONTEXT, biased))
    allowed = sorted(plain)[::9]
    only = params(allowed_token_ids=allowed, extra_args=extra)
    tokens, steps = watched(engine, CONTEXT, only)
    assert set(tokens) <= set(allowed)
    # A canvas starts from noise of the whole vocabulary all the same: the model knows no other.
    assert not set(steps[0].canvas) <= set(allowed)


@pytest.mark.parametrize("count", [0, 1, 5, CANVAS - 1, CANVAS, CANVAS + 3])
@pytest.mark.parametrize("name", ["end-of-sequence", "a stop token"])
def test_min_tokens_is_exact(engine, count, name):
    """The model says nothing but "stop" from the start: it stops right after min_tokens."""
    stop = 1 if name == "end-of-sequence" else 77
    stops = {} if name == "end-of-sequence" else {"stop_token_ids": [stop]}
    sampling = params(logit_bias={stop: 100.0}, min_tokens=count, ignore_eos=False, **stops)
    output = engine.outputs([CONTEXT], sampling)[0].outputs[0]
    assert len(output.token_ids) == count + 1 and output.token_ids[-1] == stop
    assert stop not in output.token_ids[:-1] and output.finish_reason == "stop"


# --- bad words -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 2, 5, MAX_STEPS])
def test_a_bad_word_is_never_emitted(engine, num_steps):
    """Five rounds of forbidding what was just said: single tokens, pairs and triples."""
    extra = {"diffusion_max_steps": num_steps}
    words: list[tuple[int, ...]] = []
    for length in (2, 3, 1, 2, 2):
        tokens = tokens_of(engine, CONTEXT, params(bad_word_ids=words, extra_args=extra))
        assert len(tokens) == 3 * CANVAS
        assert first_bad_word(words, tokens, 0) is None
        said = list(zip(*(tokens[start:] for start in range(length)), strict=False))
        # A word across each border between two canvases, and some within.
        words += said[CANVAS - length + 1 : CANVAS] + said[:10] + said[70:76]
    assert len(words) > 70


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_what_follows_a_bad_word_is_denoised_again(engine, num_steps):
    """Out of steps with a bad word in the canvas: what is in front of it leaves, and no more."""
    bias = dict.fromkeys((30, 31), 100.0)
    words = [[30, 30], [31, 31, 30]]
    sampling = params(
        bad_word_ids=words, logit_bias=bias, extra_args={"diffusion_max_steps": num_steps}
    )
    tokens, steps = watched(engine, CONTEXT, sampling)
    emitted = [step.num_emitted for step, _ in emitting(steps)]
    assert len(tokens) == 3 * CANVAS and set(tokens) <= {30, 31}
    assert first_bad_word(words, tokens, 0) is None
    assert any(1 <= count < CANVAS for count in emitted), "no canvas was cut"
    # The next canvas starts where the emitted tokens end.
    starts = [step.canvas_start for step, _ in emitting(steps)]
    assert starts == [len(CONTEXT) + sum(emitted[:i]) for i in range(len(emitted))]


def assert_seen(pins: dict[int, int], steps: Sequence[DenoiseStep], context: Sequence[int]) -> None:
    """Every step has what is pinned, by position of the answer, on its canvas."""
    for step in steps:
        offset = step.canvas_start - len(context)
        here = {p - offset: t for p, t in pins.items() if 0 <= p - offset < len(step.canvas)}
        assert {place: step.canvas[place] for place in here} == here


def test_the_canvas_behind_a_cut_one_starts_with_its_pins(engine):
    """Pins of positions that were cut, and of later ones, are in the first step's input."""
    pins = {place: 40 + place for place in range(CANVAS // 2, 2 * CANVAS, 3)}
    extra = {"diffusion_max_steps": 1, "diffusion_pin_at": list(pins)}
    sampling = params(
        bad_word_ids=[[30, 30], [31, 31, 30]],
        logit_bias=dict.fromkeys((30, 31), 100.0),
        extra_args=extra | {"diffusion_pin_ids": list(pins.values())},
    )
    _, steps = watched(engine, CONTEXT, sampling)
    assert steps[0].num_emitted < CANVAS, "the first canvas was not cut"
    assert_seen(pins, steps, CONTEXT)


# --- filters -------------------------------------------------------------------------------------


def test_filters_that_leave_one_token_are_the_same(engine):
    """top-k, top-p and min-p in the limit; entropies are those of the filtered distribution."""
    plain, *limits = (
        engine.quiet_run(CONTEXT, params(**options))
        for options in ({}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0})
    )
    assert_same_runs(limits[1:], [limits[0]] * 2)
    assert limits[0].tokens != plain.tokens
    off = engine.quiet_run(CONTEXT, params(top_k=0, top_p=1.0, min_p=0.0))
    assert_same_runs([off], [plain])
    # Nothing is uncertain about one token: every block is confident as soon as it is stable.
    _, steps = watched(engine, CONTEXT, params(top_k=1))
    assert all(count < MAX_STEPS for count in blocks_of(steps))


# --- the end of a sequence -----------------------------------------------------------------------

EOS_SEEDS = range(6)


def eos_runs(engine: Engine, rule: bool, **options) -> list[tuple[list[int], list[int]]]:
    """(tokens, denoise steps of each block) of requests that stop by themselves."""
    runs = []
    extra = {"diffusion_eos_stop": rule}
    for seed in EOS_SEEDS:
        sampling = params(4, seed, ignore_eos=False, extra_args=extra, **options)
        tokens, steps = watched(engine, prompt(30, salt=seed), sampling)
        runs.append((tokens, blocks_of(steps)))
    return runs


def test_without_the_stop_rule_it_is_exactly_the_reference(engine, checkpoint):
    """Tokens and denoise steps of Hugging Face, up to the end of sequence."""
    hf_model = hf_reference.load_hf(checkpoint())
    ended = 0
    for seed, (tokens, steps) in zip(EOS_SEEDS, eos_runs(engine, rule=False), strict=True):
        reference = hf_reference.generate_with_noise(
            hf_model, prompt(30, salt=seed), num_blocks=4, seed=seed, stop_at_eos=True
        )
        assert steps == reference.steps_per_block[: len(steps)]
        assert tokens == reference.tokens[: len(tokens)]
        ended += tokens[-1] in STOPS
    assert ended > 1, "nothing ended by itself"


def test_the_stop_rule_saves_steps_and_never_adds_any(engine):
    options = {"temperature": 1.5, "logit_bias": {1: 9.0, 6: 9.0}}
    with_rule, without = (eos_runs(engine, rule, **options) for rule in (True, False))
    for (tokens, steps), (reference, reference_steps) in zip(with_rule, without, strict=True):
        # Up to the block that ends it, nothing is different.
        whole = len(steps) - 1
        assert steps[:whole] == reference_steps[:whole]
        assert tokens[: whole * CANVAS] == reference[: whole * CANVAS]
        if len(steps) == len(reference_steps):
            assert steps[-1] <= reference_steps[-1]
    assert sum(sum(steps) for _, steps in with_rule) < sum(sum(steps) for _, steps in without)


def test_the_stop_rule_asks_the_requests_own_stop_tokens(engine):
    """It never costs a step, and of several answers some are sure of what is in front early."""
    counts = []
    for seed in (4, 5, 6):
        stop = tokens_of(engine, CONTEXT, params(seed=seed))[CANVAS + 8]
        for rule in (True, False):
            extra = {"diffusion_eos_stop": rule}
            sampling = params(seed=seed, stop_token_ids=[stop], extra_args=extra)
            tokens, steps = watched(engine, CONTEXT, sampling)
            assert tokens[-1] == stop and tokens.index(stop) == len(tokens) - 1
            counts.append(len(steps))
    assert all(ours <= plain for ours, plain in zip(counts[::2], counts[1::2], strict=True))
    assert sum(counts[::2]) < sum(counts[1::2])


def test_a_token_that_does_not_stop_saves_nothing(engine):
    """End-of-sequence is ignored: the reference's rule, and the same blocks."""
    bias = {1: 12.0, 6: 12.0}
    runs = [
        engine.quiet_run(CONTEXT, params(logit_bias=bias, extra_args={"diffusion_eos_stop": rule}))
        for rule in (True, False)
    ]
    assert_same_runs(runs[:1], runs[1:])
    assert set(runs[0].tokens) & set(STOPS)


# --- logprobs ------------------------------------------------------------------------------------


def schedule(engine: Engine, num_steps: int) -> float:
    """The temperature of a canvas's denoise step, counted from 1."""
    config = engine.runner.model_state.algorithm.settings
    left = (config.max_denoising_steps - num_steps + 1) / config.max_denoising_steps
    return config.t_min + (config.t_max - config.t_min) * left


def expected_logprobs(
    engine: Engine, steps: Sequence[DenoiseStep], sampling: SamplingParams, tokens: Sequence[int]
) -> torch.Tensor:
    """[tokens, V]: edited logits of the converging steps over their temperatures."""
    rows = []
    for step, num_steps in emitting(steps):
        scale = sampling.temperature or 1.0
        if (sampling.extra_args or {}).get("diffusion_read_only"):
            temperature = 1.0
        else:
            temperature = schedule(engine, num_steps) * scale
        start = step.canvas_start - len(CONTEXT)
        for place in range(step.num_emitted):
            row = edited(step.logits[place], sampling, CONTEXT, tokens[: start + place], STOPS)
            rows.append((row / temperature).log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "sampling",
    [
        params(2, logprobs=3, temperature=0.7),
        params(2, logprobs=2, logit_bias={33: 15.0}, presence_penalty=1.0, top_k=4, top_p=0.5),
        params(2, logprobs=4, temperature=0),
        params(1, logprobs=20),
        params(2, logprob_token_ids=[40, 33, 500, 7]),
        params(2, logprob_token_ids=[40, 33], extra_args={"diffusion_constrained": 1}),
        params(1, logprobs=2, extra_args={"diffusion_read_only": True}),
    ],
    ids=range(7),
)
def test_logprobs_are_those_of_the_edited_logits(engine, sampling):
    """And a neighbour that wants others, or none, changes nothing."""
    neighbours = [params(2, logprobs=1), params(2, logprob_token_ids=[9]), params(2)]
    with engine.watch(keep_logits=True) as steps:
        output, *_ = engine.outputs([CONTEXT] * 4, [sampling, *neighbours])
    completion = output.outputs[0]
    reference = expected_logprobs(
        engine, steps[output.request_id], _allowed(sampling), list(completion.token_ids)
    )
    assert len(completion.logprobs) == len(completion.token_ids) == len(reference)
    for token, reported, row in zip(
        completion.token_ids, completion.logprobs, reference, strict=True
    ):
        top = sampling.logprob_token_ids or row.topk(sampling.logprobs).indices.tolist()
        assert set(reported) == {token, *top}
        assert sampling.logprobs is None or reported[token].rank == 1
        for candidate, logprob in reported.items():
            assert logprob.logprob == pytest.approx(float(row[candidate]), abs=1e-3)


def _allowed(sampling: SamplingParams) -> SamplingParams:
    """What `diffusion_constrained` means, said with `allowed_token_ids`."""
    sampling = sampling.clone()
    if (sampling.extra_args or {}).get("diffusion_constrained"):
        sampling.allowed_token_ids = sampling.logprob_token_ids
    return sampling


def encoder_logprobs(hf_model, context: Sequence[int]) -> torch.Tensor:
    """[tokens, V]: what the reference's causal encoder expects to follow each token."""
    with torch.no_grad():
        hidden = hf_model.model.encoder(input_ids=torch.tensor([list(context)])).last_hidden_state
        cap = hf_model.final_logit_softcapping
        logits = torch.tanh(hf_model.lm_head(hidden[0]) / cap) * cap
    return logits.log_softmax(-1)


@pytest.mark.parametrize("length", [1, 2, 40, 200])
def test_prompt_logprobs_are_the_encoders(engine, checkpoint, length):
    """In chunks of a small budget, too, and when the prompt is in the prefix cache."""
    small = get_engine(checkpoint(), max_num_batched_tokens=72)
    context = prompt(length)
    reference = encoder_logprobs(hf_reference.load_hf(checkpoint()), context)
    plain = tokens_of(engine, context, params(1))
    for one in (engine, small, small):
        output = one.outputs([context], params(1, prompt_logprobs=3))[0]
        assert list(output.outputs[0].token_ids) == plain
        first, *rest = output.prompt_logprobs
        assert first is None and len(rest) == length - 1
        for place, reported in enumerate(rest):
            row = reference[place]
            assert set(reported) == {context[place + 1], *row.topk(3).indices.tolist()}
            for token, logprob in reported.items():
                assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-3)
            rank = int((row >= row[context[place + 1]]).sum())
            assert reported[context[place + 1]].rank == rank


def test_prompt_logprobs_of_chosen_ids(engine, checkpoint):
    reference = encoder_logprobs(hf_reference.load_hf(checkpoint()), CONTEXT)
    ids = np.array([[token, token + 1] for token in range(19)])
    sampling = params(1, prompt_logprob_token_ids=ids)
    output = engine.outputs([CONTEXT], sampling)[0]
    expected = reference[:-1].gather(1, torch.from_numpy(ids))
    np.testing.assert_allclose(output.prompt_token_id_logprobs, expected, atol=1e-3)


def test_a_prompt_that_is_scored_comes_without_a_canvas(engine, checkpoint, monkeypatch):
    """Any worker of vLLM scores the prompt, and nothing else; the last of several chunks, too."""
    for one in (engine, get_engine(checkpoint(), max_num_batched_tokens=72)):
        one.reset_prefix_cache()
        schedules = record_calls(monkeypatch, one.scheduler, "schedule")
        (output,) = one.outputs([prompt(100)], params(1, prompt_logprobs=1))
        assert len(output.prompt_logprobs) == 100
        spans = scheduled_spans([schedule for _, schedule in schedules])
        assert [canvas for _, _, canvas in spans if canvas]
        assert not [span for span in spans if span[0] < 0 and span[2]]


def test_what_stands_behind_the_last_slot_is_never_scored(engine):
    """vLLM reads the token behind each scheduled one; the last canvas may end the context."""
    ids, requests = engine.runner.req_states.all_token_ids.gpu, engine.runner.max_num_reqs
    assert ids.shape == (requests + 1, engine.runner.max_model_len)


def test_prompt_logprobs_of_an_aborted_request_are_forgotten(engine):
    doomed = engine.add(CONTEXT, params(3, prompt_logprobs=2))
    with engine.one_pass_a_step():
        engine.step()
        engine.step()
    assert any(engine.scheduler._prompt_logprobs.values())
    engine.llm.llm_engine.abort_request([doomed])
    engine.generate([CONTEXT], params(1))
    assert not any(engine.scheduler._prompt_logprobs.values())


# --- canvases that the request brings ------------------------------------------------------------

SEED_CANVAS = prompt(CANVAS, salt=9)


def seeded(**changes) -> dict:
    return {"diffusion_seed_canvas": SEED_CANVAS} | changes


def test_a_seed_canvas_is_where_the_first_block_starts(engine):
    _, steps = watched(engine, CONTEXT, params(2, extra_args=seeded()))
    assert steps[0].canvas == SEED_CANVAS
    assert steps[1].canvas != SEED_CANVAS
    # The second block starts from the noise that it always starts from.
    _, plain = watched(engine, CONTEXT, params(2))
    second, expected = (
        next(step.canvas for step in run if step.canvas_start == len(CONTEXT) + CANVAS)
        for run in (steps, plain)
    )
    assert second == expected


def test_pinned_positions_stay_what_they_are_in_the_first_block_only(engine):
    hot = params(2, temperature=2.0, extra_args=seeded())
    _, free = watched(engine, CONTEXT, hot)
    changed = [p for p in range(CANVAS) if free[1].canvas[p] != SEED_CANVAS[p]]
    assert len(changed) > 3, "nothing to hold"
    pinned = changed[:2] + changed[-1:]
    hot.extra_args = seeded(diffusion_pinned=pinned)
    _, steps = watched(engine, CONTEXT, hot)
    first = [step for step in steps if step.canvas_start == len(CONTEXT)]
    later = [step for step in steps if step.canvas_start > len(CONTEXT)]
    assert len(first) > 2 and later
    for step in first:
        assert [step.canvas[p] for p in pinned] == [SEED_CANVAS[p] for p in pinned]
    assert any(step.canvas[p] != SEED_CANVAS[p] for step in later for p in pinned)


def test_what_the_model_would_say_at_a_pinned_position_does_not_reach_it(engine):
    """Its soft embedding is zero, as before the first step."""
    sampling = params(1, extra_args=seeded(diffusion_pinned=[3], diffusion_max_steps=3))
    engine.reset_prefix_cache()
    engine.add(CONTEXT, sampling)
    with engine.one_pass_a_step():
        engine.step()
        engine.step()
    (slot,) = engine.runner.req_states.req_id_to_index.values()
    soft = engine.runner.model_state.canvases.soft_embeds[slot]
    assert not soft[3].any() and soft[2].any() and soft[4].any()
    engine.run()


def test_a_read_only_request_is_one_canvas(engine):
    extra = seeded(diffusion_read_only=True, diffusion_max_steps=1)
    sampling = params(9, max_tokens=400, ignore_eos=False, logit_bias={1: 50.0}, extra_args=extra)
    tokens, steps = watched(engine, CONTEXT, sampling)
    # One forward pass, and end-of-sequence does not end it.
    assert tokens == [1] * CANVAS and len(steps) == 1
    narrow = {"diffusion_read_only": 1, "diffusion_canvas_length": 7, "diffusion_max_steps": 1}
    assert len(tokens_of(engine, CONTEXT, params(9, max_tokens=400, extra_args=narrow))) == 7
    assert len(tokens_of(engine, CONTEXT, params(max_tokens=2, extra_args=narrow))) == 2


def test_a_constrained_request_emits_its_ids_and_starts_from_any(engine):
    extra = {"diffusion_constrained": True}
    sampling = params(2, logprob_token_ids=[30, 31, 32], extra_args=extra)
    tokens, steps = watched(engine, CONTEXT, sampling)
    assert set(tokens) <= {30, 31, 32}
    assert not set(steps[0].canvas) <= {30, 31, 32}
    allowed = params(2, allowed_token_ids=[30, 31, 32])
    assert tokens == tokens_of(engine, CONTEXT, allowed)

"""Pins through vLLM's real engine: what is given is seen, and what is held is emitted."""

import pytest
from vllm.exceptions import VLLMValidationError

from tests.engine.test_parity import CANVAS, prompt
from tests.engine.test_sampling_engine import CONTEXT, params, tokens_of, watched


def held(pins: dict[int, int], **extra) -> dict:
    at, ids = list(pins), list(pins.values())
    return {
        "diffusion_pin_at": at,
        "diffusion_pin_ids": ids,
        "diffusion_pin_mode": "hold",
    } | extra


PINS = {0: 40, 7: 300, CANVAS - 1: 41, CANVAS: 42, CANVAS + 9: 301, 3 * CANVAS - 1: 43}


def test_held_pins_are_emitted_in_every_block_and_hints_are_not(engine):
    unlikely = {token: -50.0 for token in PINS.values()}
    sampling = params(3, logit_bias=unlikely, extra_args=held(PINS))
    tokens, steps = watched(engine, CONTEXT, sampling)
    assert {place: tokens[place] for place in PINS} == PINS
    hinted = held(PINS) | {"diffusion_pin_mode": "hint"}
    sampling.extra_args = hinted
    hinted_tokens, hinted_steps = watched(engine, CONTEXT, sampling)
    assert not set(PINS.values()) & set(hinted_tokens)
    for run in (steps, hinted_steps):  # the model sees both
        for step in run:
            offset = step.canvas_start - len(CONTEXT)
            here = {p - offset: token for p, token in PINS.items() if 0 <= p - offset < CANVAS}
            assert {place: step.canvas[place] for place in here} == here


def test_no_end_comes_before_the_last_held_pin(engine):
    ends = params(3, ignore_eos=False, logit_bias={1: 50.0})
    assert tokens_of(engine, CONTEXT, ends)[0] == 1
    ends.extra_args = held({CANVAS + 3: 40})
    tokens = tokens_of(engine, CONTEXT, ends)
    assert tokens.index(1) == CANVAS + 4 and tokens[CANVAS + 3] == 40
    # A pin that ends the answer is the last one that counts.
    ends.extra_args = held({5: 40, 9: 1, CANVAS + 3: 40})
    tokens = tokens_of(engine, CONTEXT, ends)
    assert tokens.index(1) == 9 == len(tokens) - 1


def test_no_step_is_spent_on_what_is_given(engine):
    given = dict(enumerate(prompt(CANVAS, salt=5)))
    tokens, steps = watched(engine, CONTEXT, params(1, extra_args=held(given)))
    assert tokens == list(given.values()) and len(steps) == 1
    del given[4]
    tokens, steps = watched(engine, CONTEXT, params(1, extra_args=held(given)))
    assert {place: tokens[place] for place in given} == given and len(steps) > 1


def test_the_logprob_of_a_held_pin_is_the_models_own(engine):
    sampling = params(1, logprobs=1, logit_bias={40: -20.0}, extra_args=held({3: 40}))
    (output,) = engine.outputs([CONTEXT], sampling)
    (run,) = engine.runs([CONTEXT], sampling)
    (completion,) = output.outputs
    assert completion.token_ids[3] == 40
    entry = completion.logprobs[3]
    last = run.logits[-CANVAS:][3]
    last[40] -= 20
    assert entry[40].rank == int((last >= last[40]).sum()) > 1
    assert max(one.logprob for one in entry.values()) > entry[40].logprob


def test_bad_words_end_no_canvas_in_front_of_a_held_pin(engine):
    """Neither the request's own, nor those of another one beside it."""
    sampling = params(2, allowed_token_ids=[33, 34, 35], extra_args=held({9: 40}))
    _, alone = watched(engine, CONTEXT, sampling)
    own = params(2, bad_word_ids=[[40]], extra_args=held({9: 40}))
    for request, beside in ((sampling, params(2, bad_word_ids=[[50]])), (own, params(2))):
        with engine.watch() as steps:
            engine.generate([CONTEXT, prompt(20)], [request, beside])
        starts = {step.canvas_start for step in next(iter(steps.values()))}
        assert starts == {len(CONTEXT), len(CONTEXT) + CANVAS}, request
    with engine.watch() as steps:
        engine.generate([CONTEXT, prompt(20)], [sampling, params(2, bad_word_ids=[[50]])])
    canvases = [step.canvas for step in next(iter(steps.values()))]
    assert canvases == [step.canvas for step in alone]


def test_the_server_draws_the_noise_that_a_canvas_leaves_open(engine):
    _, plain = watched(engine, CONTEXT, params(1))
    mixed = [-1 if place % 3 else 200 + place for place in range(CANVAS)]
    _, steps = watched(engine, CONTEXT, params(1, extra_args={"diffusion_seed_canvas": mixed}))
    assert steps[0].canvas == [
        drawn if given == -1 else given for drawn, given in zip(plain[0].canvas, mixed, strict=True)
    ]


def test_a_held_pin_behind_the_end_is_refused(engine):
    with pytest.raises(VLLMValidationError, match="max_tokens of at least 33"):
        engine.add(CONTEXT, params(1, extra_args=held({CANVAS: 40})))
    ended = params(1, ignore_eos=False, extra_args=held({3: 6, CANVAS: 40}))  # 6 ends an answer
    assert tokens_of(engine, CONTEXT, ended)[3:] == [6]

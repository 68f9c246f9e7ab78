"""Pins through vLLM's real engine: what is given is seen, and what is held is emitted.

In models with blocks behind prompts that end within a block, too.
"""

from typing import Any

import pytest

from dllm.models.unmasking.rule import STRATEGIES
from tests.engine.test_parity import CANVAS, prompt
from tests.engine.test_sampling_engine import CONTEXT, assert_seen, params, tokens_of, watched
from tests.support.engine_models import Model

# What changes tokens, or their order: of each family.
WAYS: dict[str, list[dict[str, Any]]] = {
    "sdar": [{"diffusion_strategy": one, "diffusion_max_steps": 3} for one in STRATEGIES],
    "llada2": [
        {"diffusion_editing": 1, "diffusion_editing_threshold": at, "diffusion_max_post_steps": 3}
        for at in (0.0, 0.01)
    ],
}


def held(pins: dict[int, int], **extra: Any) -> dict[str, Any]:
    at, ids = list(pins), list(pins.values())
    how = {"diffusion_pin_at": at, "diffusion_pin_ids": ids, "diffusion_pin_mode": "hold"}
    return how | extra


def pins_of(model: Model) -> dict[int, int]:
    """In four canvases, at their first and last places and between them."""
    size = model.size
    places = (0, 2, size - 1, size, size + 2, 3 * size - 1)
    return {place: 40 + at for at, place in enumerate(places)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_held_pins_are_emitted_and_seen_in_every_step(model, temperature):
    """Also where the model would never write them, and where editing changes all that it can."""
    pins, size, engine = pins_of(model), model.size, model.engine()
    unlikely = {token: -50.0 for token in pins.values()}
    for extra in [{}, *WAYS.get(model.name, [])]:
        contexts = [prompt(size + tail) for tail in (0, 1, size - 1)]
        how = {"temperature": temperature, "seed": 3, "logit_bias": unlikely}
        sampling = model.params(4, extra_args=held(pins, **extra), **how)
        with engine.watch() as seen:
            outputs = engine.outputs(contexts, sampling)
        for context, output in zip(contexts, outputs, strict=True):
            tokens = output.outputs[0].token_ids
            assert {place: tokens[place] for place in pins} == pins, (extra, len(context))
            assert_seen(pins, seen[output.request_id], context)


def test_hints_among_noise_are_seen_in_every_step_and_may_be_overruled(engine):
    pins = {0: 40, 7: 300, CANVAS - 1: 41, CANVAS: 42, CANVAS + 9: 301, 3 * CANVAS - 1: 43}
    hint = held(pins, diffusion_pin_mode="hint")
    sampling = params(3, logit_bias=dict.fromkeys(pins.values(), -50.0), extra_args=hint)
    tokens, steps = watched(engine, CONTEXT, sampling)
    assert not set(pins.values()) & set(tokens)
    assert_seen(pins, steps, CONTEXT)


def test_a_hint_among_masks_stays_unless_it_is_edited(of_blocks):
    """And what it is edited to stays as well: no step begins with the hint again."""
    size, engine = of_blocks.size, of_blocks.engine()
    pins, context = {1: 40, size + 1: 41}, prompt(size)
    hint = held(pins, diffusion_pin_mode="hint")
    unlikely = {40: -50.0, 41: -50.0}
    (tokens,) = engine.generate(
        [context], of_blocks.params(2, logit_bias=unlikely, extra_args=hint)
    )
    assert {place: tokens[place] for place in pins} == pins
    if of_blocks.name == "sdar":  # which does not edit
        return
    extra = hint | {"diffusion_editing": 1, "diffusion_editing_threshold": 0.0}
    edited = of_blocks.params(2, logit_bias=unlikely, extra_args=extra)
    tokens, steps = engine.denoised(context, edited)
    assert not set(pins.values()) & set(tokens)
    has_hint = [step.canvas[1] == 40 for step in steps if step.canvas_start == len(context)]
    assert has_hint == [True] + [False] * (len(has_hint) - 1) and len(has_hint) > 1


def test_a_canvas_that_is_given_whole_takes_one_step(model):
    width, engine = model.size - model.has_blocks, model.engine()
    given = dict(enumerate(prompt(width, salt=5)))
    for is_whole in (True, False):
        if not is_whole:
            del given[1]
        sampling = model.params(width / model.size, extra_args=held(given))
        tokens, steps = engine.denoised(prompt(model.size + 1), sampling)
        assert {place: tokens[place] for place in given} == given and len(tokens) == width
        if is_whole or model.name != "gemma":  # a single mask takes one step, too
            assert len(steps) == 1
        else:
            assert len(steps) > 1


def test_no_end_comes_before_the_last_held_pin(model):
    context, size, engine = prompt(model.size + 1), model.size, model.engine()
    ends = model.params(3, ignore_eos=False, logit_bias={1: 50.0})
    assert engine.generate([context], ends)[0][0] == 1
    ends.extra_args = (ends.extra_args or {}) | held({size + 1: 40})
    (tokens,) = engine.generate([context], ends)
    assert tokens.index(1) == size + 2 and tokens[size + 1] == 40
    # A pin that ends the answer is the last one that counts.
    ends.extra_args = ends.extra_args | held({0: 40, 2: 1, size + 1: 40})
    (tokens,) = engine.generate([context], ends)
    assert tokens.index(1) == 2 == len(tokens) - 1


def test_a_bad_word_that_is_held_ends_no_canvas(engine):
    own = params(2, bad_word_ids=[[40]], extra_args=held({9: 40}))
    _, steps = watched(engine, CONTEXT, own)
    assert {step.canvas_start for step in steps} == {len(CONTEXT), len(CONTEXT) + CANVAS}


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


@pytest.mark.parametrize("mode", ["hold", "hint"])
def test_the_logprob_of_a_pin_among_masks_is_the_models_own(of_blocks, mode):
    """Of a held one in the last step, of a hint in the first; also where a slot is used again."""
    context, place, engine = prompt(of_blocks.size), 1, of_blocks.engine()
    for token in (40, 41):
        extra = held({place: token}, diffusion_threshold=1.0, diffusion_pin_mode=mode)
        sampling = of_blocks.params(1, logprobs=2, extra_args=extra)
        with engine.watch(keep_logits=True) as seen:
            (output,) = engine.outputs([context], sampling)
        (steps,) = seen.values()
        scores = steps[-1 if mode == "hold" else 0].logits[place].log_softmax(-1)
        entry = output.outputs[0].logprobs[place]
        assert output.outputs[0].token_ids[place] == token and len(steps) > 1
        assert entry[token].logprob == pytest.approx(float(scores[token]), abs=1e-4)
        assert entry[token].rank == int((scores >= scores[token]).sum())


def test_the_server_draws_the_noise_that_a_canvas_leaves_open(engine):
    _, plain = watched(engine, CONTEXT, params(1))
    mixed = [-1 if place % 3 else 200 + place for place in range(CANVAS)]
    _, steps = watched(engine, CONTEXT, params(1, extra_args={"diffusion_seed_canvas": mixed}))
    assert steps[0].canvas == [
        drawn if given == -1 else given for drawn, given in zip(plain[0].canvas, mixed, strict=True)
    ]


# --- what is refused -----------------------------------------------------------------------------


def test_a_held_pin_behind_the_end_is_no_pin(engine):
    ended = params(1, ignore_eos=False, extra_args=held({3: 6, CANVAS: 40}))  # 6 ends an answer
    assert tokens_of(engine, CONTEXT, ended)[3:] == [6]

"""Pins of models with blocks through vLLM's engine, behind prompts that end within a block."""

from collections import Counter
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from dllm.models.unmasking.rule import STRATEGIES
from tests.engine.test_blocks import MASK, engine, model, prompt  # noqa: F401  fixtures
from tests.engine.test_engine import scheduler_watch
from tests.engine.test_pins import held
from tests.support.engine_harness import TIGHT
from tests.support.engine_models import Model

# What changes tokens, or their order: of each family.
OF_FAMILY: dict[int, list[dict[str, Any]]] = {
    4: [{"diffusion_strategy": one, "diffusion_max_steps": 3} for one in STRATEGIES],
    32: [
        {"diffusion_editing": 1, "diffusion_editing_threshold": at, "diffusion_max_post_steps": 3}
        for at in (0.0, 0.01)
    ],
}


def pins_of(model: Model) -> dict[int, int]:  # noqa: F811
    """In four blocks, at their first and last places and between them."""
    size = model.size
    places = (0, 2, size - 1, size, size + 2, 3 * size - 1)
    return {place: 40 + at for at, place in enumerate(places)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_held_pins_are_emitted_and_seen_in_every_step(engine, model, temperature):  # noqa: F811
    """Also where the model would never write them, and where editing changes all that it can."""
    pins, size = pins_of(model), model.size
    unlikely = {token: -50.0 for token in pins.values()}
    for extra in [{}, *OF_FAMILY[size]]:
        for tail in (0, 1, size - 1):
            context = prompt(size + tail)
            how = {"temperature": temperature, "seed": 3, "logit_bias": unlikely}
            sampling = model.params(4, extra_args=held(pins, **extra), **how)
            with engine.watch() as watched:
                (tokens,) = engine.generate([context], sampling)
            assert {place: tokens[place] for place in pins} == pins, (extra, tail)
            (steps,) = watched.values()
            for step in steps:
                offset = step.canvas_start - len(context)
                here = {
                    p - offset: t for p, t in pins.items() if 0 <= p - offset < len(step.canvas)
                }
                assert {place: step.canvas[place] for place in here} == here


def test_a_hint_stays_unless_it_is_edited(engine, model):  # noqa: F811
    """And what it is edited to stays as well: no step begins with the hint again."""
    pins, context = {1: 40, model.size + 1: 41}, prompt(model.size)
    hint = held(pins) | {"diffusion_pin_mode": "hint"}
    unlikely = {40: -50.0, 41: -50.0}
    (tokens,) = engine.generate([context], model.params(2, logit_bias=unlikely, extra_args=hint))
    assert {place: tokens[place] for place in pins} == pins
    if model.size == 4:  # an SDAR, which does not edit
        return
    extra = hint | {"diffusion_editing": 1, "diffusion_editing_threshold": 0.0}
    edited = model.params(2, logit_bias=unlikely, extra_args=extra)
    with engine.watch() as watched:
        (tokens,) = engine.generate([context], edited)
    assert not set(pins.values()) & set(tokens)
    (steps,) = watched.values()
    has_hint = [step.canvas[1] == 40 for step in steps if step.canvas_start == len(context)]
    assert has_hint == [True] + [False] * (len(has_hint) - 1) and len(has_hint) > 1


def test_a_canvas_that_is_given_whole_takes_one_step(engine, model):  # noqa: F811
    context, width = prompt(model.size + 1), model.size - 1
    given = dict(enumerate(prompt(width, salt=5)))
    with engine.watch() as watched:
        (tokens,) = engine.generate(
            [context], model.params(width / model.size, extra_args=held(given))
        )
    (steps,) = watched.values()
    assert tokens == list(given.values()) and len(steps) == 1


def test_no_end_comes_before_the_last_held_pin(engine, model):  # noqa: F811
    context, size = prompt(model.size + 1), model.size
    ends = model.params(3, ignore_eos=False, logit_bias={1: 50.0})
    assert engine.generate([context], ends)[0][0] == 1
    ends.extra_args = ends.extra_args | held({size + 1: 40})
    (tokens,) = engine.generate([context], ends)
    assert tokens.index(1) == size + 2 and tokens[size + 1] == 40


@pytest.mark.parametrize("mode", ["hold", "hint"])
def test_bad_words_of_another_request_change_nothing(engine, model, mode):  # noqa: F811
    """Also where a pin is a token that its request excludes."""
    extra = held(pins_of(model)) | {"diffusion_pin_mode": mode}
    pinned = model.params(3, allowed_token_ids=[33, 34, 35], temperature=1.0, seed=4)
    pinned.extra_args = pinned.extra_args | extra
    beside = model.params(3, bad_words=["a"])
    contexts = [prompt(model.size + 1), prompt(20)]
    (alone,) = engine.generate(contexts[:1], pinned)
    with engine.watch() as watched:
        tokens, _ = engine.generate(contexts, [pinned, beside])
    assert tokens == alone
    starts = {step.canvas_start for step in next(iter(watched.values()))}
    assert len(starts) == 4, "a canvas for each block, and one for the rest of the prompt's"


@pytest.mark.parametrize("mode", ["hold", "hint"])
def test_the_logprob_of_a_pin_is_the_models_own(engine, model, mode):  # noqa: F811
    """Of a held one in the last step, of a hint in the first; also where a slot is used again."""
    context, place = prompt(model.size), 1
    for token in (40, 41):
        extra = held({place: token}, diffusion_threshold=1.0) | {"diffusion_pin_mode": mode}
        sampling = model.params(1, logprobs=2, extra_args=extra)
        with engine.watch(keep_logits=True) as watched:
            (output,) = engine.outputs([context], sampling)
        (steps,) = watched.values()
        scores = steps[-1 if mode == "hold" else 0].logits[place].log_softmax(-1)
        entry = output.outputs[0].logprobs[place]
        assert output.outputs[0].token_ids[place] == token and len(steps) > 1
        assert entry[token].logprob == pytest.approx(float(scores[token]), abs=1e-4)
        assert entry[token].rank == int((scores >= scores[token]).sum())


def test_held_pins_survive_preemption_in_the_middle_of_a_block(engine, model, monkeypatch):  # noqa: F811
    tight = model.engine(**TIGHT | {"num_gpu_blocks_override": 14})
    pins = {place: 40 + place % 7 for place in (3, 17, 60, 63)}
    extra = held(pins, diffusion_threshold=1.0)
    sampling = model.params(128 / model.size, extra_args=extra)
    contexts = [prompt(157 + salt, salt=salt) for salt in range(4)]
    expected = [engine.quiet_run(context, sampling).tokens for context in contexts]
    preempted = scheduler_watch(monkeypatch, tight, "_preempt_request")
    with tight.one_pass_a_visit(), tight.watch() as watched:
        assert tight.generate(contexts, sampling) == expected
    assert preempted, "the cache was large enough for everybody"
    # A canvas that starts again takes more steps than it has tokens.
    counts = [max(Counter(s.canvas_start for s in steps).values()) for steps in watched.values()]
    assert max(counts) > model.size
    assert all({place: tokens[place] for place in pins} == pins for tokens in expected)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (held({1: MASK}), f"diffusion_pin_ids = {MASK}"),
        ({"diffusion_seed_canvas": [5], "diffusion_pinned": [0]}, "diffusion_seed_canvas"),
        (held({40 * 16: 5}), "diffusion_pin_at = 640"),
    ],
)
def test_pins_that_cannot_be_served_are_refused(engine, model, extra, message):  # noqa: F811
    with pytest.raises(VLLMValidationError, match=message):
        engine.add(prompt(5), model.params(extra_args=extra))


@pytest.mark.parametrize("mode", ["hold", "hint"])
def test_pins_beside_a_grammar_are_refused(engine, model, mode):  # noqa: F811
    sampling = model.params(extra_args=held({1: 40}) | {"diffusion_pin_mode": mode})
    sampling.structured_outputs = StructuredOutputsParams(choice=["yes"])
    sampling.ignore_eos = False
    with pytest.raises(VLLMValidationError, match="beside structured outputs"):
        engine.add(prompt(5), sampling)

"""What one request may ask for: ``RequestOptions.parse`` as a pure function."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from dllm.config import CONFIDENCES, ENTROPY_BOUNDS, TEMPERATURES, DenoiseConfig
from dllm.options import (
    EXTRA_ARGS,
    UNSUPPORTED_PARAMETERS,
    RequestOptions,
    requested_canvas_width,
)

CONFIG = DenoiseConfig(
    canvas_length=32,
    max_denoising_steps=16,
    t_min=0.4,
    t_max=0.8,
    entropy_bound=1.0,
    confidence_threshold=0.2,
    stability_threshold=1,
    canvas_window="symmetric",
)
FLOATS = {
    "diffusion_t_min": TEMPERATURES,
    "diffusion_t_max": TEMPERATURES,
    "diffusion_entropy_bound": ENTROPY_BOUNDS,
    "diffusion_confidence": CONFIDENCES,
}


def parse(extra: dict[str, Any] | None = None, **params: Any) -> RequestOptions:
    return RequestOptions.parse(SamplingParams(extra_args=extra, **params), CONFIG)


def refusal(extra: dict[str, Any] | None = None, **params: Any) -> VLLMValidationError:
    """The error of a refused request; vLLM answers it with HTTP 400."""
    with pytest.raises(VLLMValidationError) as error:
        parse(extra, **params)
    return error.value


def test_a_request_without_wishes_gets_the_servers_values():
    assert parse() == RequestOptions(
        canvas_width=32,
        max_steps=16,
        t_min=0.4,
        t_max=0.8,
        entropy_bound=1.0,
        confidence=0.2,
        is_greedy=False,
        seed=None,
    )


def test_every_extra_argument_is_read():
    options = parse(
        {
            "diffusion_canvas_length": 8,
            "diffusion_max_steps": 3,
            "diffusion_t_min": 0.1,
            "diffusion_t_max": 2,
            "diffusion_entropy_bound": 0.5,
            "diffusion_confidence": 0,
        },
        seed=-5,
    )
    assert options == RequestOptions(8, 3, 0.1, 2.0, 0.5, 0.0, False, -5)


def test_null_means_the_servers_value():
    assert parse(dict.fromkeys(EXTRA_ARGS)) == parse()


def test_reading_leaves_the_parameters_as_they_were():
    extra = {"diffusion_max_steps": 3}
    params = SamplingParams(extra_args=extra)
    first = RequestOptions.parse(params, CONFIG)
    assert RequestOptions.parse(params, CONFIG) == first and extra == {"diffusion_max_steps": 3}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_scales_the_models_schedule(temperature):
    options = parse(temperature=temperature)
    assert (options.t_min, options.t_max) == (0.4 * temperature, 0.8 * temperature)
    assert not options.is_greedy


def test_temperature_zero_is_greedy_on_the_models_schedule():
    options = parse(temperature=0)
    assert options.is_greedy and (options.t_min, options.t_max) == (0.4, 0.8)


def test_more_steps_than_served_are_clamped():
    assert parse({"diffusion_max_steps": 1000}).max_steps == 16


# --- refusals -------------------------------------------------------------------------------------

WRONG_TYPES = [True, False, "3", [3], {}, 3.5, math.nan]


@pytest.mark.parametrize("value", [0, -1, 33, 2**62, *WRONG_TYPES])
def test_canvas_width_out_of_range(value):
    error = refusal({"diffusion_canvas_length": value})
    assert error.parameter == "diffusion_canvas_length"
    assert f"diffusion_canvas_length = {value!r}; allowed: an integer of at least 1" in str(error)
    assert "at most 32. Omit it for 32." in str(error)


@pytest.mark.parametrize("value", [0, -1, *WRONG_TYPES])
def test_max_steps_out_of_range(value):
    error = refusal({"diffusion_max_steps": value})
    assert error.parameter == "diffusion_max_steps"
    assert f"diffusion_max_steps = {value!r}; allowed: an integer of at least 1" in str(error)
    assert "Omit it for 16." in str(error)


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", [-0.5, True, "0.5", [0.5], {}, math.nan, math.inf, 2**62])
def test_a_number_out_of_range(key, value):
    error = refusal({key: value})
    assert error.parameter == key
    assert f"{key} = {value!r}; allowed: {FLOATS[key]}. Omit it for" in str(error)


def test_a_long_value_is_not_sent_back_whole():
    message = str(refusal({"diffusion_t_min": "9" * 10_000}))
    assert "diffusion_t_min = '999" in message and len(message) < 500


@pytest.mark.parametrize("key", ["diffusion_t_min", "diffusion_t_max", "diffusion_entropy_bound"])
def test_zero_is_too_little(key):
    assert refusal({key: 0}).parameter == key


def test_zero_confidence_never_stops_early():
    assert parse({"diffusion_confidence": 0}).confidence == 0


# SamplingParams itself refuses integers beyond 64 bits.
INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.sampled_from(sorted(FLOATS)), st.floats() | INT64)
def test_a_number_is_accepted_exactly_when_in_range(key, value):
    allowed = FLOATS[key]
    extra = {"diffusion_t_min": allowed.low, "diffusion_t_max": allowed.high}
    extra = (extra if "_t_" in key else {}) | {key: value}
    in_range = allowed.low <= value <= allowed.high and not (
        allowed.excludes_low and value == allowed.low
    )
    if in_range:
        field = key.removeprefix("diffusion_")
        assert getattr(parse(extra), field) == pytest.approx(float(value))
    else:
        assert refusal(extra).parameter == key


@pytest.mark.parametrize(
    "extra",
    [
        {"diffusion_t_min": 1.0},
        {"diffusion_t_max": 0.3},
        {"diffusion_t_min": 0.6, "diffusion_t_max": 0.5},
    ],
)
def test_a_schedule_that_runs_upwards(extra):
    error = refusal(extra)
    t_min, t_max = extra.get("diffusion_t_min", 0.4), extra.get("diffusion_t_max", 0.8)
    assert f"diffusion_t_min = {t_min} exceeds diffusion_t_max = {t_max}" in str(error)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("diffusion_canvas_lenght", " (did you mean 'diffusion_canvas_length'?)"),
        ("max_steps", " (did you mean 'diffusion_max_steps'?)"),
        ("diffusion_entropy", " (did you mean 'diffusion_entropy_bound'?)"),
        ("top_k", ""),
    ],
)
def test_an_unknown_argument_is_refused_with_the_nearest_known_one(key, hint):
    error = refusal({key: 1})
    assert f"unknown extra argument {key!r}{hint}. Known: {', '.join(EXTRA_ARGS)}" in str(error)


@pytest.mark.parametrize(
    "extra", [{"kv_transfer_params": {"a": 1}}, {"kv_cache_report_mode": "all"}]
)
def test_what_vllm_itself_puts_there_passes(extra):
    assert parse(extra) == parse()


# A value of each sampling parameter that is not served yet.
ASKED = {
    "min_p": 0.1,
    "min_tokens": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "logit_bias": {5: 1.0},
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2],
    "prompt_logprobs": 0,
    "prompt_logprob_token_ids": [1],
    "logprob_token_ids": [1],
    "thinking_token_budget": 5,
    "trace_decode_token_ids": [1],
}


def test_the_list_of_unserved_parameters_is_covered():
    assert list(ASKED) == [name for name, _ in UNSUPPORTED_PARAMETERS]


@pytest.mark.parametrize(("name", "off"), UNSUPPORTED_PARAMETERS)
def test_an_unserved_parameter_is_refused_unless_off(name, off):
    params = SamplingParams()
    setattr(params, name, ASKED[name])
    with pytest.raises(VLLMValidationError) as error:
        RequestOptions.parse(params, CONFIG)
    assert error.value.parameter == name
    assert f"{name} = {ASKED[name]!r} is not served" in str(error.value)
    setattr(params, name, off)
    assert RequestOptions.parse(params, CONFIG) == parse()


def test_served_parameters_pass():
    served = dict(top_k=5, top_p=0.9, logprobs=3, seed=7, max_tokens=5, stop=["x"], n=2)
    assert parse(**served).seed == 7


# --- the scheduler's shortcut ---------------------------------------------------------------------


@pytest.mark.parametrize("extra", [None, {}, {"diffusion_canvas_length": None}])
def test_the_scheduler_finds_the_served_width(extra):
    assert requested_canvas_width(SamplingParams(extra_args=extra), 32) == 32
    assert requested_canvas_width(None, 32) == 32


@given(st.integers(1, 32))
def test_the_scheduler_and_the_parser_agree_on_the_width(width):
    params = SamplingParams(extra_args={"diffusion_canvas_length": width})
    assert requested_canvas_width(params, 32) == RequestOptions.parse(params, CONFIG).canvas_width

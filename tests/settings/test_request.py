"""What one request may ask for, and what of it is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from dllm.settings.admission import UNSUPPORTED_PARAMETERS, admit, admit_ids
from dllm.settings.request import (
    LEAST_ROWS,
    RequestOptions,
    extra_args,
    requested_canvas_width,
    with_edits,
)
from tests.support.denoise_cases import CONFIG

FLOATS = [f"diffusion_{name}" for name in ("t_min", "t_max", "entropy_bound", "confidence")]


VOCAB_SIZE = 50


def parse(extra: dict[str, Any] | None = None, **params: Any) -> RequestOptions:
    return admit(SamplingParams(extra_args=extra, **params), CONFIG, VOCAB_SIZE)


def refusal(extra: dict[str, Any] | None = None, **params: Any) -> VLLMValidationError:
    """The error of a refused request; vLLM answers it with HTTP 400."""
    with pytest.raises(VLLMValidationError) as error:
        parse(extra, **params)
    return error.value


def test_a_request_without_wishes_gets_the_servers_values():
    assert parse() == RequestOptions(
        canvas_width=32,
        parameters={
            "max_steps": 16,
            "t_min": 0.4,
            "t_max": 0.8,
            "entropy_bound": 1.0,
            "confidence": 0.2,
        },
        temperature=1.0,
        is_greedy=False,
        seed=None,
        stops=frozenset(),
        seed_canvas=None,
        pins={},
        holds_pins=False,
        is_read_only=False,
        num_rows=32,
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
            "diffusion_seed_canvas": [7, 0, 49, 3, 3, 3, 3, 3],
            "diffusion_pinned": [0, 7],
            "diffusion_pin_at": [40, 2],
            "diffusion_pin_ids": [5, 6],
            "diffusion_pin_mode": "hold",
            "diffusion_read_only": 1,
            "diffusion_constrained": True,
            "diffusion_eos_stop": False,
        },
        seed=-5,
        logprob_token_ids=[4, 5],
        stop_token_ids=[9],
    )
    seed_canvas, pins = [7, 0, 49, 3, 3, 3, 3, 3], {0: 7, 2: 6, 7: 3, 40: 5}
    parameters = {
        "max_steps": 3,
        "t_min": 0.1,
        "t_max": 2.0,
        "entropy_bound": 0.5,
        "confidence": 0.0,
    }
    rest = (False, -5, frozenset(), seed_canvas, pins, True, True, 8)
    assert options == RequestOptions(8, parameters, 1.0, *rest)


@pytest.mark.parametrize(
    ("given", "extra", "num_rows"),
    [
        ({"max_tokens": 1}, {}, LEAST_ROWS),
        ({"max_tokens": 6}, {}, 6),
        ({"max_tokens": 40}, {}, 32),
        ({"max_tokens": 6}, {"diffusion_canvas_length": 5}, 5),
        ({"max_tokens": 6}, {"diffusion_max_steps": 2}, 32),
        ({"max_tokens": 6}, {"diffusion_stream": "text"}, 32),
        ({"max_tokens": 6, "bad_words": ["a"]}, {}, 32),
        ({"max_tokens": 6, "structured_outputs": StructuredOutputsParams(regex="a")}, {}, 32),
    ],
)
def test_an_output_of_one_step_needs_logits_for_its_tokens_alone(given, extra, num_rows):
    extra_args = {"diffusion_max_steps": 1} | extra
    read = RequestOptions.read(SamplingParams(extra_args=extra_args, **given), CONFIG)
    assert read.num_rows == num_rows


def test_null_means_the_servers_value():
    assert parse(dict.fromkeys(extra_args(CONFIG))) == parse()


def test_reading_leaves_the_parameters_as_they_were():
    extra = {"diffusion_max_steps": 3}
    params = SamplingParams(extra_args=extra)
    first, second = (admit(params, CONFIG, VOCAB_SIZE) for _ in range(2))
    assert first == second and extra == {"diffusion_max_steps": 3}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_scales_the_models_schedule(temperature):
    options = parse(temperature=temperature)
    assert (options.parameters["t_min"], options.parameters["t_max"]) == (
        0.4 * temperature,
        0.8 * temperature,
    )
    assert not options.is_greedy


def test_temperature_zero_is_greedy_on_the_models_schedule():
    options = parse(temperature=0)
    assert options.is_greedy
    assert (options.parameters["t_min"], options.parameters["t_max"]) == (0.4, 0.8)


def test_the_stop_tokens_are_those_that_end_the_request():
    params = SamplingParams(stop_token_ids=[9, 8])
    params.update_from_generation_config({"eos_token_id": [1, 6]}, eos_token_id=1)
    assert RequestOptions.read(params, CONFIG).stops == {1, 6, 8, 9}
    params = SamplingParams(stop_token_ids=[9, 8], ignore_eos=True)
    params.update_from_generation_config({"eos_token_id": [1, 6]}, eos_token_id=1)
    assert RequestOptions.read(params, CONFIG).stops == {8, 9}


def test_a_constrained_request_is_allowed_its_logprob_token_ids():
    extra = {"diffusion_constrained": 1}
    params = SamplingParams(logprob_token_ids=[3, 4], extra_args=extra)
    assert with_edits(params).allowed_token_ids == [3, 4] and params.allowed_token_ids is None
    for flag in ({}, {"diffusion_constrained": 0}, None):
        params = SamplingParams(logprob_token_ids=[3, 4], extra_args=flag)
        assert with_edits(params) is params


def test_more_steps_than_served_are_clamped():
    assert parse({"diffusion_max_steps": 1000}).parameters["max_steps"] == 16


# --- refusals -------------------------------------------------------------------------------------


def test_a_refusal_says_what_is_allowed_and_what_is_meant_by_default():
    message = str(refusal({"diffusion_max_steps": 0}))
    assert message.startswith("diffusion_max_steps = 0; allowed: ") and "Omit it for 16." in message
    assert "'hint' or 'hold'" in str(refusal({"diffusion_pin_mode": "force"}))
    assert "a valid list" in str(refusal({"diffusion_trace": "entropy"}))


def test_a_long_value_is_not_sent_back_whole():
    message = str(refusal({"diffusion_t_min": "9" * 10_000}))
    assert "diffusion_t_min = '999" in message and len(message) < 500


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
    assert f"unknown extra argument {key!r}{hint}. Known: {', '.join(extra_args(CONFIG))}" in str(
        error
    )
    assert error.parameter == key


@pytest.mark.parametrize(
    "extra", [{"kv_transfer_params": {"a": 1}}, {"kv_cache_report_mode": "all"}]
)
def test_what_vllm_itself_puts_there_passes(extra):
    assert parse(extra) == parse()


@pytest.mark.parametrize("value", [0, 7, [5]])
@pytest.mark.parametrize("name", UNSUPPORTED_PARAMETERS)
def test_an_unserved_parameter_is_refused_unless_off(name, value):
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(VLLMValidationError) as error:
        admit(params, CONFIG, VOCAB_SIZE)
    assert error.value.parameter == name
    assert f"{name} = {value} is not served" in str(error.value)
    setattr(params, name, None)
    assert admit(params, CONFIG, VOCAB_SIZE) == parse()


# --- edits that cannot be honoured ----------------------------------------------------------------


def edits(bad_words: list[list[int]] | None = None, **params: Any) -> SamplingParams:
    """Parameters as `admit_ids` gets them, with bad words as ids."""
    resolved = SamplingParams(**params)
    resolved._bad_words_token_ids = bad_words
    return resolved


@pytest.mark.parametrize(
    ("params", "parameter", "count"),
    [
        (edits(allowed_token_ids=[1] * 1025), "allowed_token_ids", 1025),
        (edits(logit_bias={i: 1.0 for i in range(1025)}), "logit_bias", 1025),
        (edits(stop_token_ids=list(range(129)), min_tokens=1), "stop_token_ids", 129),
        (edits(bad_words=[[1] * 8] * 128 + [[1]]), "bad_words", 1025),
    ],
)
def test_edits_that_the_worker_cannot_hold(params, parameter, count):
    with pytest.raises(VLLMValidationError) as error:
        admit(params, CONFIG, 5000)
        admit_ids(params, CONFIG, 5000)
    assert error.value.parameter == parameter
    assert f"{parameter} comes to {count} tokens" in str(error.value)
    assert f"allowed: at most {count - 1}. Send fewer." in str(error.value)


@pytest.mark.parametrize(
    "params",
    [
        edits(allowed_token_ids=[5], bad_words=[[5]]),
        edits(allowed_token_ids=[5], bad_words=[[5, 5]]),
        edits(allowed_token_ids=[5, 6], bad_words=[[5, 6], [6, 5]]),
        edits(allowed_token_ids=[5, 6], stop_token_ids=[5, 6], min_tokens=1),
        edits(allowed_token_ids=[5, 6], stop_token_ids=[5], min_tokens=1, bad_words=[[7, 6]]),
        edits(bad_words=[[token] for token in range(VOCAB_SIZE)]),
    ],
)
def test_edits_that_may_leave_no_token(params):
    with pytest.raises(VLLMValidationError) as error:
        admit_ids(params, CONFIG, VOCAB_SIZE)
    assert "leaves no token that may always be emitted; allowed: at least one" in str(error.value)
    restriction = "allowed_token_ids" if params.allowed_token_ids else "bad_words"
    assert error.value.parameter == restriction


@pytest.mark.parametrize(
    "params",
    [
        edits(),
        edits(allowed_token_ids=[5, 6], bad_words=[[6, 5]]),
        edits(allowed_token_ids=[5], stop_token_ids=[5]),
        edits(allowed_token_ids=[5, 6], stop_token_ids=[5], min_tokens=1),
        edits(bad_words=[[token] for token in range(1, VOCAB_SIZE)]),
    ],
)
def test_edits_that_leave_a_token_pass(params):
    admit_ids(params, CONFIG, VOCAB_SIZE)


@pytest.mark.parametrize("word", [[7], [3, 7]])
def test_a_hint_that_ends_a_bad_word_is_refused_where_it_would_be_emitted(word):
    pin = {"diffusion_pin_at": [4], "diffusion_pin_ids": [7]}
    params = edits(bad_words=[word], extra_args=pin)
    admit_ids(params, CONFIG, VOCAB_SIZE)
    masks: Any = SimpleNamespace(never_emitted=(VOCAB_SIZE - 1,))
    with pytest.raises(VLLMValidationError) as error:
        admit_ids(params, masks, VOCAB_SIZE)
    assert error.value.parameter == "diffusion_pin_ids"
    held = edits(bad_words=[word], extra_args=pin | {"diffusion_pin_mode": "hold"})
    admit_ids(held, masks, VOCAB_SIZE)


def test_served_parameters_pass():
    served = dict(top_k=5, top_p=0.9, logprobs=3, seed=7, max_tokens=5, stop=["x"], n=2)
    served |= dict(min_p=0.1, min_tokens=2, presence_penalty=0.5, frequency_penalty=-0.5)
    served |= dict(repetition_penalty=1.2, logit_bias={5: 1.0}, bad_words=["no"])
    served |= dict(allowed_token_ids=[1, 2], prompt_logprobs=0, logprob_token_ids=[1])
    assert parse(**served).seed == 7


# --- the scheduler's shortcut ---------------------------------------------------------------------


@pytest.mark.parametrize("extra", [None, {}, {"diffusion_canvas_length": None}])
def test_the_scheduler_finds_the_served_width(extra):
    assert requested_canvas_width(SamplingParams(extra_args=extra), 32) == 32
    assert requested_canvas_width(None, 32) == 32


@given(st.integers(1, 32))
def test_the_scheduler_and_the_parser_agree_on_the_width(width):
    params = SamplingParams(extra_args={"diffusion_canvas_length": width})
    assert requested_canvas_width(params, 32) == RequestOptions.read(params, CONFIG).canvas_width

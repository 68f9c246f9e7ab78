"""The options of one request: how its canvases are denoised.

They come from the request's ``SamplingParams``. Arguments that vLLM does not know are in its
``extra_args``; over HTTP a client sends them as ``vllm_xargs``. The API server admits a request, or
refuses it with HTTP 400 (``settings.admission``); the worker reads those that were admitted.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args

from pydantic import BaseModel, Field, ValidationError, create_model

from dllm.settings.checks import did_you_mean
from dllm.settings.denoising import NO_TOKEN, DenoiseSettings, Parameter, types_of
from dllm.settings.options import CHECKED, MAX_INT32, allowed
from dllm.settings.pins import (
    PIN_AT,
    PIN_IDS,
    PINNED,
    PINNED_CANVASES,
    SEED_CANVAS,
    held_length,
    holds,
    pins_of,
)

if TYPE_CHECKING:
    from vllm import SamplingParams

# Values of --logprobs-mode with which logits are returned in the place of log-probabilities.
LOGITS_MODES = ("raw_logits", "processed_logits")
# The table of a grammar, which structured outputs ship to the worker (``dllm.grammar``).
GRAMMAR_ARG = "dllm_grammar"
STREAM, STREAM_EVERY, TRACE = "diffusion_stream", "diffusion_stream_every", "diffusion_trace"
READ_ONLY, CONSTRAINED = "diffusion_read_only", "diffusion_constrained"
EOS_STOP, CANVAS_LENGTH = "diffusion_eos_stop", "diffusion_canvas_length"
# vLLM's sampling parameter; where a route has no such field it comes as an extra argument.
BUDGET = "thinking_token_budget"
MODE = "diffusion_mode"  # only for families that have ``DenoiseSettings.modes``

# Logits are computed for at least so many tokens together. On a CPU, matrix products of fewer rows
# add in another order, so that a request would have other logits alone than in a batch.
LEAST_ROWS = 4

# Arguments that a model with blocks does not take: its first canvas is as wide as the room that the
# prompt leaves in its block, which the client does not know.
WHOLE_CANVAS_ARGS = (SEED_CANVAS, PINNED, READ_ONLY)

Flag = bool | Annotated[int, Field(ge=0, le=1)]  # JSON's booleans arrive over HTTP as 0 and 1
Integers = Annotated[list[int], Field(strict=False, fail_fast=True)]  # tuples are taken, too
TraceExtra = Literal["entropy", "behind_stop"]
TraceExtras = Annotated[list[TraceExtra], Field(strict=False, fail_fast=True)]


class ExtraArgs(BaseModel):
    """Extra arguments of every family. A null counts as left out."""

    model_config = CHECKED

    diffusion_canvas_length: int
    """Tokens of a canvas, at most the served number."""

    diffusion_seed_canvas: Integers | None = None
    diffusion_pinned: Integers | None = None
    diffusion_pin_at: Integers | None = None
    diffusion_pin_ids: Integers | None = None
    diffusion_pin_mode: Literal["hint", "hold"] | None = None
    """``settings.pins`` describes these five."""

    diffusion_read_only: Flag = False
    """The whole output is one canvas, and its logprobs are those at temperature 1."""

    diffusion_constrained: Flag = False
    """Only tokens of ``logprob_token_ids`` are emitted; ``with_edits`` writes it out."""

    diffusion_eos_stop: Flag = True
    """What follows a token that ends the request need not converge."""

    diffusion_stream: Literal["canvas", "text"] | None = None
    """How a streaming request sees its unfinished canvases (``api.events``): each position, or the
    text that they stand for. ``engine.frame_taker`` reads it, and the next one."""

    diffusion_stream_every: Literal["pass", "visit"] | None = None
    """How often: after each denoise step, or once for each engine step."""

    diffusion_trace: Flag | TraceExtras | None = None
    """Asks when each token was decided, and how likely it was then (``engine.traces``): true, or a
    list of what else is wanted: the entropy of each token's distribution, or the tokens behind the
    stop token in the last block. ``traced`` reads it."""

    thinking_token_budget: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    """vLLM's own, which ``with_edits`` makes of it."""

    # What the server itself sets. A client cannot send ``bytes``, because JSON has none.
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    kv_cache_report_mode: str | None = None
    dllm_grammar: bytes | None = None


OF_SERVER = ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode", GRAMMAR_ARG)


@functools.lru_cache
def _model(settings: DenoiseSettings, mode: str | None = None) -> type[ExtraArgs]:
    """``mode``: whose numbers are the defaults; None: the server's."""
    widest = settings.canvas_length
    narrowest = 1 if settings.block_size == 1 else widest  # with blocks it is the rest of a block
    fields: dict[str, Any] = {
        CANVAS_LENGTH: (Annotated[int, Field(ge=narrowest, le=widest)], widest)
    }
    if settings.modes:
        fields[MODE] = (Literal[tuple(settings.modes)] | None, None)
    of_mode = {} if mode is None else settings.modes[mode]
    for one in settings.parameters:
        default = of_mode.get(one.setting, getattr(settings, one.setting))
        fields[one.key] = (types_of(type(settings))[one.setting], default)
    return create_model("ExtraArgs", __base__=ExtraArgs, **fields)


def extra_args(settings: DenoiseSettings) -> list[str]:
    """The names of all extra arguments that a request may send to a model with these settings."""
    refused = {*OF_SERVER, *(WHOLE_CANVAS_ARGS if settings.block_size > 1 else ())}
    return [name for name in _model(settings).model_fields if name not in refused]


@dataclass(frozen=True)
class RequestOptions:
    """How one request's canvases are denoised."""

    canvas_width: int  # tokens per canvas, at most the served canvas_length
    parameters: Mapping[str, float]  # of the family, by the name of the ``Parameter``
    temperature: float  # 1 if the request is greedy
    # Its temperature is 0: the most likely token is taken instead of a sample. Entropies and
    # stopping are those of the model's own temperature schedule.
    is_greedy: bool
    seed: int | None  # of the noise; None: the server chooses (``engine.records.request_seed``)
    # Tokens that end the request. What follows the first of them in a canvas need not converge.
    # Empty with ``diffusion_eos_stop: false``, the reference's rule.
    stops: frozenset[int]
    seed_canvas: Sequence[int] | None  # the first canvas, -1 for noise; None: noise everywhere
    pins: Mapping[int, int]  # given tokens by answer position (``pins``), which stay in the input
    holds_pins: bool  # they are emitted, too
    is_read_only: bool  # the output is one canvas, and its logprobs are those at temperature 1
    num_rows: int  # how many tokens of a canvas, from its first, need logits

    @classmethod
    def read(cls, params: "SamplingParams", settings: DenoiseSettings) -> "RequestOptions":
        """Of a request, or vLLM's own of the warm-up. VLLMValidationError: wrong ``extra_args``."""
        extra = params.extra_args or {}
        given = _given(extra, settings)
        width = given[CANVAS_LENGTH]
        is_greedy = params.temperature < 1e-5
        temperature = 1.0 if is_greedy else params.temperature
        asked = {one.name: _number(settings, one, given[one.key]) for one in settings.parameters}
        if extra:
            _check_pins(given, width, settings.canvas_length)
        if given[STREAM_EVERY] is not None and given[STREAM] is None:
            refuse(STREAM_EVERY, f"{STREAM_EVERY} without {STREAM}. Send both, or omit both.")
        stops = {params.eos_token_id, *(params.stop_token_ids or ())} - {None}
        return cls(
            canvas_width=width,
            parameters=settings.of_request(asked, temperature),
            temperature=temperature,
            is_greedy=is_greedy,
            seed=params.seed,
            stops=frozenset(stops if given[EOS_STOP] else ()),
            seed_canvas=given[SEED_CANVAS],
            pins=pins_of(given),
            holds_pins=holds(given),
            is_read_only=bool(given[READ_ONLY]),
            num_rows=min(_num_rows(params, settings, width), int(asked.get("block_length", width))),
        )


def _num_rows(params: "SamplingParams", settings: DenoiseSettings, width: int) -> int:
    """In a request of one denoise step a token does not depend on the logits of another.

    If its output is shorter than its first canvas, what is behind the output is never used: then
    the output alone needs logits. A grammar, bad words, frames and traces look at the whole canvas.
    """
    extra = params.extra_args or {}
    is_whole = params.structured_outputs or params.bad_words or STREAM in extra or TRACE in extra
    if is_whole or any(extra.get(key) != value for key, value in settings.one_step.items()):
        return width
    return min(width, max(LEAST_ROWS, params.max_tokens or width))


def requested_canvas_width(params: "SamplingParams | None", canvas_length: int) -> int:
    extra = params.extra_args if params is not None else None
    return (extra or {}).get(CANVAS_LENGTH) or canvas_length


def traced(params: "SamplingParams") -> frozenset[str] | None:
    """What an admitted request wants in its trace beside the rest; None if it wants none."""
    asked = (params.extra_args or {}).get(TRACE)
    if isinstance(asked, list | tuple):
        return frozenset(asked)
    return frozenset() if asked else None


def of_one_canvas(params: "SamplingParams", canvas_width: int) -> "SamplingParams":
    """A copy of the parameters with ``diffusion_read_only`` written out, as in vLLM."""
    params = params.clone()
    if (params.extra_args or {}).get(READ_ONLY):
        params.max_tokens = min(params.max_tokens or canvas_width, canvas_width)
        params.ignore_eos = True
    return params


def with_edits(params: "SamplingParams") -> "SamplingParams":
    """The parameters of a request with our own arguments written as vLLM's edits of logits.

    ``diffusion_constrained``: the allowed tokens are its ``logprob_token_ids``. Held pins: the
    answer does not end before the last of them (``min_tokens``). ``thinking_token_budget``: vLLM's
    own. The result is a copy, or ``params`` itself if there is nothing to write.
    """
    extra = params.extra_args or {}
    held = pins_of(extra) if holds(extra) else {}
    if not extra.get(CONSTRAINED) and not held and extra.get(BUDGET) is None:
        return params
    params = params.clone()
    params.extra_args = {key: extra[key] for key in extra if key not in (BUDGET, CONSTRAINED)}
    if (budget := extra.get(BUDGET)) is not None:
        params.thinking_token_budget = None if budget < 0 else budget
    if extra.get(CONSTRAINED):
        params.allowed_token_ids = params.logprob_token_ids
    params.min_tokens = max(params.min_tokens, held_length(held, params.all_stop_token_ids))
    return params


def has_structured_outputs(params: "SamplingParams") -> bool:
    """Whether a request has a schema, a pattern, a grammar or choices; an empty object is none."""
    asked = params.structured_outputs
    return asked is not None and not asked.all_constraints_none()


def grammar_of(params: "SamplingParams") -> bytes | None:
    """The table that an admitted request ships; None without structured outputs."""
    return (params.extra_args or {}).get(GRAMMAR_ARG)


def with_grammar(params: "SamplingParams", serialized: bytes) -> "SamplingParams":
    """A copy of the parameters that ships a compiled grammar; ``grammar_of`` reads it."""
    params = params.clone()
    params.extra_args = (params.extra_args or {}) | {GRAMMAR_ARG: serialized}
    return params


def refuse(parameter: str, message: str) -> NoReturn:
    """Refuse a request with HTTP 400: always raises VLLMValidationError."""
    from vllm.exceptions import VLLMValidationError  # here: training uses this module without vLLM

    raise VLLMValidationError(message, parameter=parameter)


def refuse_value(
    parameter: str, value: object, allowed: object, what_to_do: str = "Send one of these."
) -> NoReturn:
    refuse(parameter, f"{parameter} = {shown(value)}; allowed: {allowed}. {what_to_do}")


def check_integers(name: str, values: Any, at_least: int, at_most: int) -> None:
    """Refuse the first integer out of range; None passes. The engine has 32- and 64-bit fields."""
    for value in values or ():
        if value is not None and not at_least <= value <= at_most:
            allowed = f"an integer from {at_least} to {at_most}"
            refuse_value(name, value, allowed, "Send one of these, or omit it.")


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _given(extra: Mapping[str, Any], settings: DenoiseSettings) -> Mapping[str, Any]:
    """Raises VLLMValidationError: an argument is unknown, or its value is not allowed."""
    mode = extra.get(MODE)
    model = _model(settings, mode if mode in (*settings.modes,) else None)
    for key in extra:
        if key not in model.model_fields:
            names, name = extra_args(settings), str(key)[:100]
            refuse(
                name,
                f"unknown extra argument {shown(key)}{did_you_mean(name, names)}. "
                f"Known: {', '.join(names)}. Remove it or correct its name.",
            )
    try:
        given = model.model_validate({key: one for key, one in extra.items() if one is not None})
    except ValidationError as error:
        errors = error.errors(include_url=False)
        name = str(errors[0]["loc"][0])
        default = model.model_fields[name].default
        omitted = "none" if default is None else str(default).lower()
        texts = allowed(one for one in errors if one["loc"][0] == name)
        refuse_value(name, extra[name], texts, f"Omit it for {omitted}.")
    return vars(given)


def _number(settings: DenoiseSettings, parameter: Parameter, value: Any) -> float:
    """A parameter as a number; of a name, its index."""
    if isinstance(value, str):
        return get_args(types_of(type(settings))[parameter.setting]).index(value)
    number: float = value if parameter.dtype == "int32" else float(value)
    return number


def _check_pins(given: Mapping[str, Any], width: int, canvas_length: int) -> None:
    """Refuse pins that are not one token for each of some different positions."""
    seed_canvas = given[SEED_CANVAS]
    pinned, at, ids = (given[key] or () for key in (PINNED, PIN_AT, PIN_IDS))
    if seed_canvas is not None and len(seed_canvas) != width:
        refuse(
            SEED_CANVAS,
            f"{SEED_CANVAS} holds {len(seed_canvas)} ids; allowed: exactly {width}, one for each "
            "position of the canvas. Send that many, or set diffusion_canvas_length.",
        )
    if pinned and seed_canvas is None:
        refuse(
            PINNED,
            f"{PINNED} = {shown(list(pinned))} without {SEED_CANVAS}; allowed: positions of a "
            "canvas that is sent with it. Send both, or omit both.",
        )
    check_integers(PINNED, pinned, 0, width - 1)
    for position in pinned:
        if seed_canvas[position] == NO_TOKEN:
            refuse(
                PINNED,
                f"{PINNED} has position {position}, where {SEED_CANVAS} is {NO_TOKEN}; allowed: "
                "positions with a token. Give one there, or leave the position out.",
            )
    if len(at) != len(ids):
        refuse(
            PIN_AT,
            f"{PIN_AT} holds {len(at)} positions and {PIN_IDS} {len(ids)} ids; allowed: one id "
            "for each position. Send as many.",
        )
    check_integers(PIN_AT, at, 0, PINNED_CANVASES * canvas_length - 1)
    if len({*pinned, *at}) < len({*pinned}) + len(at):
        refuse_value(
            PIN_AT, list(at), f"each position once, and none of {PINNED}", "Leave one out."
        )

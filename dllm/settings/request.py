"""The options of one request: how its canvases are denoised.

They come from the request's ``SamplingParams``. Arguments that vLLM does not know are in its
``extra_args``; over HTTP a client sends them as ``vllm_xargs``. The API server admits a request, or
refuses it with HTTP 400 (``settings.admission``); the worker reads those that were admitted.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dllm.settings.checks import Choices, IntRange, Values, did_you_mean, is_list_of
from dllm.settings.denoising import NO_TOKEN, DenoiseSettings, Parameter
from dllm.settings.pins import (
    PIN_AT,
    PIN_IDS,
    PIN_MODE,
    PIN_MODES,
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
# How a streaming request sees its unfinished canvases (``api.events``). The form: each position, or
# the text that they stand for. How often: after each denoise step, or once for each engine step.
STREAM, STREAM_FORMS = "diffusion_stream", ("canvas", "text")
STREAM_EVERY, STREAM_PERIODS = "diffusion_stream_every", ("pass", "visit")
READ_ONLY, CONSTRAINED = "diffusion_read_only", "diffusion_constrained"
EOS_STOP = "diffusion_eos_stop"
# Asks when each token was decided, and how likely it was then (``engine.traces``): true, or a list
# of what else is wanted: the "entropy" of each token's distribution, or the tokens "behind_stop" in
# the last block.
TRACE, TRACE_EXTRAS = "diffusion_trace", ("entropy", "behind_stop")
# vLLM's sampling parameter; where a route has no such field it comes as an extra argument.
BUDGET = "thinking_token_budget"
MODE = "diffusion_mode"  # only for families that have ``DenoiseSettings.modes``

# Logits are computed for at least so many tokens together. On a CPU, matrix products of fewer rows
# add in another order, so that a request would have other logits alone than in a batch.
LEAST_ROWS = 4

# Arguments that a model with blocks does not take: its first canvas is as wide as the room that the
# prompt leaves in its block, which the client does not know.
WHOLE_CANVAS_ARGS = (SEED_CANVAS, PINNED, READ_ONLY)

MAX_INT32 = 2**31 - 1


# JSON's booleans arrive over HTTP as 0 and 1.
FLAG = Values(lambda one: isinstance(one, int) and one in (0, 1), "true or false (or 1 or 0)")
INTEGERS = Values(lambda one: is_list_of(int, one), "a list of integers")
TRACES = Values(
    lambda one: one in FLAG or (is_list_of(str, one) and {*one} <= {*TRACE_EXTRAS}),
    f"{FLAG}, or a list of {', '.join(map(repr, TRACE_EXTRAS))}",
)
CANVAS_LENGTH = "diffusion_canvas_length"
# Extra arguments of every family: (allowed values, default).
COMMON: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys((SEED_CANVAS, PINNED, PIN_AT, PIN_IDS), (INTEGERS, None)),
    PIN_MODE: (Choices(PIN_MODES), None),
    READ_ONLY: (FLAG, False),
    CONSTRAINED: (FLAG, False),  # ``constrained`` writes it out
    EOS_STOP: (FLAG, True),
    STREAM: (Choices(STREAM_FORMS), None),  # ``engine.frame_taker`` reads it, and the next one
    STREAM_EVERY: (Choices(STREAM_PERIODS), None),
    TRACE: (TRACES, None),  # ``traced`` reads it
    BUDGET: (IntRange(-1, MAX_INT32), None),  # ``constrained`` writes it out
}


def _of_type(kind: type) -> Values:
    return Values(lambda one: isinstance(one, kind), f"a {kind.__name__}")


# Extra arguments that the server itself sets. A client cannot send ``bytes``, because JSON has
# none.
OF_SERVER: dict[str, tuple[Any, Any]] = {
    "kv_transfer_params": (_of_type(dict), None),
    "ec_transfer_params": (_of_type(dict), None),
    "kv_cache_report_mode": (_of_type(str), None),
    GRAMMAR_ARG: (_of_type(bytes), None),
}


@functools.lru_cache
def _arguments(settings: DenoiseSettings, mode: str | None = None) -> dict[str, tuple[Any, Any]]:
    """The extra arguments that a model with these settings knows: (allowed values, default).

    Args:
        mode: whose numbers are the defaults; None: the server's.
    """
    widest = settings.canvas_length
    narrowest = 1 if settings.block_size == 1 else widest  # with blocks it is the rest of a block
    found: dict[str, tuple[Any, Any]] = {CANVAS_LENGTH: (IntRange(narrowest, widest), widest)}
    if settings.modes:
        found[MODE] = Choices(tuple(settings.modes)), None
    of_mode = {} if mode is None else settings.modes[mode]
    for one in settings.parameters:
        default = of_mode.get(one.setting, getattr(settings, one.setting))
        found[one.key] = one.allowed, default
    return found | COMMON | OF_SERVER


def extra_args(settings: DenoiseSettings) -> list[str]:
    """The names of all extra arguments that a request may send to a model with these settings."""
    refused = {*OF_SERVER, *(WHOLE_CANVAS_ARGS if settings.block_size > 1 else ())}
    return [key for key in _arguments(settings) if key not in refused]


@dataclass(frozen=True)
class RequestOptions:
    """How one request's canvases are denoised.

    Attributes:
        canvas_width: tokens per canvas, at most the served canvas_length.
        parameters: the values of the family's parameters, by the name of the ``Parameter``.
        temperature: of the request; 1 if it is greedy.
        is_greedy: ``temperature`` is 0: the most likely token is taken instead of a sample.
            Entropies and stopping are those of the model's own temperature schedule.
        seed: of the request's noise; None: the server chooses one (``engine.state.request_seed``).
        stops: tokens that end the request. What follows the first of them in a canvas need not
            converge. Empty with ``diffusion_eos_stop: false``, the reference's rule.
        seed_canvas: the first contents of the first canvas, -1 for noise; None: noise everywhere.
        pins: given tokens by answer position (``settings.pins``). They stay in the input.
        holds_pins: they are emitted, too.
        is_read_only: the whole output is one canvas, and its logprobs are those at temperature 1.
        num_rows: how many tokens of a canvas, from its first, need logits.
    """

    canvas_width: int
    parameters: Mapping[str, float]
    temperature: float
    is_greedy: bool
    seed: int | None
    stops: frozenset[int]
    seed_canvas: tuple[int, ...] | None
    pins: Mapping[int, int]
    holds_pins: bool
    is_read_only: bool
    num_rows: int

    @classmethod
    def read(cls, params: "SamplingParams", settings: DenoiseSettings) -> "RequestOptions":
        """The options of a request that was admitted, or that vLLM made up to warm up.

        Raises:
            VLLMValidationError: a value in ``extra_args`` is not allowed.
        """
        extra = params.extra_args or {}
        given = _given(extra, settings)
        width = given[CANVAS_LENGTH]
        is_greedy = params.temperature < 1e-5
        temperature = 1.0 if is_greedy else params.temperature
        asked = {one.name: _number(one, given[one.key]) for one in settings.parameters}
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
            seed_canvas=given[SEED_CANVAS] and tuple(given[SEED_CANVAS]),
            pins=pins_of(given),
            holds_pins=holds(given),
            is_read_only=bool(given[READ_ONLY]),
            num_rows=_num_rows(params, settings, width),
        )


def _num_rows(params: "SamplingParams", settings: DenoiseSettings, width: int) -> int:
    """How many tokens of a canvas of ``width`` tokens need logits.

    In a request of one denoise step a token does not depend on the logits of another. If its output
    is shorter than its first canvas, what is behind the output is never used: then the output alone
    needs logits. A grammar, bad words, frames and traces look at the whole canvas.
    """
    extra = params.extra_args or {}
    is_whole = params.structured_outputs or params.bad_words or STREAM in extra or TRACE in extra
    if is_whole or any(extra.get(key) != value for key, value in settings.one_step.items()):
        return width
    return min(width, max(LEAST_ROWS, params.max_tokens or width))


def requested_canvas_width(params: "SamplingParams | None", canvas_length: int) -> int:
    """The canvas width that an admitted request asks for, else ``canvas_length``."""
    extra = params.extra_args if params is not None else None
    return (extra or {}).get(CANVAS_LENGTH) or canvas_length


def traced(params: "SamplingParams") -> frozenset[str] | None:
    """What an admitted request wants in its trace beside the rest; None if it wants none."""
    asked = (params.extra_args or {}).get(TRACE)
    if isinstance(asked, list | tuple):
        return frozenset(asked)
    return frozenset() if asked else None


def constrained(params: "SamplingParams") -> "SamplingParams":
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
    """Refuse a value with HTTP 400: what was given, what is allowed, what to do."""
    refuse(parameter, f"{parameter} = {shown(value)}; allowed: {allowed}. {what_to_do}")


def check_integers(name: str, values: Any, at_least: int, at_most: int) -> None:
    """Refuse the first integer out of range; None passes. The engine has 32- and 64-bit fields."""
    for value in values or ():
        if value is not None and not at_least <= value <= at_most:
            allowed = f"an integer from {at_least} to {at_most}"
            refuse_value(name, value, allowed, "Send one of these, or omit it.")


def shown(value: object) -> str:
    """A value as it appears in a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _given(extra: Mapping[str, Any], settings: DenoiseSettings) -> Mapping[str, Any]:
    """The value of every extra argument: what the request has sent, else its default.

    Raises:
        VLLMValidationError: an argument is unknown, or its value is not allowed.
    """
    mode = extra.get(MODE)
    known = _arguments(settings, mode if mode in (*settings.modes,) else None)
    given = {key: default for key, (_, default) in known.items()}
    for key, value in extra.items():
        if key not in known:
            names, name = extra_args(settings), str(key)[:100]
            refuse(
                name,
                f"unknown extra argument {shown(key)}{did_you_mean(name, names)}. "
                f"Known: {', '.join(names)}. Remove it or correct its name.",
            )
        if value is None:
            continue
        allowed, default = known[key]
        if value not in allowed:
            omitted = "none" if default is None else str(default).lower()
            refuse_value(key, value, allowed, f"Omit it for {omitted}.")
        given[key] = value
    return given


def _number(parameter: Parameter, value: Any) -> float:
    """A parameter as a number: an int if only integers are allowed; of a name, its index."""
    if isinstance(parameter.allowed, Choices):
        return parameter.allowed.names.index(value)
    return value if isinstance(parameter.allowed, IntRange) else float(value)


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

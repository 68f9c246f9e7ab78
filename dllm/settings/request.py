"""The options of one request: how its canvases are denoised.

They come from the request's ``SamplingParams``. Arguments that vLLM does not know are in its
``extra_args``; over HTTP a client sends them as ``vllm_xargs``. The API server admits a request, or
refuses it with HTTP 400 (``settings.admission``); the worker reads those that were admitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dllm.settings.checks import Choices, IntRange, did_you_mean
from dllm.settings.denoising import NO_TOKEN, DenoiseSettings, Parameter
from dllm.settings.pins import (
    PIN_ARGS,
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

# The table of a grammar, which structured outputs ship to the worker (``dllm.grammar``).
GRAMMAR_ARG = "dllm_grammar"
# Keys that the server itself puts into extra_args, and the type of value that is expected there.
# JSON has no bytes, so that no client can send a grammar's table.
ENGINE_EXTRA_ARGS = {
    "kv_transfer_params": dict,
    "ec_transfer_params": dict,
    "kv_cache_report_mode": str,
    GRAMMAR_ARG: bytes,
}

# How a streaming request sees its unfinished canvases (``api.events``): each position, or the text
# that they stand for; after each denoise step, or once for each visit of the worker.
STREAM, STREAM_FORMS = "diffusion_stream", ("canvas", "text")
STREAM_EVERY, STREAM_PERIODS = "diffusion_stream_every", ("pass", "visit")
READ_ONLY, CONSTRAINED = "diffusion_read_only", "diffusion_constrained"
EOS_STOP = "diffusion_eos_stop"
# When each token was decided, and how likely it was then (``engine.traces``): true, or what else is
# wanted, as a list. "entropy" of its distribution; the tokens "behind_stop" in the last block.
TRACE, TRACE_EXTRAS = "diffusion_trace", ("entropy", "behind_stop")
MODE = "diffusion_mode"  # of families that have ``DenoiseSettings.modes``

# The logits of so many tokens at least are computed together. On a CPU, matrix products of fewer
# rows add in another order, and the same request would have other logits in a crowd.
LEAST_ROWS = 4

# Extra arguments of every family, beside the family's own parameters.
CANVAS_ARGS = (*PIN_ARGS, READ_ONLY, CONSTRAINED, EOS_STOP, STREAM, STREAM_EVERY, TRACE)

# Those of them that a model with blocks does not take: its first canvas is as wide as the prompt
# leaves room in its block, which the client does not know.
WHOLE_CANVAS_ARGS = (SEED_CANVAS, PINNED, READ_ONLY)

MAX_INT32 = 2**31 - 1


class _Flag:
    """JSON's booleans, which arrive over HTTP as 0 and 1."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and value in (0, 1)

    def __str__(self) -> str:
        return "true or false (or 1 or 0)"


class _Integers:
    """Lists of integers, none of them a bool."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, list | tuple) and all(type(item) is int for item in value)

    def __str__(self) -> str:
        return "a list of integers"


class _Trace(_Flag):
    """A flag, or a list of ``TRACE_EXTRAS``."""

    def __contains__(self, value: object) -> bool:
        if isinstance(value, list | tuple):
            return all(one in TRACE_EXTRAS for one in value)
        return super().__contains__(value)

    def __str__(self) -> str:
        return f"{super().__str__()}, or a list of {', '.join(map(repr, TRACE_EXTRAS))}"


@dataclass(frozen=True)
class RequestOptions:
    """How one request's canvases are denoised.

    Attributes:
        canvas_width: tokens per canvas, at most the served canvas_length.
        numbers: the values of the family's parameters, by the name of the ``Parameter``.
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
    numbers: Mapping[str, float]
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
        extra = dict(params.extra_args or {})
        width = _take_number(extra, _canvas_width(settings), settings.canvas_length)
        mode = _take(extra, MODE, Choices(tuple(settings.modes))) if settings.modes else None
        defaults = {} if mode is None else settings.modes[mode]
        asked = {
            one.name: _take_number(
                extra, one, defaults.get(one.setting, getattr(settings, one.setting))
            )
            for one in settings.parameters
        }
        is_greedy = params.temperature < 1e-5
        temperature = 1.0 if is_greedy else params.temperature
        numbers = settings.of_request(asked, temperature)
        given = {
            key: _take(extra, key, _Integers()) for key in (SEED_CANVAS, PINNED, PIN_AT, PIN_IDS)
        }
        given[PIN_MODE] = _take(extra, PIN_MODE, Choices(PIN_MODES))
        _check_pins(given, int(width), settings.canvas_length)
        is_read_only = _take(extra, READ_ONLY, _Flag(), default=False)
        _take(extra, CONSTRAINED, _Flag(), default=False)  # ``constrained`` writes it out
        eos_stop = _take(extra, EOS_STOP, _Flag(), default=True)
        _take(extra, TRACE, _Trace())  # ``traced`` reads it
        form = _take(extra, STREAM, Choices(STREAM_FORMS))  # ``engine.frame_taker`` reads it
        if _take(extra, STREAM_EVERY, Choices(STREAM_PERIODS)) is not None and form is None:
            refuse(STREAM_EVERY, f"{STREAM_EVERY} without {STREAM}. Send both, or omit both.")
        _refuse_unknown(extra, settings)
        stops = {params.eos_token_id, *(params.stop_token_ids or ())} - {None} if eos_stop else ()
        return cls(
            canvas_width=int(width),
            numbers=numbers,
            temperature=temperature,
            is_greedy=is_greedy,
            seed=params.seed,
            stops=frozenset(stops),
            seed_canvas=given[SEED_CANVAS] and tuple(given[SEED_CANVAS]),
            pins=pins_of(given),
            holds_pins=holds(given),
            is_read_only=bool(is_read_only),
            num_rows=_num_rows(params, settings, int(width)),
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


def _canvas_width(settings: DenoiseSettings) -> Parameter:
    """The parameter that every family has: the width of the request's canvases.

    With blocks there is nothing to choose: a canvas is the rest of its block.
    """
    least = 1 if settings.block_size == 1 else settings.canvas_length
    allowed = IntRange(least, settings.canvas_length)
    return Parameter("canvas_length", "canvas_length", allowed, "int32")


def extra_args(settings: DenoiseSettings) -> list[str]:
    """The names of all extra arguments that a request may send to a model with these settings."""
    numbers = [parameter.key for parameter in settings.parameters]
    refused = WHOLE_CANVAS_ARGS if settings.block_size > 1 else ()
    others = [key for key in CANVAS_ARGS if key not in refused]
    modes = [MODE] if settings.modes else []
    return [_canvas_width(settings).key, *modes, *numbers, *others]


def requested_canvas_width(params: "SamplingParams | None", canvas_length: int) -> int:
    """The canvas width that an admitted request asks for, else ``canvas_length``."""
    extra = params.extra_args if params is not None else None
    return (extra or {}).get("diffusion_canvas_length") or canvas_length


def traced(params: "SamplingParams") -> frozenset[str] | None:
    """What an admitted request wants in its trace beside the rest; None if it wants none."""
    asked = (params.extra_args or {}).get(TRACE)
    if isinstance(asked, list | tuple):
        return frozenset(asked)
    return frozenset() if asked else None


def constrained(params: "SamplingParams") -> "SamplingParams":
    """The parameters of a request with our own arguments written as vLLM's edits of logits.

    ``diffusion_constrained``: the allowed tokens are its ``logprob_token_ids``. Held pins: the
    answer does not end before the last of them (``min_tokens``). The result is a copy, or
    ``params`` itself if there is nothing to write.
    """
    extra = params.extra_args or {}
    held = pins_of(extra) if holds(extra) else {}
    if not extra.get(CONSTRAINED) and not held:
        return params
    params = params.clone()
    if extra.get(CONSTRAINED):
        params.allowed_token_ids = params.logprob_token_ids
    params.min_tokens = max(params.min_tokens, held_length(held, params.all_stop_token_ids))
    return params


def has_structured_outputs(params: "SamplingParams") -> bool:
    """Whether the request asks for structured outputs."""
    asked = params.structured_outputs
    return asked is not None and not asked.all_constraints_none()


def grammar_of(params: "SamplingParams") -> bytes | None:
    """The table that an admitted request ships; None without structured outputs."""
    return (params.extra_args or {}).get(GRAMMAR_ARG)


def with_grammar(params: "SamplingParams", shipped: bytes) -> "SamplingParams":
    """A copy of the request's parameters that ships a table."""
    params = params.clone()
    params.extra_args = (params.extra_args or {}) | {GRAMMAR_ARG: shipped}
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
    """A value as it appears in a message; a long one is cut."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _refuse_unknown(extra: Mapping[str, object], settings: DenoiseSettings) -> None:
    """Refuse what is left in ``extra`` when all is taken, except the server's keys."""
    known = extra_args(settings)
    for key, value in extra.items():
        expected = ENGINE_EXTRA_ARGS.get(key)
        if expected is None:
            refuse(
                str(key)[:100],
                f"unknown extra argument {shown(key)}"
                f"{did_you_mean(str(key)[:100], known)}. "
                f"Known: {', '.join(known)}. Remove it or correct its name.",
            )
        if value is not None and not isinstance(value, expected):
            allowed = f"a {expected.__name__}"
            refuse_value(key, value, allowed, "Leave it out: the server sets it.")


def _take(extra: dict[str, Any], key: str, allowed: Any, default: Any = None) -> Any:
    """Pop a value from ``extra`` that ``allowed`` contains, else the default."""
    value = extra.pop(key, None)
    value = default if value is None else value
    if value is not None and value not in allowed:
        omitted = "none" if default is None else str(default).lower()
        refuse_value(key, value, allowed, f"Omit it for {omitted}.")
    return value


def _take_number(extra: dict[str, Any], parameter: Parameter, default: float) -> float:
    """Pop a parameter's value: an int if only integers are allowed, else a float.

    Of a name, the result is the index. default: of the setting, as it stands there.
    """
    value = _take(extra, parameter.key, parameter.allowed, default)
    if isinstance(parameter.allowed, Choices):
        return parameter.allowed.names.index(value)
    return value if isinstance(parameter.allowed, IntRange) else float(value)


def _check_pins(given: Mapping[str, Any], width: int, canvas_length: int) -> None:
    """Refuse pins that are not one token for each of some different positions.

    Args:
        given: what the request has sent, by the names of ``PIN_ARGS``.
        width: of the request's canvases.
        canvas_length: the served one.
    """
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

"""The options of one request: how its canvases are denoised.

They come from the request's ``SamplingParams``. Arguments that vLLM does not know are in its
``extra_args``; over HTTP a client sends them as ``vllm_xargs``. ``RequestOptions.parse`` runs in
the API server and refuses bad input with HTTP 400. ``RequestOptions.read`` runs in the worker, on
requests that were admitted.
"""

from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from dllm.settings.checks import Choices, FloatRange, IntRange, did_you_mean
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

GRAMMAR_ARG = "dllm_grammar"  # of structured outputs (``settings.structured``)
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

# Extra arguments of every family, beside the family's own parameters.
CANVAS_ARGS = (
    *PIN_ARGS,
    "diffusion_read_only",
    "diffusion_constrained",
    "diffusion_eos_stop",
    STREAM,
    STREAM_EVERY,
)

# Those of them that a model with blocks does not take: its first canvas is as wide as the prompt
# leaves room in its block, which the client does not know.
WHOLE_CANVAS_ARGS = (*PIN_ARGS, "diffusion_read_only")

# Sampling parameters that our sampler does not apply; they are refused.
UNSUPPORTED_PARAMETERS = ("thinking_token_budget", "trace_decode_token_ids")

MAX_INT32 = 2**31 - 1
# Of lists that are copied for each prompt and sample. vLLM's worker has tables for 1,024 tokens.
LONGEST_LISTS = {"logit_bias": 1024, "allowed_token_ids": 1024, "stop_token_ids": 1024}
# Far beyond any use, and narrow enough that no fp32 logit overflows in the worker.
REPETITION_PENALTIES = FloatRange(1e-4, 1e4)
LOGIT_BIASES = FloatRange(-1e6, 1e6)


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

    @classmethod
    def parse(
        cls, params: "SamplingParams", settings: DenoiseSettings, vocab_size: int
    ) -> "RequestOptions":
        """The options of a new request, after a check that it can be served.

        Args:
            params: of the request.
            settings: of the served model.
            vocab_size: of the served model.

        Raises:
            VLLMValidationError: it cannot be served; the client gets HTTP 400.
        """
        for name in UNSUPPORTED_PARAMETERS:
            value = getattr(params, name)
            if value is not None and value != []:
                refuse(
                    name,
                    f"{name} = {_shown(value)} is not served for diffusion models. Leave it out.",
                )
        # Of n samples, vLLM later gives sample i the seed seed + i, which has to fit 64 bits, too.
        _check_int_range("seed", params.seed, -(2**63), 2**63 - params.n)
        _check_int_range("top_k", params.top_k, -1, MAX_INT32)
        _check_int_range("min_tokens", params.min_tokens, 0, MAX_INT32 // 2)
        _check_float("repetition_penalty", params.repetition_penalty, REPETITION_PENALTIES)
        for name, at_most in LONGEST_LISTS.items():
            _check_length(name, getattr(params, name) or (), at_most)
        for bias in (params.logit_bias or {}).values():
            _check_float("logit_bias", bias, LOGIT_BIASES)
        if settings.block_size > 1:
            _refuse_prompt_logprobs(params)
            _refuse_structured_outputs(params)
        options = cls.read(params, settings)
        if (params.extra_args or {}).get("diffusion_constrained"):
            _check_constrained(params)
        for token in options.seed_canvas or ():
            _check_int_range(SEED_CANVAS, token, NO_TOKEN, vocab_size - 1)
        for token in (params.extra_args or {}).get(PIN_IDS) or ():
            _check_int_range(PIN_IDS, token, 0, vocab_size - 1)
        return options

    @classmethod
    def read(cls, params: "SamplingParams", settings: DenoiseSettings) -> "RequestOptions":
        """The options of a request that ``parse`` admitted, or that vLLM made up to warm up.

        Raises:
            VLLMValidationError: a value in ``extra_args`` is not allowed.
        """
        extra = dict(params.extra_args or {})
        if settings.block_size > 1:
            _refuse_whole_canvas_args(extra)
        width = _take_number(extra, _canvas_width(settings), settings.canvas_length)
        asked = {
            parameter.name: _take_number(extra, parameter, getattr(settings, parameter.setting))
            for parameter in settings.parameters
        }
        is_greedy = params.temperature < 1e-5
        temperature = 1.0 if is_greedy else params.temperature
        numbers = settings.of_request(asked, temperature)
        seed_canvas = _take_ids(extra, SEED_CANVAS)
        if seed_canvas is not None and len(seed_canvas) != width:
            refuse(
                SEED_CANVAS,
                f"{SEED_CANVAS} holds {len(seed_canvas)} ids; allowed: exactly {width}, "
                "one for each position of the canvas. Send that many, or set "
                "diffusion_canvas_length.",
            )
        pins, holds_pins = _take_pins(extra, int(width), settings.canvas_length, seed_canvas)
        is_read_only = _take_flag(extra, "diffusion_read_only", default=False)
        _take_flag(extra, "diffusion_constrained", default=False)  # ``constrained`` writes it out
        eos_stop = _take_flag(extra, "diffusion_eos_stop", default=True)
        _take_stream(extra)
        stops = {params.eos_token_id, *(params.stop_token_ids or ())} - {None} if eos_stop else ()
        _refuse_unknown(extra, settings)
        return cls(
            canvas_width=int(width),
            numbers=numbers,
            temperature=temperature,
            is_greedy=is_greedy,
            seed=params.seed,
            stops=frozenset(stops),
            seed_canvas=seed_canvas,
            pins=pins,
            holds_pins=holds_pins,
            is_read_only=is_read_only,
        )


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
    return [_canvas_width(settings).key, *numbers, *others]


def requested_canvas_width(params: "SamplingParams | None", canvas_length: int) -> int:
    """The canvas width that an admitted request asks for, else ``canvas_length``."""
    extra = params.extra_args if params is not None else None
    return (extra or {}).get("diffusion_canvas_length") or canvas_length


def constrained(params: "SamplingParams") -> "SamplingParams":
    """The parameters of a request with our own arguments written as vLLM's edits of logits.

    ``diffusion_constrained``: the allowed tokens are its ``logprob_token_ids``. Held pins: the
    answer does not end before the last of them (``min_tokens``). The result is a copy, or
    ``params`` itself if there is nothing to write.
    """
    extra = params.extra_args or {}
    held = pins_of(extra) if holds(extra) else {}
    if not extra.get("diffusion_constrained") and not held:
        return params
    params = params.clone()
    if extra.get("diffusion_constrained"):
        params.allowed_token_ids = params.logprob_token_ids
    params.min_tokens = max(params.min_tokens, held_length(held, params.all_stop_token_ids))
    return params


def refuse(parameter: str, message: str) -> NoReturn:
    """Refuse a request with HTTP 400: always raises VLLMValidationError."""
    from vllm.exceptions import VLLMValidationError  # here: training uses this module without vLLM

    raise VLLMValidationError(message, parameter=parameter)


def _shown(value: object) -> str:
    """A value as it appears in a message; a long one is cut."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _refuse_unknown(extra: Mapping[str, object], settings: DenoiseSettings) -> None:
    """Refuse what is left in ``extra`` after all ``_take_*`` calls, except the server's keys."""
    known = extra_args(settings)
    for key, value in extra.items():
        expected = ENGINE_EXTRA_ARGS.get(key)
        if expected is None:
            refuse(
                "extra_args",
                f"unknown extra argument {_shown(key)}"
                f"{did_you_mean(str(key)[:100], known)}. "
                f"Known: {', '.join(known)}. Remove it or correct its name.",
            )
        if value is not None and not isinstance(value, expected):
            refuse(
                key,
                f"{key} = {_shown(value)}; allowed: a {expected.__name__}. Leave it out: the "
                "server sets it.",
            )


def _refuse_whole_canvas_args(extra: Mapping[str, object]) -> None:
    for key in WHOLE_CANVAS_ARGS:
        if extra.get(key) is not None:
            refuse(
                key,
                f"{key} is not served for this model: a canvas is the rest of a block, and its "
                "width depends on the prompt. Leave it out.",
            )


def _refuse_prompt_logprobs(params: "SamplingParams") -> None:
    """Refuse prompt logprobs: with blocks, a token's logits come from a row that sees the token."""
    for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
        value = getattr(params, name)
        if value is not None:
            refuse(
                name,
                f"{name} = {_shown(value)} is not served for this model: every token of a prompt "
                "sees its whole block, itself included. Leave it out (and `echo` with `logprobs`).",
            )


def _refuse_structured_outputs(params: "SamplingParams") -> None:
    """Refuse a grammar: tokens that are decided one after the other do not make one text of it."""
    if params.structured_outputs is not None:
        refuse(
            "structured_outputs",
            "structured outputs (response_format and the like) are not served for this model: the "
            "masks of a canvas are replaced one after the other. Leave them out.",
        )


def _check_length(name: str, given: Sized, at_most: int) -> None:
    """Refuse a list that is too long."""
    if len(given) > at_most:
        refuse(
            name, f"{name} comes to {len(given)} tokens; allowed: at most {at_most}. Send fewer."
        )


def _check_int_range(name: str, value: int | None, at_least: int, at_most: int) -> None:
    """Refuse an integer out of range; None passes. The engine has 32- and 64-bit fields."""
    if value is not None and not at_least <= value <= at_most:
        refuse(
            name,
            f"{name} = {_shown(value)}; allowed: an integer from {at_least} to {at_most}. "
            "Send one of these, or omit it.",
        )


def _take_number(extra: dict[str, object], parameter: Parameter, default: float) -> float:
    """Pop a parameter's value from ``extra``: an int if only integers are allowed, else a float.

    Of a name, the result is the index. default: of the setting, as it stands there.
    """
    value = extra.pop(parameter.key, None)
    if value is None:
        value = default
    if value not in parameter.allowed:
        refuse(
            parameter.key,
            f"{parameter.key} = {_shown(value)}; allowed: {parameter.allowed}. "
            f"Omit it for {default}.",
        )
    if isinstance(parameter.allowed, Choices):
        return parameter.allowed.names.index(value)  # type: ignore[arg-type]
    is_int = isinstance(parameter.allowed, IntRange)
    return value if is_int else float(value)  # type: ignore[return-value, arg-type]


def _take_flag(extra: dict[str, object], key: str, default: bool) -> bool:
    """Pop a boolean from ``extra``; over HTTP, JSON's booleans arrive as 0 and 1."""
    value = extra.pop(key, None)
    if value is None:
        return default
    if not isinstance(value, int) or value not in (0, 1):
        refuse(
            key,
            f"{key} = {_shown(value)}; allowed: true or false (or 1 or 0). "
            f"Omit it for {str(default).lower()}.",
        )
    return bool(value)


def _take_stream(extra: dict[str, object]) -> None:
    """Pop how canvases are streamed; the worker reads it in ``engine.frame_taker``."""
    form = _take_choice(extra, STREAM, STREAM_FORMS)
    every = _take_choice(extra, STREAM_EVERY, STREAM_PERIODS)
    if every is not None and form is None:
        refuse(STREAM_EVERY, f"{STREAM_EVERY} without {STREAM}. Send both, or omit both.")


def _take_choice(extra: dict[str, object], key: str, allowed: tuple[str, ...]) -> str | None:
    """Pop one of a few words from ``extra``; None if it is not there."""
    value = extra.pop(key, None)
    if value is None:
        return None
    if value not in allowed:
        refuse(key, f"{key} = {_shown(value)}; allowed: {', '.join(allowed)}. Omit it for none.")
    return str(value)


def _take_ids(extra: dict[str, object], key: str) -> tuple[int, ...] | None:
    """Pop a list of integers from ``extra``; None if it is not there."""
    value = extra.pop(key, None)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        refuse(key, f"{key} = {_shown(value)}; allowed: a list of integers. Omit it for none.")
    return tuple(value)


def _take_pins(
    extra: dict[str, object], width: int, canvas_length: int, seed_canvas: tuple[int, ...] | None
) -> tuple[dict[int, int], bool]:
    """Pop the pins from ``extra``: tokens by position, and whether they are emitted.

    Args:
        width: of the request's canvases.
        canvas_length: the served one.
        seed_canvas: what the request sent.
    """
    given = {key: _take_ids(extra, key) for key in (PINNED, PIN_AT, PIN_IDS)}
    mode = _take_choice(extra, PIN_MODE, PIN_MODES)
    pinned, at, ids = (given[key] or () for key in (PINNED, PIN_AT, PIN_IDS))
    if pinned and seed_canvas is None:
        refuse(
            PINNED,
            f"{PINNED} = {_shown(list(pinned))} without {SEED_CANVAS}; allowed: positions of a "
            "canvas that is sent with it. Send both, or omit both.",
        )
    for position in pinned:
        _check_int_range(PINNED, position, 0, width - 1)
        if seed_canvas is not None and seed_canvas[position] == NO_TOKEN:
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
    for position in at:
        _check_int_range(PIN_AT, position, 0, PINNED_CANVASES * canvas_length - 1)
    if len({*pinned, *at}) < len({*pinned}) + len(at):
        refuse(
            PIN_AT,
            f"{PIN_AT} = {_shown(list(at))}; allowed: each position once, and none of {PINNED}. "
            "Leave one out.",
        )
    return pins_of(given | {SEED_CANVAS: seed_canvas}), holds({PIN_MODE: mode})


def _check_constrained(params: "SamplingParams") -> None:
    """Refuse ``diffusion_constrained`` without tokens, or with two different lists of tokens."""
    if not params.logprob_token_ids:
        refuse(
            "diffusion_constrained",
            "diffusion_constrained = true without logprob_token_ids; allowed: with them, they are "
            "the tokens it is constrained to. Send both, or omit both.",
        )
    if params.allowed_token_ids:
        refuse(
            "diffusion_constrained",
            "diffusion_constrained = true beside allowed_token_ids; allowed: one of them, both say "
            "which tokens may be emitted. Leave one out.",
        )


def _check_float(name: str, value: object, allowed: FloatRange) -> None:
    if value not in allowed:
        refuse(name, f"{name} = {_shown(value)}; allowed: {allowed}. Send one of these.")

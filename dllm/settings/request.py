"""Request-level options: what one request asks of its canvases.

``RequestOptions.parse`` reads a request's ``SamplingParams`` (and, over HTTP, its ``vllm_xargs``,
which arrive as ``extra_args``) once. The API server calls it to refuse bad input with HTTP 400;
the worker reads again what was admitted. Every message says what was
given, what is allowed and what to do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from dllm.settings.checks import FloatRange, IntRange, did_you_mean
from dllm.settings.denoising import DenoiseSettings, Parameter

if TYPE_CHECKING:
    from vllm import SamplingParams

# Keys that vLLM itself puts into extra_args, and the type that it relies on there.
ENGINE_EXTRA_ARGS = {
    "kv_transfer_params": dict,
    "ec_transfer_params": dict,
    "kv_cache_report_mode": str,
}

# Extra arguments that every family takes, beside the numbers of its rule.
CANVAS_ARGS = (
    "diffusion_seed_canvas",
    "diffusion_pinned",
    "diffusion_read_only",
    "diffusion_constrained",
    "diffusion_eos_stop",
)

# Sampling parameters that the canvas sampler does not honour yet.
UNSUPPORTED_PARAMETERS = ("thinking_token_budget", "trace_decode_token_ids")

MAX_INT32 = 2**31 - 1
# What the worker's fp32 logits can take, far beyond any use.
REPETITION_PENALTIES = FloatRange(1e-4, 1e4)
LOGIT_BIASES = FloatRange(-1e6, 1e6)


@dataclass(frozen=True)
class RequestOptions:
    """How one request's canvases are denoised.

    Attributes:
        canvas_width: tokens per canvas, at most the served canvas_length.
        numbers: of the family's rule, by the name of their ``Parameter``.
        is_greedy: ``temperature`` 0; candidates are the argmax, no Gumbel noise is drawn, and
            entropies and stopping stay those of the model's schedule.
        seed: of the request's noise, or None for one of its own.
        stops: tokens behind the first of which a canvas need not converge, because they end the
            request; empty for the reference's rule.
        seed_canvas: what the first canvas starts as, instead of noise; None for noise.
        pinned: positions of the first canvas whose input stays that of ``seed_canvas``.
        is_read_only: one canvas is the whole output, and logprobs are those at temperature 1.
    """

    canvas_width: int
    numbers: Mapping[str, float]
    is_greedy: bool
    seed: int | None
    stops: frozenset[int]
    seed_canvas: tuple[int, ...] | None
    pinned: tuple[int, ...]
    is_read_only: bool

    @classmethod
    def parse(
        cls, params: "SamplingParams", settings: DenoiseSettings, vocab_size: int
    ) -> "RequestOptions":
        """Admit one request: refuse what cannot be served, then ``read``.

        Raises:
            VLLMValidationError: HTTP 400 to the client.
        """
        for name in UNSUPPORTED_PARAMETERS:
            value = getattr(params, name)
            if value is not None and value != []:
                refuse(
                    name,
                    f"{name} = {_shown(value)} is not served for diffusion models yet. "
                    "Leave it out.",
                )
        # Of n samples, sample i gets seed + i after admission.
        _check_int_range("seed", params.seed, -(2**63), 2**63 - params.n)
        _check_int_range("top_k", params.top_k, -1, MAX_INT32)
        _check_int_range("min_tokens", params.min_tokens, 0, MAX_INT32 // 2)
        _check_float("repetition_penalty", params.repetition_penalty, REPETITION_PENALTIES)
        for bias in (params.logit_bias or {}).values():
            _check_float("logit_bias", bias, LOGIT_BIASES)
        options = cls.read(params, settings)
        for token in options.seed_canvas or ():
            _check_int_range("diffusion_seed_canvas", token, 0, vocab_size - 1)
        return options

    @classmethod
    def read(cls, params: "SamplingParams", settings: DenoiseSettings) -> "RequestOptions":
        """The options of an admitted request, or of vLLM's own warm-up requests.

        Raises:
            VLLMValidationError: as ``parse``, for ``extra_args`` alone.
        """
        extra = dict(params.extra_args or {})
        width = _take_number(extra, _canvas_width(settings), settings.canvas_length)
        asked = {
            parameter.name: _take_number(extra, parameter, getattr(settings, parameter.setting))
            for parameter in settings.parameters
        }
        is_greedy = params.temperature < 1e-5
        numbers = settings.of_request(asked, 1.0 if is_greedy else params.temperature)
        seed_canvas = _take_ids(extra, "diffusion_seed_canvas")
        if seed_canvas is not None and len(seed_canvas) != width:
            refuse(
                "diffusion_seed_canvas",
                f"diffusion_seed_canvas holds {len(seed_canvas)} ids; allowed: exactly {width}, "
                "one for each position of the canvas. Send that many, or set "
                "diffusion_canvas_length.",
            )
        pinned = _take_pins(extra, int(width), seed_canvas is not None)
        is_read_only = _take_flag(extra, "diffusion_read_only", default=False)
        if _take_flag(extra, "diffusion_constrained", default=False):
            _check_constrained(params)
        eos_stop = _take_flag(extra, "diffusion_eos_stop", default=True)
        stops = {params.eos_token_id, *(params.stop_token_ids or ())} - {None} if eos_stop else ()
        _refuse_unknown(extra, settings)
        return cls(
            canvas_width=int(width),
            numbers=numbers,
            is_greedy=is_greedy,
            seed=params.seed,
            stops=frozenset(stops),
            seed_canvas=seed_canvas,
            pinned=pinned,
            is_read_only=is_read_only,
        )


def _canvas_width(settings: DenoiseSettings) -> Parameter:
    """The one number that every family has: how wide a canvas is."""
    return Parameter("canvas_length", "canvas_length", IntRange(1, settings.canvas_length), "int32")


def extra_args(settings: DenoiseSettings) -> list[str]:
    """Every extra argument that a request may send to a model with these settings."""
    numbers = [parameter.key for parameter in settings.parameters]
    return [_canvas_width(settings).key, *numbers, *CANVAS_ARGS]


def requested_canvas_width(params: "SamplingParams | None", canvas_length: int) -> int:
    """The canvas width of an admitted request: its own, else the served one."""
    extra = params.extra_args if params is not None else None
    return (extra or {}).get("diffusion_canvas_length") or canvas_length


def constrained(params: "SamplingParams") -> "SamplingParams":
    """The parameters with what ``diffusion_constrained`` means: nothing but ``logprob_token_ids``.

    Returns a copy where that changes anything.
    """
    if not (params.extra_args or {}).get("diffusion_constrained"):
        return params
    params = params.clone()
    params.allowed_token_ids = params.logprob_token_ids
    return params


def refuse(parameter: str, message: str) -> NoReturn:
    """Refuse a request with HTTP 400; raises VLLMValidationError."""
    from vllm.exceptions import VLLMValidationError  # training and benchmarks need no vLLM

    raise VLLMValidationError(message, parameter=parameter)


def _shown(value: object) -> str:
    """What was given, for a message; a client's megabytes are not sent back."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _refuse_unknown(extra: Mapping[str, object], settings: DenoiseSettings) -> None:
    """Refuse what no ``_take_*`` consumed and vLLM did not put there."""
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
                f"{key} = {_shown(value)}; allowed: a {expected.__name__}. Leave it out: it is "
                "vLLM's own, for servers that exchange caches.",
            )


def _check_int_range(name: str, value: int | None, at_least: int, at_most: int) -> None:
    """Refuse what the engine's 32- and 64-bit fields cannot hold."""
    if value is not None and not at_least <= value <= at_most:
        refuse(
            name,
            f"{name} = {_shown(value)}; allowed: an integer from {at_least} to {at_most}. "
            "Send one of these, or omit it.",
        )


def _take_number(extra: dict[str, object], parameter: Parameter, default: float) -> float:
    """Pop the number of a parameter: an int where integers are allowed, else a float."""
    value = extra.pop(parameter.key, None)
    if value is None:
        return default
    if value not in parameter.allowed:
        refuse(
            parameter.key,
            f"{parameter.key} = {_shown(value)}; allowed: {parameter.allowed}. "
            f"Omit it for {default}.",
        )
    is_int = isinstance(parameter.allowed, IntRange)
    return value if is_int else float(value)  # type: ignore[return-value, arg-type]


def _take_flag(extra: dict[str, object], key: str, default: bool) -> bool:
    """Pop a boolean; JSON's arrive as 0 and 1 over HTTP."""
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


def _take_ids(extra: dict[str, object], key: str) -> tuple[int, ...] | None:
    """Pop a list of integers."""
    value = extra.pop(key, None)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        refuse(key, f"{key} = {_shown(value)}; allowed: a list of integers. Omit it for none.")
    return tuple(value)


def _take_pins(extra: dict[str, object], width: int, has_seed_canvas: bool) -> tuple[int, ...]:
    """Pop the pinned positions of a seed canvas of ``width``."""
    key = "diffusion_pinned"
    pinned = _take_ids(extra, key)
    if pinned is None:
        return ()
    if not has_seed_canvas:
        refuse(
            key,
            f"{key} = {_shown(list(pinned))} without diffusion_seed_canvas; allowed: positions of "
            "a canvas that is sent with it. Send both, or omit both.",
        )
    for position in pinned:
        _check_int_range(key, position, 0, width - 1)
    return pinned


def _check_constrained(params: "SamplingParams") -> None:
    """Refuse ``diffusion_constrained`` without its set, or with another one."""
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

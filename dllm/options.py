"""Request-level options: what one request asks of its canvases.

``RequestOptions.parse`` reads a request's ``SamplingParams`` (and, over HTTP, its ``vllm_xargs``,
which arrive as ``extra_args``) once. The API server calls it to refuse bad input with HTTP 400;
the worker reads again what was admitted. Every message says what was
given, what is allowed and what to do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from vllm.exceptions import VLLMValidationError

from dllm.config import (
    CONFIDENCES,
    ENTROPY_BOUNDS,
    TEMPERATURES,
    DenoiseConfig,
    FloatRange,
    did_you_mean,
)

if TYPE_CHECKING:
    from vllm import SamplingParams

# Keys that vLLM itself puts into extra_args, and the type that it relies on there.
ENGINE_EXTRA_ARGS = {
    "kv_transfer_params": dict,
    "ec_transfer_params": dict,
    "kv_cache_report_mode": str,
}

# Sampling parameters that the canvas sampler does not honour yet: (name, value that means "off").
UNSUPPORTED_PARAMETERS: tuple[tuple[str, object], ...] = (
    ("min_p", 0.0),
    ("min_tokens", 0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("logit_bias", None),
    ("bad_words", None),
    ("allowed_token_ids", None),
    ("prompt_logprobs", None),
    ("prompt_logprob_token_ids", None),
    ("logprob_token_ids", None),
    ("thinking_token_budget", None),
    ("trace_decode_token_ids", None),
)

MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class RequestOptions:
    """How one request's canvases are denoised. Temperatures are those of the schedule.

    Attributes:
        canvas_width: tokens per canvas, at most the served canvas_length.
        max_steps: denoise steps after which a canvas counts as converged.
        t_min, t_max: the model's schedule times the request's ``temperature``.
        entropy_bound, confidence: nats.
        is_greedy: ``temperature`` 0; candidates are the argmax, no Gumbel noise is drawn, and
            entropies and stopping stay those of the model's schedule.
        seed: of the request's noise, or None for one of its own.
    """

    canvas_width: int
    max_steps: int
    t_min: float
    t_max: float
    entropy_bound: float
    confidence: float
    is_greedy: bool
    seed: int | None

    @classmethod
    def parse(cls, params: "SamplingParams", config: DenoiseConfig) -> "RequestOptions":
        """Admit one request: refuse what cannot be served, then ``read``.

        Raises:
            VLLMValidationError: HTTP 400 to the client.
        """
        for name, off in UNSUPPORTED_PARAMETERS:
            value = getattr(params, name)
            if value is not None and value != off and value not in ([], {}):
                _refuse(
                    name,
                    f"{name} = {_shown(value)} is not served for diffusion models yet. "
                    f"Leave it out{'' if off is None else f' or send {off}'}.",
                )
        # Of n samples, sample i gets seed + i after admission.
        _check_int_range("seed", params.seed, -(2**63), 2**63 - params.n)
        _check_int_range("top_k", params.top_k, -1, MAX_INT32)
        return cls.read(params, config)

    @classmethod
    def read(cls, params: "SamplingParams", config: DenoiseConfig) -> "RequestOptions":
        """The options of an admitted request, or of vLLM's own warm-up requests.

        Raises:
            VLLMValidationError: as ``parse``, for ``extra_args`` alone.
        """
        extra = dict(params.extra_args or {})
        width = _take_int(
            extra, "diffusion_canvas_length", config.canvas_length, config.canvas_length
        )
        # The released built-in clamps a larger cap to the server's; so do we.
        max_steps = _take_int(extra, "diffusion_max_steps", config.max_denoising_steps, MAX_INT32)
        t_min = _take_float(extra, "diffusion_t_min", config.t_min, TEMPERATURES)
        t_max = _take_float(extra, "diffusion_t_max", config.t_max, TEMPERATURES)
        if t_min > t_max:
            _refuse(
                "diffusion_t_min",
                f"diffusion_t_min = {t_min} exceeds diffusion_t_max = {t_max}; allowed: "
                "t_min <= t_max. Send both, or omit both.",
            )
        entropy_bound = _take_float(
            extra, "diffusion_entropy_bound", config.entropy_bound, ENTROPY_BOUNDS
        )
        confidence = _take_float(
            extra, "diffusion_confidence", config.confidence_threshold, CONFIDENCES
        )
        _refuse_unknown(extra)
        is_greedy = params.temperature < 1e-5
        scale = 1.0 if is_greedy else params.temperature
        return cls(
            canvas_width=width,
            max_steps=min(max_steps, config.max_denoising_steps),
            t_min=t_min * scale,
            t_max=t_max * scale,
            entropy_bound=entropy_bound,
            confidence=confidence,
            is_greedy=is_greedy,
            seed=params.seed,
        )


EXTRA_ARGS = (
    "diffusion_canvas_length",
    "diffusion_max_steps",
    "diffusion_t_min",
    "diffusion_t_max",
    "diffusion_entropy_bound",
    "diffusion_confidence",
)


def requested_canvas_width(params: "SamplingParams | None", canvas_length: int) -> int:
    """The canvas width of an admitted request: its own, else the served one."""
    extra = params.extra_args if params is not None else None
    return (extra or {}).get("diffusion_canvas_length") or canvas_length


def _refuse(parameter: str, message: str) -> NoReturn:
    raise VLLMValidationError(message, parameter=parameter)


def _shown(value: object) -> str:
    """What was given, for a message; a client's megabytes are not sent back."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _refuse_unknown(extra: Mapping[str, object]) -> None:
    """Refuse what no ``_take_*`` consumed and vLLM did not put there."""
    for key, value in extra.items():
        expected = ENGINE_EXTRA_ARGS.get(key)
        if expected is None:
            _refuse(
                "extra_args",
                f"unknown extra argument {_shown(key)}"
                f"{did_you_mean(str(key)[:100], list(EXTRA_ARGS))}. "
                f"Known: {', '.join(EXTRA_ARGS)}. Remove it or correct its name.",
            )
        if value is not None and not isinstance(value, expected):
            _refuse(
                key,
                f"{key} = {_shown(value)}; allowed: a {expected.__name__}. Leave it out: it is "
                "vLLM's own, for servers that exchange caches.",
            )


def _check_int_range(name: str, value: int | None, at_least: int, at_most: int) -> None:
    """Refuse what the engine's 32- and 64-bit fields cannot hold."""
    if value is not None and not at_least <= value <= at_most:
        _refuse(
            name,
            f"{name} = {_shown(value)}; allowed: an integer from {at_least} to {at_most}. "
            "Send one of these, or omit it.",
        )


def _take_int(extra: dict[str, object], key: str, default: int, at_most: int) -> int:
    """Pop an integer in [1, at_most]."""
    value = extra.pop(key, None)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= at_most:
        _refuse(
            key,
            f"{key} = {_shown(value)}; allowed: an integer of at least 1 and at most {at_most}. "
            f"Omit it for {default}.",
        )
    return value


def _take_float(extra: dict[str, object], key: str, default: float, allowed: FloatRange) -> float:
    """Pop a number of that range."""
    value = extra.pop(key, None)
    if value is None:
        return default
    if value not in allowed:
        _refuse(key, f"{key} = {_shown(value)}; allowed: {allowed}. Omit it for {default}.")
    return float(value)  # type: ignore[arg-type]

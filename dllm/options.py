"""Request-level options: what one request asks of its canvases.

``RequestOptions.parse`` reads a request's ``SamplingParams`` (and, over HTTP, its ``vllm_xargs``,
which arrive as ``extra_args``) once. The API server calls it to refuse bad input with HTTP 400;
the scheduler and the worker call it again on what was admitted. Every message says what was
given, what is allowed and what to do.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from vllm.exceptions import VLLMValidationError

from dllm.config import DenoiseConfig, did_you_mean

if TYPE_CHECKING:
    from vllm import SamplingParams

# Keys that vLLM itself puts into extra_args.
ENGINE_EXTRA_ARGS = frozenset({"kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"})

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
        """Read and check one request.

        Raises:
            VLLMValidationError: HTTP 400 to the client.
        """
        for name, off in UNSUPPORTED_PARAMETERS:
            value = getattr(params, name)
            if value != off and value not in ([], {}):
                _refuse(
                    name,
                    f"{name} = {value!r} is not served for diffusion models yet. "
                    f"Leave it out{'' if off is None else f' or send {off}'}.",
                )
        extra = dict(params.extra_args or {})
        width = _take_int(
            extra, "diffusion_canvas_length", config.canvas_length, config.canvas_length
        )
        # The released built-in clamps a larger cap to the server's; so do we.
        max_steps = _take_int(extra, "diffusion_max_steps", config.max_denoising_steps, None)
        t_min = _take_float(extra, "diffusion_t_min", config.t_min, above_zero=True)
        t_max = _take_float(extra, "diffusion_t_max", config.t_max, above_zero=True)
        if t_min > t_max:
            _refuse(
                "diffusion_t_min",
                f"diffusion_t_min = {t_min} exceeds diffusion_t_max = {t_max}. "
                "Send t_min <= t_max.",
            )
        entropy_bound = _take_float(
            extra, "diffusion_entropy_bound", config.entropy_bound, above_zero=True
        )
        confidence = _take_float(extra, "diffusion_confidence", config.confidence_threshold)
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


def _refuse_unknown(extra: Mapping[str, object]) -> None:
    """Refuse what no ``_take_*`` consumed and vLLM did not put there."""
    for key in extra:
        if key not in ENGINE_EXTRA_ARGS:
            _refuse(
                "extra_args",
                f"unknown extra argument {key!r}{did_you_mean(key, list(EXTRA_ARGS))}. "
                f"Known: {', '.join(EXTRA_ARGS)}. Remove it or correct its name.",
            )


def _take_int(extra: dict[str, object], key: str, default: int, at_most: int | None) -> int:
    """Pop an integer in [1, at_most]."""
    value = extra.pop(key, None)
    if value is None:
        return default
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < 1
        or (at_most is not None and value > at_most)
    ):
        allowed = "an integer of at least 1" + (f" and at most {at_most}" if at_most else "")
        _refuse(key, f"{key} = {value!r}; allowed: {allowed}. Omit it for {default}.")
    return value


def _take_float(
    extra: dict[str, object], key: str, default: float, above_zero: bool = False
) -> float:
    """Pop a finite number of at least (or above) 0."""
    value = extra.pop(key, None)
    if value is None:
        return default
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value < 0
        or (above_zero and value == 0)
    ):
        allowed = f"a finite number {'above' if above_zero else 'of at least'} 0"
        _refuse(key, f"{key} = {value!r}; allowed: {allowed}. Omit it for {default}.")
    return float(value)

"""How DiffusionGemma denoises, as its checkpoint and the command line say.

``generation_config.json`` holds the defaults; ``--override-generation-config`` and
``--diffusion-config`` change them. Wrong values are refused when the server starts, with the key,
the value and what is allowed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dllm.settings.checks import FloatRange, IntRange, check_int
from dllm.settings.denoising import CANVAS_WINDOWS, CanvasWindow, Parameter
from dllm.settings.request import MAX_INT32, refuse

# Of the model and of a request alike. Wide enough for every use, and narrow enough that fp32 holds
# them and a logit over a temperature, also after a request's `temperature` has been multiplied in.
TEMPERATURES = FloatRange(1e-4, 1e4)
ENTROPY_BOUNDS = FloatRange(0.0, 1e6, excludes_low=True)
CONFIDENCES = FloatRange(0.0, 1e6)


PARAMETERS = (
    Parameter("max_steps", "max_denoising_steps", IntRange(1, MAX_INT32), "int32"),
    # The reference subtracts in float64; its temperatures are matched to the last bit.
    Parameter("t_min", "t_min", TEMPERATURES, "float64"),
    Parameter("t_max", "t_max", TEMPERATURES, "float64"),
    Parameter("entropy_bound", "entropy_bound", ENTROPY_BOUNDS, "float32"),
    Parameter("confidence", "confidence_threshold", CONFIDENCES, "float32"),
)


@dataclass(frozen=True)
class GemmaSettings:
    """How a canvas is denoised unless a request says otherwise.

    Attributes:
        canvas_length: tokens of the served canvas; a request may ask for fewer.
        max_denoising_steps: denoise steps after which a canvas counts as converged.
        t_min, t_max: temperature at the last and at the first denoise step.
        entropy_bound: nats; see ``rule.accept_mask``.
        confidence_threshold: nats; a canvas may converge below this mean entropy.
        stability_threshold: as in Hugging Face: how often the argmax canvas must repeat.
        canvas_window: what canvas rows see on sliding layers (``attention.masks``).
    """

    parameters: ClassVar[tuple[Parameter, ...]] = PARAMETERS

    canvas_length: int
    max_denoising_steps: int
    t_min: float
    t_max: float
    entropy_bound: float
    confidence_threshold: float
    stability_threshold: int
    canvas_window: CanvasWindow

    def __post_init__(self) -> None:
        check_int("canvas_length", self.canvas_length, at_least=1)
        check_int("max_denoising_steps", self.max_denoising_steps, at_least=1)
        check_int("stability_threshold", self.stability_threshold, at_least=0)
        _check_float("t_min", self.t_min, TEMPERATURES)
        _check_float("t_max", self.t_max, TEMPERATURES)
        _check_float("sampler_config.entropy_bound", self.entropy_bound, ENTROPY_BOUNDS)
        _check_float("confidence_threshold", self.confidence_threshold, CONFIDENCES)
        if self.t_min > self.t_max:
            raise ValueError(
                f"generation config: t_min = {self.t_min} must not exceed t_max = {self.t_max}."
            )
        if self.canvas_window not in CANVAS_WINDOWS:
            raise ValueError(
                f"config.json: canvas_window = {self.canvas_window!r}; allowed: "
                f"{', '.join(CANVAS_WINDOWS)} or auto. "
                """Set it with --hf-overrides '{"canvas_window": "anchored"}'."""
            )

    def of_request(self, asked: Mapping[str, float], temperature: float) -> dict[str, float]:
        """As ``DenoiseSettings.of_request``: the schedule times the request's temperature."""
        t_min, t_max = asked["t_min"], asked["t_max"]
        if t_min > t_max:
            refuse(
                "diffusion_t_min",
                f"diffusion_t_min = {t_min} exceeds diffusion_t_max = {t_max}; allowed: "
                "t_min <= t_max. Send both, or omit both.",
            )
        return {
            **asked,
            # The built-in clamps a larger cap to the server's; so do we.
            "max_steps": min(asked["max_steps"], self.max_denoising_steps),
            "t_min": t_min * temperature,
            "t_max": t_max * temperature,
        }

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> "GemmaSettings":
        """Resolve a server's configuration: the checkpoint's files, then the command line.

        Raises:
            ValueError: as ``from_mappings``.
        """
        model_config = vllm_config.model_config
        generation = dict(model_config.try_get_generation_config())
        override = dict(model_config.override_generation_config)
        sampler_override = override.pop("sampler_config", None)
        generation.update(override)
        if isinstance(sampler_override, Mapping):
            generation["sampler_config"] = {
                **generation.get("sampler_config", {}),
                **sampler_override,
            }
        hf_config = {
            key: getattr(model_config.hf_config, key, None)
            for key in ("canvas_length", "canvas_window")
        }
        diffusion = vllm_config.diffusion_config
        if diffusion is not None:
            hf_config["canvas_length"] = diffusion.canvas_length
            if diffusion.max_denoising_steps is not None:
                generation["max_denoising_steps"] = diffusion.max_denoising_steps
        return cls.from_mappings(hf_config, generation)

    @classmethod
    def from_mappings(
        cls, hf_config: Mapping[str, object], generation: Mapping[str, object]
    ) -> "GemmaSettings":
        """Build from config.json and the (already overridden) generation config.

        Args:
            hf_config: ``canvas_length`` and, optionally, ``canvas_window`` (default: symmetric).
            generation: t_min, t_max, stability_threshold, confidence_threshold,
                max_denoising_steps, and sampler_config with entropy_bound.

        Raises:
            ValueError: a key is missing or its value is out of range.
        """
        sampler = generation.get("sampler_config")
        if not isinstance(sampler, Mapping) or "EntropyBound" not in str(sampler.get("_cls_name")):
            raise ValueError(
                f"generation config: sampler_config = {sampler!r}; allowed: a mapping whose "
                "_cls_name names the EntropyBound sampler, with its entropy_bound (nats)."
            )
        window = hf_config.get("canvas_window") or "auto"
        return cls(
            canvas_length=_require(hf_config, "canvas_length", "config.json"),
            canvas_window="symmetric" if window == "auto" else window,  # type: ignore[arg-type]
            entropy_bound=_require(sampler, "entropy_bound", "generation config: sampler_config"),
            **{
                key: _require(generation, key, "generation config")
                for key in (
                    "max_denoising_steps",
                    "t_min",
                    "t_max",
                    "confidence_threshold",
                    "stability_threshold",
                )
            },
        )


def takes_images(hf_config: Any) -> bool:
    """Whether a checkpoint has a vision tower and says how many soft tokens make an image.

    One that does not say (ours are written for text) has no image processor and is served without.
    """
    vision = getattr(hf_config, "vision_config", None)
    return getattr(vision, "default_output_length", None) is not None


def _require(mapping: Mapping[str, object], key: str, where: str):  # type: ignore[no-untyped-def]
    """``mapping[key]``; its type and range are checked by ``DenoiseConfig``."""
    value = mapping.get(key)
    if value is None:
        raise ValueError(
            f"{where}: {key} is missing. Add it to the checkpoint, or give it on the command line "
            f"""with --override-generation-config '{{"{key}": ...}}'."""
        )
    return value


def _check_float(key: str, value: object, allowed: FloatRange) -> None:
    if value not in allowed:
        raise ValueError(f"generation config: {key} = {value!r}; allowed: {allowed}.")

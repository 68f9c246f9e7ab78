"""How DiffusionGemma denoises: the values of the checkpoint and of the command line, checked.

``generation_config.json`` holds the defaults. ``--override-generation-config`` and
``--diffusion-config`` change them. A wrong value stops the server at start; the error says the key,
the value and what is allowed.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from dllm.settings.denoising import CanvasWindow, Parameter, refuse_unknown
from dllm.settings.options import CHECKED, Count, Count32, Natural, read_options
from dllm.settings.request import refuse

# What is allowed in a checkpoint and in a request. Narrow enough that no fp32 value overflows: not
# the numbers, and not logit / temperature after a request's `temperature` was multiplied in.
Temperature = Annotated[float, Field(ge=1e-4, le=1e4)]

GENERATION_KEYS = (  # of generation_config.json, beside sampler_config
    "max_denoising_steps",
    "t_min",
    "t_max",
    "confidence_threshold",
    "stability_threshold",
)


@dataclass(frozen=True, config=CHECKED)
class GemmaSettings:
    """How a canvas is denoised unless a request says otherwise."""

    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("max_steps", "max_denoising_steps", "int32"),
        # float64, because the reference subtracts t_min from t_max in float64, and our
        # temperatures are equal to its, bit by bit.
        Parameter("t_min", "t_min", "float64"),
        Parameter("t_max", "t_max", "float64"),
        Parameter("entropy_bound", "entropy_bound", "float32"),
        Parameter("confidence", "confidence_threshold", "float32"),
    )
    one_step: ClassVar[Mapping[str, int]] = {"diffusion_max_steps": 1}
    modes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    block_size: ClassVar[int] = 1
    never_emitted: ClassVar[tuple[int, ...]] = ()
    begins_causally: ClassVar[bool] = False

    canvas_length: Count  # tokens; a request may ask for fewer
    max_denoising_steps: Count32  # after so many a canvas is emitted as it is
    # The temperature falls from t_max towards t_min (``rule.temperature``).
    t_min: Temperature
    t_max: Temperature
    entropy_bound: Annotated[float, Field(gt=0, le=1e6)]  # nats; see ``rule.accept_mask``
    # Nats; a canvas may converge if its mean entropy is below this.
    confidence_threshold: Annotated[float, Field(ge=0, le=1e6)]
    # A canvas may converge if its most likely tokens have been the same in one step and this many
    # steps before it. The name is Hugging Face's.
    stability_threshold: Natural
    canvas_window: CanvasWindow  # what canvas rows see on sliding layers (``attention.masks``)

    def __post_init__(self) -> None:
        if self.t_min > self.t_max:
            raise ValueError(
                f"generation config: t_min = {self.t_min} must not exceed t_max = {self.t_max}."
            )

    def of_request(self, asked: Mapping[str, float], temperature: float) -> dict[str, float]:
        """A request's temperature multiplies t_min and t_max."""
        t_min, t_max = asked["t_min"], asked["t_max"]
        if t_min > t_max:
            refuse(
                "diffusion_t_min",
                f"diffusion_t_min = {t_min} exceeds diffusion_t_max = {t_max}; allowed: "
                "t_min <= t_max. Send both, or omit both.",
            )
        return {
            **asked,
            # As in vLLM's built-in class, a request cannot raise the server's limit.
            "max_steps": min(asked["max_steps"], self.max_denoising_steps),
            "t_min": t_min * temperature,
            "t_max": t_max * temperature,
        }

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> "GemmaSettings":
        """The checkpoint's values, changed by the command line. Raises as ``from_mappings``."""
        model_config = vllm_config.model_config
        generation = dict(model_config.try_get_generation_config())
        override = dict(model_config.override_generation_config)
        hint = """ It holds entropy_bound: '{"sampler_config": {"entropy_bound": 0.5}}'."""
        refuse_unknown(override, generation, (*GENERATION_KEYS, "sampler_config"), hint)
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
        """From config.json and the generation config (with overrides).

        Of config.json ``canvas_length`` and, optionally, ``canvas_window`` (default: symmetric).
        Raises ValueError if a key is missing or its value is out of range.
        """
        sampler = generation.get("sampler_config")
        if not isinstance(sampler, Mapping) or "EntropyBound" not in str(sampler.get("_cls_name")):
            raise ValueError(
                f"generation config: sampler_config = {sampler!r}; allowed: a mapping whose "
                "_cls_name names the EntropyBound sampler, with its entropy_bound (nats)."
            )
        window = hf_config.get("canvas_window") or "auto"
        given = {key: _require(generation, key, "generation config") for key in GENERATION_KEYS}
        given["canvas_length"] = _require(
            hf_config, "canvas_length", "config.json", """--hf-overrides '{"%s": ...}'"""
        )
        given["canvas_window"] = "symmetric" if window == "auto" else window
        given["entropy_bound"] = _require(
            sampler,
            "entropy_bound",
            "generation config: sampler_config",
            """--override-generation-config '{"sampler_config": {"%s": ...}}'""",
        )
        return read_options(cls, given, "generation config, config.json")


def _require(
    mapping: Mapping[str, object],
    key: str,
    where: str,
    flag: str = """--override-generation-config '{"%s": ...}'""",
) -> Any:
    """``flag``: the command line that sets the key, with %s in its place."""
    value = mapping.get(key)
    if value is None:
        raise ValueError(
            f"{where}: {key} is missing. Add it to the checkpoint, or give it on the command line "
            f"with {flag % key}."
        )
    return value

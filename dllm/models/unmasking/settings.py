"""How canvases of masks are filled in: what SDAR and LLaDA2 have in common, checked at start."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Self

from pydantic.dataclasses import dataclass

from dllm.ops.schedule import Schedule
from dllm.settings.checks import refuse_value
from dllm.settings.denoising import CanvasWindow, Parameter, refuse_unknown
from dllm.settings.options import CHECKED, Count32, Natural, Share, read_options

OF_ALL = (
    Parameter("max_steps", "max_denoising_steps", "int32"),
    Parameter("threshold", "threshold", "float32"),
    Parameter("schedule", "noise_schedule", "int32"),
)


@dataclass(frozen=True, config=CHECKED)
class UnmaskingSettings:
    """The settings that every family of this kind has."""

    parameters: ClassVar[tuple[Parameter, ...]] = OF_ALL
    one_step: ClassVar[Mapping[str, int]] = {"diffusion_max_steps": 1}
    # Values of keys that generation_config.json may leave out.
    defaults: ClassVar[Mapping[str, Any]] = {}
    modes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    canvas_window: ClassVar[CanvasWindow] = "symmetric"
    is_shifted: ClassVar[bool] = False  # as of ``engine.algorithm.DenoisingAlgorithm``

    vocab_size: int
    canvas_length: int  # tokens of the widest canvas, which is a whole block
    mask_token_id: Natural
    max_denoising_steps: Count32  # a canvas has no masks left after so many
    threshold: Share  # a probability; masks whose token is likelier are replaced at once
    # How the tokens of a block are spread over the steps (``ops.schedule``).
    noise_schedule: Schedule = field(default="linear", kw_only=True)

    def __post_init__(self) -> None:
        if self.canvas_length < 2:
            refuse_value("config.json: block_size", self.canvas_length, "at least 2")
        if self.mask_token_id >= self.vocab_size:
            refuse_value(
                "config.json: mask_token_id",
                self.mask_token_id,
                f"a token id below vocab_size = {self.vocab_size}",
            )

    @property
    def block_size(self) -> int:
        """A canvas is what is left of its block."""
        return self.canvas_length

    @property
    def begins_causally(self) -> bool:
        return False

    @property
    def never_emitted(self) -> tuple[int, ...]:
        return (self.mask_token_id,)

    def of_request(self, asked: Mapping[str, float], temperature: float) -> dict[str, float]:
        """A request cannot raise the server's number of steps."""
        return {**asked, "max_steps": min(asked["max_steps"], self.max_denoising_steps)}

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> Self:
        """Raises ValueError if a key is missing or its value is not allowed."""
        model_config = vllm_config.model_config
        config = model_config.hf_config
        canvas_length = getattr(config, "canvas_length", None)
        if canvas_length is None:
            raise ValueError(
                "config.json: block_size is missing, and a model works with the one that it was "
                """trained with only. Give it with --hf-overrides '{"block_size": 4}'."""
            )
        layers = set(getattr(config, "layer_types", None) or ())
        if getattr(config, "use_sliding_window", False) or layers - {"full_attention"}:
            raise ValueError(
                "config.json: use_sliding_window or layer_types asks for layers with a sliding "
                "window; allowed: full attention. No other layer sees blocks here."
            )
        override = dict(model_config.override_generation_config)
        given = {"max_denoising_steps": canvas_length, "noise_schedule": "linear", **cls.defaults}
        generation = model_config.try_get_generation_config()
        refuse_unknown(override, generation, [*given, "mode"] if cls.modes else [*given])
        diffusion = vllm_config.diffusion_config
        if diffusion is not None and diffusion.canvas_length != canvas_length:
            raise ValueError(
                f"--diffusion-config: canvas_length = {diffusion.canvas_length}; allowed: "
                f"{canvas_length}, the model's block_size. Leave it out."
            )
        if diffusion is not None and diffusion.max_denoising_steps is not None:
            override["max_denoising_steps"] = diffusion.max_denoising_steps
        # A mode of the command line beats the file's numbers, and its own numbers beat the mode.
        for values in (generation, override):
            given |= cls._of_mode(values.get("mode"))
            given |= {key: values[key] for key in given if values.get(key) is not None}
        given |= {
            "vocab_size": model_config.get_vocab_size(),
            "canvas_length": canvas_length,
            "mask_token_id": config.mask_token_id,
        }
        return read_options(cls, given, "generation config, config.json")

    @classmethod
    def _of_mode(cls, mode: object) -> Mapping[str, Any]:
        """Of a mode that a generation config names; none without modes."""
        if mode is None or not cls.modes:
            return {}
        if mode not in [*cls.modes]:
            refuse_value("generation config: mode", mode, f"one of {', '.join(cls.modes)}")
        return cls.modes[str(mode)]

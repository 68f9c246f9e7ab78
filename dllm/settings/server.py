"""Server-level configuration: every default of denoising and of the plugin, once.

``DenoiseConfig`` is what a checkpoint (generation_config.json) and the command line
(``--override-generation-config``, ``--diffusion-config``) say about denoising.
``PluginOptions`` is ours alone and travels in ``--additional-config '{"dllm": {...}}'``.
Both refuse wrong values when the server starts, with the key, the value and the allowed range.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dllm.settings.checks import FloatRange, check_int, known_fields
from dllm.settings.drafting import DrafterOptions

WHERE = '--additional-config: "dllm"'  # of PluginOptions, in messages

CanvasWindow = Literal["symmetric", "anchored"]
CommitMode = Literal["overlapped", "separate"]
SoftEmbedding = Literal["auto", "sparse", "exact"]

CANVAS_WINDOWS: tuple[CanvasWindow, ...] = ("symmetric", "anchored")
COMMIT_MODES: tuple[CommitMode, ...] = ("overlapped", "separate")
SOFT_EMBEDDINGS: tuple[SoftEmbedding, ...] = ("auto", "sparse", "exact")


# Of the model and of a request alike. Wide enough for every use, and narrow enough that fp32 holds
# them and a logit over a temperature, also after a request's `temperature` has been multiplied in.
TEMPERATURES = FloatRange(1e-4, 1e4)
ENTROPY_BOUNDS = FloatRange(0.0, 1e6, excludes_low=True)
CONFIDENCES = FloatRange(0.0, 1e6)


@dataclass(frozen=True)
class DenoiseConfig:
    """How a canvas is denoised unless a request says otherwise.

    Attributes:
        canvas_length: tokens of the served canvas; a request may ask for fewer.
        max_denoising_steps: denoise steps after which a canvas counts as converged.
        t_min, t_max: temperature at the last and at the first denoise step.
        entropy_bound: nats; see ``denoise.accept_mask``.
        confidence_threshold: nats; a canvas may converge below this mean entropy.
        stability_threshold: as in Hugging Face: how often the argmax canvas must repeat.
        canvas_window: what canvas rows see on sliding layers (``attention.masks``).
    """

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

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> "DenoiseConfig":
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
    ) -> "DenoiseConfig":
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


@dataclass(frozen=True)
class PluginOptions:
    """The ``dllm`` object of ``--additional-config``.

    Attributes:
        commit: ``overlapped`` fixes the KV of an emitted block at the head of the next forward
            pass; ``separate`` gives it a pass of its own (the plain twin, for comparison).
        soft_embedding: ``sparse`` leaves out tokens that move a soft embedding by no more than
            rounding its probabilities does, if the vocabulary is large (``soft_embedding``);
            ``exact`` multiplies by all of it; ``auto`` is sparse on a CPU and exact on a GPU, where
            the sparse kernel has not been measured yet.
        logits_workspace_mib: MiB of fp32 logits that exist at once; more rows than fit are taken
            in tiles of whole canvases (``logit_rows``). Bounds the memory of a step.
        drafter: of a server with a DFlash drafter; it reads nothing else here.
    """

    commit: CommitMode = "overlapped"
    soft_embedding: SoftEmbedding = "auto"
    logits_workspace_mib: int = 1024
    drafter: DrafterOptions = field(default_factory=DrafterOptions)

    def __post_init__(self) -> None:
        check_int(f"{WHERE}: logits_workspace_mib", self.logits_workspace_mib, 1)
        for key, value, allowed in (
            ("commit", self.commit, COMMIT_MODES),
            ("soft_embedding", self.soft_embedding, SOFT_EMBEDDINGS),
        ):
            if value not in allowed:
                raise ValueError(f"{WHERE}: {key} = {value!r}; allowed: {', '.join(allowed)}.")

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> "PluginOptions":
        """The options of a server; raises ValueError as ``from_additional_config``."""
        return cls.from_additional_config(vllm_config.additional_config)

    @classmethod
    def from_additional_config(cls, additional_config: object) -> "PluginOptions":
        """Parse ``vllm_config.additional_config``.

        Raises:
            ValueError: an unknown key (with the nearest known one) or a value out of range.
        """
        if not isinstance(additional_config, Mapping):
            return cls()
        given = additional_config.get("dllm")
        if given is None:
            return cls()
        values = known_fields(cls, given, WHERE)
        drafter = DrafterOptions.from_given(values.get("drafter", {}))
        return cls(**{**values, "drafter": drafter})


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

"""The families of diffusion language models that are served, one folder each.

``FAMILIES`` maps the architecture in a checkpoint's config.json to its family. This package imports
engine, grammar, ops, settings, ``attention`` and ``quant``.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dllm.settings.denoising import DenoiseSettings
from dllm.settings.server import once_for_each


@dataclass(frozen=True)
class Served:
    """A family's classes, by name: none of them is imported before it is asked for."""

    # As config.json names it, and the name of the class in ``backbone.py`` that vLLM loads. Its
    # ``make_algorithm`` returns an ``engine.algorithm.DenoisingAlgorithm``.
    architecture: str
    folder: str
    # In ``settings.py``, which imports no model: a ``settings.denoising.DenoiseSettings`` with
    # ``from_vllm``.
    settings: str
    config: str | None = None  # of config.json, in ``config.py``; None: transformers' own
    with_images: str | None = None  # in ``images.py``, loaded with torchvision; None: the same
    # In ``backbone.py``: serves the same checkpoint token by token, and its name is its
    # architecture.
    autoregressive: str | None = None

    def path(self, module: str, name: str) -> str:
        return f"{__name__}.{self.folder}.{module}:{name}"

    def load(self, module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"{__name__}.{self.folder}.{module}"), name)

    def model_path(self) -> str:
        if self.with_images and importlib.util.find_spec("torchvision") is not None:
            return self.path("images", self.with_images)
        return self.path("backbone", self.architecture)

    def settings_class(self) -> Any:
        return self.load("settings", self.settings)

    def config_class(self) -> Any:
        return None if self.config is None else self.load("config", self.config)

    def tensor_shapes(self, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = self.load("shapes", "tensor_shapes")(config)
        return shapes


# By the architecture that config.json names.
FAMILIES = {
    served.architecture: served
    for served in (
        Served(
            "DiffusionGemmaForBlockDiffusion",
            "gemma",
            "GemmaSettings",
            with_images="DiffusionGemmaWithImages",
        ),
        Served("SDARForCausalLM", "sdar", "SDARSettings", "SDARConfig"),
        Served("SDARMoeForCausalLM", "sdar", "SDARSettings", "SDARMoeConfig"),
        Served("A2DQwen3LMHeadModel", "sdar", "TinyA2DSettings", "A2DQwen3Config"),
        Served("A2DQwen2LMHeadModel", "sdar", "TinyA2DSettings", "A2DQwen2Config"),
        Served(
            "StableDiffcoderForCausalLM", "sdar", "StableDiffcoderSettings", "StableDiffcoderConfig"
        ),
        Served("Fast_dLLM_QwenForCausalLM", "sdar", "FastDLLMSettings", "FastDLLMConfig"),
        Served(
            "NemotronLabsDiffusionModel",
            "nemotron",
            "NemotronSettings",
            "NemotronLabsDiffusionConfig",
            autoregressive="NemotronLabsDiffusionForCausalLM",
        ),
        Served("LLaDA2MoeModelLM", "llada2", "LLaDA2Settings", "LLaDA2MoeConfig"),
        Served("LLaDAModelLM", "llada", "LLaDASettings", "LLaDAConfig"),
        Served("DreamModel", "llada", "DreamSettings", "DreamConfig"),
    )
}

# The paths of the classes that serve token by token, by the architectures that are their names.
AUTOREGRESSIVE = {
    served.autoregressive: served.path("backbone", served.autoregressive)
    for served in FAMILIES.values()
    if served.autoregressive is not None
}

# Diffusion models that are not served, by the model_type in config.json, with the reason.
REFUSED = {
    "Dream": "its architecture is not DreamModel, that of Dream-7B and DiffuCoder",
    "llada": "its architecture is not LLaDAModelLM, that of LLaDA-8B and LLaDA-1.5",
}


@once_for_each
def settings_of(vllm_config: Any) -> DenoiseSettings:
    """Raises ValueError if a value of the checkpoint or of a flag is not allowed."""
    served = FAMILIES[vllm_config.model_config.architecture]
    settings: DenoiseSettings = served.settings_class().from_vllm(vllm_config)
    return settings


def own_configs() -> dict[str, type]:
    """By their model_type, those that transformers does not know."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    classes = (served.config_class() for served in FAMILIES.values() if served.config)
    return {
        kind.model_type: kind for kind in classes if kind.model_type not in CONFIG_MAPPING_NAMES
    }


def is_ours(architectures: Sequence[str] | None) -> bool:
    """Also without a name. Models of other architectures may have a ``model_type`` of ours."""
    return not architectures or not FAMILIES.keys().isdisjoint(architectures)


def takes_images(hf_config: Any) -> bool:
    """A vision tower, and an image's number of soft tokens in ``default_output_length``.

    A checkpoint without that number has no image processor and is served for text only; the bundled
    checkpoints are such.
    """
    vision = getattr(hf_config, "vision_config", None)
    return getattr(vision, "default_output_length", None) is not None

"""The families of diffusion language models that are served, one folder each.

``FAMILIES`` maps the architecture in a checkpoint's config.json to its family. This room imports
engine, ops, settings, tasks, ``attention`` and ``quant``.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from dllm.settings.denoising import DenoiseSettings


@dataclass(frozen=True)
class Served:
    """The classes of a family as strings "module:Class", so that nothing is imported too early.

    Attributes:
        model: the class that vLLM loads. Its ``make_family`` returns an ``engine.family.Family``.
        settings: a ``settings.denoising.DenoiseSettings`` with a method ``from_vllm``. Its module
            imports no model.
        model_with_images: the class that vLLM loads if torchvision is installed. None: the same.
    """

    model: str
    settings: str
    model_with_images: str | None = None

    def model_class(self) -> str:
        """The class that vLLM loads in this environment, as "module:Class"."""
        if self.model_with_images and importlib.util.find_spec("torchvision") is not None:
            return self.model_with_images
        return self.model


# By the architecture that config.json names.
FAMILIES = {
    "DiffusionGemmaForBlockDiffusion": Served(
        model="dllm.models.gemma.backbone:DiffusionGemmaForBlockDiffusion",
        settings="dllm.models.gemma.settings:GemmaSettings",
        model_with_images="dllm.models.gemma.images:DiffusionGemmaWithImages",
    ),
}


def settings_of(vllm_config: Any) -> DenoiseSettings:
    """How a server's model denoises unless a request says otherwise.

    Raises:
        ValueError: a value of the checkpoint or of a flag is not allowed.
    """
    module, name = FAMILIES[vllm_config.model_config.architecture].settings.split(":")
    settings: DenoiseSettings = getattr(importlib.import_module(module), name).from_vllm(
        vllm_config
    )
    return settings


def takes_images(hf_config: Any) -> bool:
    """Whether a checkpoint can be served with images.

    It needs a vision tower, and the number of soft tokens of an image in ``default_output_length``.
    A checkpoint without that number has no image processor and is served for text only; the bundled
    checkpoints are such.
    """
    vision = getattr(hf_config, "vision_config", None)
    return getattr(vision, "default_output_length", None) is not None

"""The families of diffusion language models that are served; one folder each.

Imports engine, ops, settings, tasks, ``attention`` and ``quant``.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from dllm.settings.denoising import DenoiseSettings


@dataclass(frozen=True)
class Served:
    """Where a family's parts are, as "module:Class"; imported when they are asked for.

    Attributes:
        model: what vLLM loads; its ``make_family`` gives the ``engine.family.Family``.
        settings: a ``DenoiseSettings`` with a ``from_vllm``; imports no model.
        model_with_images: what vLLM loads where torchvision can be imported.
    """

    model: str
    settings: str
    model_with_images: str | None = None

    def model_class(self) -> str:
        """The class that vLLM loads in this environment."""
        if self.model_with_images and importlib.util.find_spec("torchvision") is not None:
            return self.model_with_images
        return self.model


# The architecture that config.json names, and what serves it.
FAMILIES = {
    "DiffusionGemmaForBlockDiffusion": Served(
        model="dllm.models.gemma.backbone:DiffusionGemmaForBlockDiffusion",
        settings="dllm.models.gemma.settings:GemmaSettings",
        model_with_images="dllm.models.gemma.images:DiffusionGemmaWithImages",
    ),
}


def settings_of(vllm_config: Any) -> DenoiseSettings:
    """How the model of a server denoises, unless a request says otherwise.

    Raises:
        ValueError: the checkpoint or a flag says something that is not allowed.
    """
    module, name = FAMILIES[vllm_config.model_config.architecture].settings.split(":")
    settings: DenoiseSettings = getattr(importlib.import_module(module), name).from_vllm(
        vllm_config
    )
    return settings

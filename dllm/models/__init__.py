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
        config: the class of its config.json; None: transformers' own.
        model_with_images: the class that vLLM loads if torchvision is installed. None: the same.
        autoregressive: the class that serves the same checkpoint token by token, whose name is its
            architecture. None: it cannot be served so.
    """

    model: str
    settings: str
    config: str | None = None
    model_with_images: str | None = None
    autoregressive: str | None = None

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
    "SDARForCausalLM": Served(
        model="dllm.models.sdar.backbone:SDARForCausalLM",
        settings="dllm.models.sdar.settings:SDARSettings",
        config="dllm.models.sdar.config:SDARConfig",
    ),
    "SDARMoeForCausalLM": Served(
        model="dllm.models.sdar.backbone:SDARMoeForCausalLM",
        settings="dllm.models.sdar.settings:SDARSettings",
        config="dllm.models.sdar.config:SDARMoeConfig",
    ),
    "A2DQwen3LMHeadModel": Served(
        model="dllm.models.sdar.backbone:A2DQwen3LMHeadModel",
        settings="dllm.models.sdar.settings:TinyA2DSettings",
        config="dllm.models.sdar.config:A2DQwen3Config",
    ),
    "A2DQwen2LMHeadModel": Served(
        model="dllm.models.sdar.backbone:A2DQwen2LMHeadModel",
        settings="dllm.models.sdar.settings:TinyA2DSettings",
        config="dllm.models.sdar.config:A2DQwen2Config",
    ),
    "StableDiffcoderForCausalLM": Served(
        model="dllm.models.sdar.backbone:StableDiffcoderForCausalLM",
        settings="dllm.models.sdar.settings:StableDiffcoderSettings",
        config="dllm.models.sdar.config:StableDiffcoderConfig",
    ),
    "NemotronLabsDiffusionModel": Served(
        model="dllm.models.nemotron.backbone:NemotronLabsDiffusionModel",
        settings="dllm.models.nemotron.settings:NemotronSettings",
        config="dllm.models.nemotron.config:NemotronLabsDiffusionConfig",
        autoregressive="dllm.models.nemotron.backbone:NemotronLabsDiffusionForCausalLM",
    ),
    "LLaDA2MoeModelLM": Served(
        model="dllm.models.llada2.backbone:LLaDA2MoeModelLM",
        settings="dllm.models.llada2.settings:LLaDA2Settings",
        config="dllm.models.llada2.config:LLaDA2MoeConfig",
    ),
}

# The classes that serve token by token. Their names stand for architectures.
AUTOREGRESSIVE = {
    served.autoregressive.split(":")[1]: served.autoregressive
    for served in FAMILIES.values()
    if served.autoregressive is not None
}

SEES_ALL = "each token sees the whole sequence in every step, so no KV cache could be kept"
# Diffusion models that are not served, by the model_type in config.json, with the reason.
REFUSED = {
    "Dream": f"in Dream, DiffuCoder and d3LLM {SEES_ALL}",
    "llada": f"in LLaDA-8B, LLaDA-MoE and d3LLM {SEES_ALL}",
    "Fast_dLLM_Qwen": (
        "in Fast-dLLM v2 a token is decided by the logits of the position in front of it, also the "
        "first one of a canvas, and no logits are computed in front of a canvas"
    ),
}


def settings_of(vllm_config: Any) -> DenoiseSettings:
    """How a server's model denoises unless a request says otherwise.

    Raises:
        ValueError: a value of the checkpoint or of a flag is not allowed.
    """
    served = FAMILIES[vllm_config.model_config.architecture]
    settings: DenoiseSettings = load(served.settings).from_vllm(vllm_config)
    return settings


def load(path: str) -> Any:
    """The class that "module:Class" names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def own_configs() -> dict[str, type]:
    """The classes of our config.json files whose model_type transformers does not know, by it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    classes = [load(served.config) for served in FAMILIES.values() if served.config is not None]
    return {
        kind.model_type: kind for kind in classes if kind.model_type not in CONFIG_MAPPING_NAMES
    }


def takes_images(hf_config: Any) -> bool:
    """Whether a checkpoint can be served with images.

    It needs a vision tower, and the number of soft tokens of an image in ``default_output_length``.
    A checkpoint without that number has no image processor and is served for text only; the bundled
    checkpoints are such.
    """
    vision = getattr(hf_config, "vision_config", None)
    return getattr(vision, "default_output_length", None) is not None

"""vLLM's built-in DiffusionGemma, made to run on a CPU without torchvision and Triton.

``DLLM_DISABLE=1`` serves it on such a CPU, so that our model can be compared with it.

All code in which a request spends its time is the built-in's: model, model state, sampler,
scheduler and config hook. Four things differ, because without torchvision or Triton it could not
run at all:

- There is no vision tower, and its weights are skipped: an image request gets HTTP 400.
- During its import the five classes of ``gemma4_mm``, Gemma4's image processing, are empty.
- No logits are computed of no rows.
- The kernels of Model Runner V2 are those of ``dllm.cpu.batch``, on which our model runs as well.
"""

import copy
import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import WeightsMapper

_BUILTIN = "vllm.model_executor.models.diffusion_gemma"
_IMAGE_PROCESSING = "vllm.model_executor.models.gemma4_mm"
_VISION_WEIGHTS = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")


def import_builtin() -> ModuleType:
    """If ``gemma4_mm`` cannot be imported, a stand-in takes its place during this import only. A
    later import of ``gemma4_mm`` raises the same ImportError as without the plugin.
    """
    try:
        importlib.import_module(_IMAGE_PROCESSING)
    except ImportError:
        pass
    else:
        return importlib.import_module(_BUILTIN)
    sys.modules[_IMAGE_PROCESSING] = _image_processing_stand_in()
    try:
        return importlib.import_module(_BUILTIN)
    finally:
        del sys.modules[_IMAGE_PROCESSING]


def _image_processing_stand_in() -> ModuleType:
    """Five empty classes; ``diffusion_gemma`` also takes some methods from one of them."""
    image_methods = (
        "_parse_and_validate_image_input",
        "_parse_and_validate_video_input",
        "_parse_and_validate_multimodal_inputs",
        "_encoder_chunk",
        "_get_max_soft_tokens",
        "_process_image_input",
        "_process_video_input",
        "embed_multimodal",
    )
    module = ModuleType(_IMAGE_PROCESSING)
    for name, members in (
        ("Gemma4DummyInputsBuilder", {}),
        ("Gemma4ForConditionalGeneration", dict.fromkeys(image_methods, _no_images)),
        ("Gemma4MultimodalEmbedder", {}),
        ("Gemma4MultiModalProcessor", {}),
        ("Gemma4ProcessingInfo", {}),
    ):
        setattr(module, name, type(name, (), {"__module__": _IMAGE_PROCESSING, **members}))
    return module


def _no_images(*args: object, **kwargs: object) -> None:
    raise NotImplementedError("Images need torchvision, which cannot be imported here.")


builtin = import_builtin()


class TextOnlyDiffusionGemma(builtin.DiffusionGemmaForConditionalGeneration):  # type: ignore[name-defined, misc]
    supports_multimodal = False
    supports_multimodal_embeddings = False

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            **builtin.DiffusionGemmaForConditionalGeneration.hf_to_vllm_mapper.orig_to_new_prefix,
            **dict.fromkeys(_VISION_WEIGHTS),
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=_without_vision(vllm_config), prefix=prefix)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Of a step that reads prompts only there are none.

        With AMX vLLM's product divides by the number of rows, and no rows kill the process.
        """
        if len(hidden_states) == 0:
            size = self.logits_processor.vocab_size
            return hidden_states.new_empty(0, size, dtype=torch.float32)
        logits: torch.Tensor | None = super().compute_logits(hidden_states)
        return logits


def _without_vision(vllm_config: VllmConfig) -> Any:
    """Shallow, because the layers register themselves in an object of the original configuration
    (``compilation_config.static_forward_context``).
    """
    config = copy.copy(vllm_config)
    config.model_config = copy.copy(vllm_config.model_config)
    config.model_config.hf_config = copy.copy(vllm_config.model_config.hf_config)
    config.model_config.hf_config.vision_config = None
    return config

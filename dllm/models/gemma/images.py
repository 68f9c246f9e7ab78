"""DiffusionGemma with its vision tower, for prompts with images.

vLLM's Gemma4 processor cuts an image into patches, and replaces the image's placeholder in the
prompt by a number of soft tokens. The vision tower and a projection compute one embedding for each
soft token from the patches. These embeddings enter the model in place of token embeddings.
Everything else is the text model.

This module can only be imported where torchvision is installed, because vLLM's processor needs it
(``models.Served.model_path``).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, DiffusionGemmaConfig
from vllm.config import VllmConfig
from vllm.model_executor.models.gemma4_mm import (
    Gemma4DummyInputsBuilder,
    Gemma4MultimodalEmbedder,
    Gemma4MultiModalProcessor,
    Gemma4ProcessingInfo,
)
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from dllm.engine.model_state import DiffusionModelState
from dllm.engine.spans import Sequences
from dllm.models import takes_images
from dllm.models.gemma.backbone import DiffusionGemmaForBlockDiffusion
from dllm.ops.staging import to_device


class ImageProcessingInfo(Gemma4ProcessingInfo):
    def get_hf_config(self) -> DiffusionGemmaConfig:
        return self.ctx.get_hf_config(DiffusionGemmaConfig)

    def has_audio(self) -> bool:
        """No DiffusionGemma has an audio tower."""
        return False

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Any number of images; or an empty mapping, with which vLLM serves text only."""
        return {"image": None} if takes_images(self.get_hf_config()) else {}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        if not self.get_supported_mm_limits():
            return {}
        return {"image": super().get_mm_max_tokens_per_item(seq_len, mm_counts)["image"]}


@MULTIMODAL_REGISTRY.register_processor(
    Gemma4MultiModalProcessor, info=ImageProcessingInfo, dummy_inputs=Gemma4DummyInputsBuilder
)
class DiffusionGemmaWithImages(DiffusionGemmaForBlockDiffusion, SupportsMultiModal):
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix=DiffusionGemmaForBlockDiffusion.hf_to_vllm_mapper.orig_to_new_prefix
        | {
            "model.encoder.vision_tower.": "vision_tower.",
            "model.encoder.embed_vision.": "embed_vision.",
        }
    )

    @staticmethod
    def get_model_state_cls() -> "type[ImageModelState]":
        return ImageModelState

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """For a chat template that has no text for an image."""
        return "<|image|>"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        if not takes_images(config):
            self.hf_to_vllm_mapper = DiffusionGemmaForBlockDiffusion.hf_to_vllm_mapper
            return
        with self._mark_tower_model(vllm_config, "image"):  # type: ignore[operator]
            self.vision_tower = AutoModel.from_config(config.vision_config)
            self.embed_vision = Gemma4MultimodalEmbedder(
                config.vision_config,
                config.text_config,
                prefix=maybe_prefix(prefix, "embed_vision"),
            )

    def get_mm_mapping(self) -> MultiModelKeys:
        """The modules that an adapter may change."""
        return MultiModelKeys.from_string_field(language_model="model")

    def embed_multimodal(
        self, *, pixel_values: Iterable[torch.Tensor], pixel_position_ids: Iterable[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The embeddings of each image's soft tokens: ``[soft tokens, hidden]``.

        Args:
            pixel_values: for each image, ``[patches, 3 * patch_size**2]``.
            pixel_position_ids: for each image, ``[patches, 2]``; (-1, -1) for a padding patch.
        """
        return [
            self.embed_vision(
                self.vision_tower(
                    pixel_values=patches[None], pixel_position_ids=places[None]
                ).last_hidden_state
            )
            for patches, places in zip(pixel_values, pixel_position_ids, strict=True)
        ]


class ImageModelState(DiffusionModelState):
    """The tokens of one image see each other if the checkpoint says ``use_bidirectional_attention:
    vision``; otherwise they are causal.
    """

    def prepare_inputs_embeds(
        self,
        scheduled_encoder_inputs: dict[str, list[int]],
        input_batch: InputBatch,
        req_states: RequestState,
    ) -> None:
        """``prepare_inputs`` uses the output of the vision tower."""
        if self.supports_mm_inputs:
            self.execute_mm_encoder(scheduled_encoder_inputs)

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        if self.supports_mm_inputs:
            embeds, is_image = self.gather_mm_embeddings(input_batch)
            if embeds:
                rows = to_device(is_image.numpy().nonzero()[0], self.device)
                inputs["inputs_embeds"][rows] = torch.cat(embeds).to(self.dtype)
        return inputs

    def _sequences(self, input_batch: InputBatch) -> Sequences:
        sequences = super()._sequences(input_batch)
        images = self._images(input_batch)
        return sequences.with_images(images) if any(images) else sequences

    def _images(self, input_batch: InputBatch) -> list[list[tuple[int, int]]]:
        """(first, last) position of each bidirectional image; none of rows behind their prompt."""
        images: list[list[tuple[int, int]]] = [[] for _ in range(input_batch.num_reqs)]
        if self.supports_mm_inputs and self.model_config.is_mm_prefix_lm:
            is_prompt = input_batch.num_computed_tokens_np < input_batch.prefill_len_np
            for row in np.flatnonzero(is_prompt[: input_batch.num_reqs]):
                features = self.encoder_cache.mm_features.get(input_batch.req_ids[row], ())
                for feature in features:
                    images[row] += feature.mm_position.extract_embeds_range()
        return images

"""DiffusionGemma with its vision tower: image prompts, where torchvision can be imported.

vLLM's own Gemma4 processor turns an image into patches and its placeholder into as many soft
tokens; the tower and its projection turn the patches into embeddings, which replace those of the
placeholder in the prompt. Everything else is the text model. Imported only where torchvision is
(``patches.install``): vLLM's processor does not import without it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, DiffusionGemmaConfig
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.models.gemma4_mm import (
    Gemma4DummyInputsBuilder,
    Gemma4MultimodalEmbedder,
    Gemma4MultiModalProcessor,
    Gemma4ProcessingInfo,
)
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from dllm.engine.model_state import DiffusionModelState
from dllm.engine.spans import VirtualSequences
from dllm.models.gemma.backbone import DiffusionGemmaForBlockDiffusion
from dllm.models.gemma.settings import takes_images


class ImageProcessingInfo(Gemma4ProcessingInfo):
    """What a prompt may hold: images, if the checkpoint has a tower to look at them with."""

    def get_hf_config(self) -> DiffusionGemmaConfig:
        """The checkpoint's config.json."""
        return self.ctx.get_hf_config(DiffusionGemmaConfig)

    def has_audio(self) -> bool:
        """No DiffusionGemma has an audio tower."""
        return False

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Any number of images, or nothing: vLLM then serves text only."""
        return {"image": None} if takes_images(self.get_hf_config()) else {}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Soft tokens of the largest image."""
        if not self.get_supported_mm_limits():
            return {}
        return {"image": super().get_mm_max_tokens_per_item(seq_len, mm_counts)["image"]}


@MULTIMODAL_REGISTRY.register_processor(
    Gemma4MultiModalProcessor, info=ImageProcessingInfo, dummy_inputs=Gemma4DummyInputsBuilder
)
class DiffusionGemmaWithImages(DiffusionGemmaForBlockDiffusion, SupportsMultiModal):
    """The text model, the vision tower and the projection between them."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix=DiffusionGemmaForBlockDiffusion.hf_to_vllm_mapper.orig_to_new_prefix
        | {
            "model.encoder.vision_tower.": "vision_tower.",
            "model.encoder.embed_vision.": "embed_vision.",
        }
    )

    @staticmethod
    def get_model_state_cls() -> "type[ImageModelState]":
        """vLLM's hook that selects the model state of this model."""
        return ImageModelState

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """What stands for an image in a prompt whose chat template does not say."""
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

    def embed_multimodal(
        self, *, pixel_values: Iterable[torch.Tensor], pixel_position_ids: Iterable[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Embeddings of each image's soft tokens, ``[soft tokens, hidden]``.

        Args:
            pixel_values: per image, ``[patches, 3 * patch_size**2]``.
            pixel_position_ids: per image, ``[patches, 2]``, (-1, -1) where a patch is padding.
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
    """Puts images' embeddings in the place of their placeholders'.

    Their rows see each other if the checkpoint says ``use_bidirectional_attention: vision``.
    """

    def prepare_inputs_embeds(
        self,
        scheduled_encoder_inputs: dict[str, list[int]],
        input_batch: InputBatch,
        req_states: RequestState,
    ) -> None:
        """Encode the images whose prompt chunk comes next; ``prepare_inputs`` embeds them."""
        if self.supports_mm_inputs:
            self.execute_mm_encoder(scheduled_encoder_inputs)

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """The text's inputs, then the images'. No canvas row holds an image."""
        inputs = super().prepare_inputs(input_batch, req_states)
        if self.supports_mm_inputs:
            embeds, is_image = self.gather_mm_embeddings(input_batch)
            if embeds:
                rows = is_image.nonzero().flatten().to(self.device)
                inputs["inputs_embeds"][rows] = torch.cat(embeds).to(self.dtype)
        return inputs

    def _sequences(self, input_batch: InputBatch) -> VirtualSequences:
        sequences = super()._sequences(input_batch)
        images = self._images(input_batch)
        return sequences.with_images(images) if any(images) else sequences

    def _images(self, input_batch: InputBatch) -> list[list[tuple[int, int]]]:
        """Per row, (first, last) position of each bidirectional image, if it is a prompt chunk."""
        images: list[list[tuple[int, int]]] = [[] for _ in range(input_batch.num_reqs)]
        if self.supports_mm_inputs and self.model_config.is_mm_prefix_lm:
            is_prompt = input_batch.num_computed_tokens_np < input_batch.prefill_len_np
            for row in np.flatnonzero(is_prompt[: input_batch.num_reqs]):
                features = self.encoder_cache.mm_features.get(input_batch.req_ids[row], ())
                for feature in features:
                    images[row] += feature.mm_position.extract_embeds_range()
        return images

    def _rows(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
    ) -> dict[str, Any]:
        """Rows that hold an image come apart into sequences with none or all of their rows causal.

        A full graph has no room for them: there, images are causal.
        """
        is_full = cudagraph_mode == CUDAGraphMode.FULL
        if is_full or self._sequences(input_batch).images is None:
            return super()._rows(input_batch, cudagraph_mode, block_tables)
        sequences = self._virtual_sequences(input_batch, cudagraph_mode, block_tables)
        split_points = sequences["query_start_loc_gpu"].diff() * sequences["causal"]
        return sequences | {"causal": split_points}

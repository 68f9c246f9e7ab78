"""DiffusionGemma's ``engine.algorithm.DenoisingAlgorithm``: entropy-bound denoising."""

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from dllm.engine.algorithm import Canvases, Denoised, DenoisingAlgorithm
from dllm.engine.canvas_rows import CanvasRows
from dllm.models.gemma import step
from dllm.models.gemma.self_conditioning import SelfConditioning, soft_embeddings
from dllm.models.gemma.settings import GemmaSettings
from dllm.ops import noise
from dllm.ops.filters import RowFilters


class EntropyBound(DenoisingAlgorithm):
    """``probs_dtype``: of the probabilities that ``denoise`` computes for ``soft_embeddings``;
    None: that computes the few that it needs. ``embedding``: with tensor parallelism, this rank's
    part.
    """

    def __init__(
        self,
        settings: GemmaSettings,
        vocab_size: int,
        probs_dtype: torch.dtype | None,
        self_conditioning: SelfConditioning,
        embedding: VocabParallelEmbedding,
        normalizer: torch.Tensor,
    ) -> None:
        self.settings: GemmaSettings = settings
        self.step_state = step.step_state(settings.canvas_length)
        self.soft_size = embedding.embedding_dim
        self.vocab_size = vocab_size
        self.probs_dtype = probs_dtype
        self.self_conditioning = self_conditioning
        self.embedding = embedding
        self.normalizer = normalizer

    def fresh_canvas(self, seeds: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return noise.initial_canvas(seeds, starts, self.settings.canvas_length, self.vocab_size)

    def denoise(
        self,
        logits: torch.Tensor,
        rows: CanvasRows,
        canvases: Canvases,
        filters: RowFilters | None,
        cap: float | None = None,
    ) -> Denoised:
        return step.denoise(logits, rows, canvases, self.settings, self.probs_dtype, filters, cap)

    def soft_embeddings(
        self, logits: torch.Tensor, denoised: Denoised, cap: float | None = None
    ) -> torch.Tensor:
        return soft_embeddings(
            logits, denoised.temperature, denoised.stats, self.embedding, self.normalizer, cap
        )

    def self_condition(
        self, embeds: torch.Tensor, soft_embeds: torch.Tensor, steps_done: torch.Tensor
    ) -> torch.Tensor:
        """``soft_embeds`` count as 0 in the first step."""
        has_past = (steps_done > 0)[:, None]
        return self.self_conditioning(embeds, torch.where(has_past, soft_embeds, 0))

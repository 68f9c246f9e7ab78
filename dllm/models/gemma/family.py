"""DiffusionGemma behind the engine's interface: random canvases, self-conditioning."""

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.family import Canvases, Denoised, Family
from dllm.models.gemma import step
from dllm.models.gemma.self_conditioning import SelfConditioning, soft_embeddings
from dllm.models.gemma.settings import GemmaSettings
from dllm.ops import noise
from dllm.ops.filters import RowFilters


class Gemma(Family):
    """The family of one loaded model.

    Args:
        probs_dtype: of the probabilities that ``look_back`` multiplies by the embeddings; None: it
            computes the few that it needs.
        embedding: of the tokens, this rank's shard.
        normalizer: what token embeddings are scaled by.
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
        self.carried = step.carried(settings.canvas_length)
        self.soft_size = embedding.embedding_dim
        self.vocab_size = vocab_size
        self.probs_dtype = probs_dtype
        self.self_conditioning = self_conditioning
        self.embedding = embedding
        self.normalizer = normalizer

    def fresh_canvas(self, seeds: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Random tokens."""
        return noise.initial_canvas(seeds, starts, self.settings.canvas_length, self.vocab_size)

    def denoise(
        self, logits: torch.Tensor, rows: CanvasRows, canvases: Canvases, filters: RowFilters | None
    ) -> Denoised:
        """The one denoise step."""
        return step.denoise(logits, rows, canvases, self.settings, self.probs_dtype, filters)

    def look_back(self, logits: torch.Tensor, denoised: Denoised) -> torch.Tensor:
        """The soft embeddings of this step's distributions."""
        return soft_embeddings(
            logits, denoised.temperature, denoised.stats, self.embedding, self.normalizer
        )

    def condition(
        self, embeds: torch.Tensor, soft_embeds: torch.Tensor, steps_done: torch.Tensor
    ) -> torch.Tensor:
        """Self-conditioned embeddings; the first denoise step has nothing to look back at."""
        has_past = (steps_done > 0)[:, None]
        return self.self_conditioning(embeds, torch.where(has_past, soft_embeds, 0))

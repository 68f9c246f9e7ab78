"""DiffusionGemma's ``engine.algorithm.DenoisingAlgorithm``: entropy-bound denoising.

noise -> temperature -> row statistics -> which tokens are kept, and whether to stop (``rule``)
"""

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from dllm.engine.algorithm import Canvases, Column, Denoised, DenoisingAlgorithm
from dllm.engine.canvas_rows import CanvasRows
from dllm.models.gemma import rule
from dllm.models.gemma.self_conditioning import SelfConditioning, soft_embeddings
from dllm.models.gemma.settings import GemmaSettings
from dllm.ops import noise
from dllm.ops.dispatch import row_stats
from dllm.ops.filters import RowFilters
from dllm.settings.denoising import NO_TOKEN


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
        # For how many steps each argmax token is the same.
        self.step_state = (Column("stable_count", (settings.canvas_length,), torch.int32),)
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
        parameters, steps_done = canvases.parameters, canvases.steps_done
        length, vocab_size = self.settings.canvas_length, logits.shape[-1]
        drawn = noise.step_noise(canvases.seeds, rows.starts, steps_done, length, vocab_size)
        # Temperatures fall over the model's number of steps, however many a request may take.
        temperature = rule.temperature(
            steps_done, self.settings.max_denoising_steps, parameters["t_min"], parameters["t_max"]
        )[rows.request_of]  # [R] -> [N]
        is_greedy = canvases.is_greedy[rows.request_of]  # [N]
        keys = drawn.keys[rows.request_of, rows.place]
        keys = torch.where(is_greedy[:, None], noise.NO_KEY, keys)
        stats = row_stats(logits, temperature, keys, self.probs_dtype, filters, rows.are_read, cap)
        is_free = canvases.chosen == NO_TOKEN
        stats = stats._replace(argmax=torch.where(is_free, stats.argmax, canvases.chosen))
        canvases = canvases.holding_ends(stats.argmax[rows.padded])
        stats = canvases.with_held_tokens(stats, rows)
        stats = stats._replace(sample=torch.where(is_greedy, stats.argmax, stats.sample))
        window = self.settings.stability_threshold + 1
        return rule.denoise_step(canvases, rows, stats, drawn, temperature, window)

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

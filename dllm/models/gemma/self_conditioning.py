"""Self-conditioning: each denoise step sees what the model believed one step earlier.

    soft_embeds = softmax(logits / T) @ embedding * sqrt(hidden_size)        [rows, hidden]
    input       = post_norm(embed(canvas) + mlp(pre_norm(soft_embeds)))

The first step of a canvas has no belief yet; its soft embedding is zero, which the MLP maps to
zero, but ``post_norm`` still applies. Causal rows are never conditioned: they enter as the raw
scaled embedding (Hugging Face ``DiffusionGemmaDecoderModel.forward``, transformers 5.19).
"""

import torch
from torch import nn
from torch.nn import functional as F
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from dllm.ops.dispatch import sparse_product
from dllm.ops.row_stats import RowStats
from dllm.ops.soft_embedding import Shard, exact_product, skipped_mass


class SelfConditioning(nn.Module):
    """The gated MLP that adds a soft embedding to the embedding of a canvas.

    Replicated, not sharded, under tensor parallelism: it runs on canvas rows only.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, eps: float) -> None:
        super().__init__()
        self.pre_norm = RMSNorm(hidden_size, eps=eps)
        self.post_norm = RMSNorm(hidden_size, eps=eps, has_weight=False)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, embeds: torch.Tensor, soft_embeds: torch.Tensor) -> torch.Tensor:
        """Condition canvas rows; both arguments and the result are ``[rows, hidden]``."""
        x = self.pre_norm(soft_embeds)
        gated = F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x)
        return self.post_norm(embeds + self.down_proj(gated))


def soft_embeddings(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    stats: RowStats,
    embedding: VocabParallelEmbedding,
    normalizer: torch.Tensor,
) -> torch.Tensor:
    """Probability-weighted mean of the scaled token embeddings.

    The exact product if ``stats`` kept the probabilities; otherwise each row leaves out tokens of
    ``skipped_mass`` together, with the error that ``soft_embedding`` states.

    Args:
        logits: ``[rows, vocab]`` over the whole vocabulary, those that ``stats`` are of.
        temperature: ``[rows]``, likewise.
        embedding: this rank's shard of the table; partial products are summed over the ranks.
        normalizer: the embedding scale, sqrt(hidden_size).

    Returns:
        ``[rows, hidden]`` in the embedding's dtype.
    """
    indices = embedding.shard_indices
    shard = Shard(embedding.weight, indices.org_vocab_start_index, indices.org_vocab_end_index)
    if stats.probs is not None:
        soft = exact_product(stats.probs, shard)
    else:
        budget = skipped_mass(embedding.weight.dtype)
        soft = sparse_product(logits, temperature, stats, shard, budget)
    return tensor_model_parallel_all_reduce(soft) * normalizer

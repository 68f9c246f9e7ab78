"""Self-conditioning: each denoise step gets the token probabilities of the step before as an input.

    soft_embeds = softmax(logits / T) @ embedding * sqrt(hidden_size)        [rows, hidden]
    input       = post_norm(embed(canvas) + mlp(pre_norm(soft_embeds)))      [rows, hidden]

In the first step of a canvas the soft embedding is zero. The MLP maps zero to zero, but
``post_norm`` still applies. Causal rows are not conditioned: their input is the scaled token
embedding itself. Source: Hugging Face ``DiffusionGemmaDecoderModel.forward``, transformers 5.19.
"""

import torch
from torch import nn
from torch.nn import functional as F
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from dllm.ops.dispatch import sparse_soft_embeddings
from dllm.ops.row_stats import RowStats
from dllm.ops.soft_embedding import Shard, exact_product, skipped_mass


class SelfConditioning(nn.Module):
    """With tensor parallelism every rank has the whole MLP: it runs on canvas rows only, so
    splitting it would save little.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, eps: float) -> None:
        super().__init__()
        self.pre_norm = RMSNorm(hidden_size, eps=eps)
        self.post_norm = RMSNorm(hidden_size, eps=eps, has_weight=False)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, embeds: torch.Tensor, soft_embeds: torch.Tensor) -> torch.Tensor:
        """Arguments and result are ``[rows, hidden]``."""
        x = self.pre_norm(soft_embeds)
        gated = F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x)
        return self.post_norm(embeds + self.down_proj(gated))


def soft_embeddings(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    stats: RowStats,
    embedding: VocabParallelEmbedding,
    normalizer: torch.Tensor,
    cap: float | None = None,
) -> torch.Tensor:
    """``[rows, hidden]``: the mean of scaled token embeddings, weighted by probabilities.

    If ``stats`` (of ``logits`` ``[rows, vocab]`` at ``temperature``) holds probabilities, the
    product with the embedding is exact. Otherwise each row leaves out unlikely tokens, which
    together have at most the probability ``skipped_mass``. ``ops.soft_embedding`` says how large
    the error is. With tensor parallelism ``embedding`` is this rank's part; the ranks' results are
    summed. ``normalizer``: sqrt(hidden_size).
    """
    indices = embedding.shard_indices
    shard = Shard(embedding.weight, indices.org_vocab_start_index, indices.org_vocab_end_index)
    if stats.probs is not None:
        soft = exact_product(stats.probs, shard)
    else:
        budget = skipped_mass(embedding.weight.dtype)
        soft = sparse_soft_embeddings(logits, temperature, stats, shard, budget, cap)
    return tensor_model_parallel_all_reduce(soft) * normalizer

"""Attention as its definition says, in fp32; keys and values of a drafter's context.

For row i of a sequence and query head h, which reads KV head h // (num_heads / num_kv_heads):

    s_k = scale * <q_i, k_k>                       logits over the keys k that row i sees
    s_k = cap * tanh(s_k / cap)                    if a soft cap is set
    o_i = sum_k softmax(s)_k v_k                   zero when row i sees no key

Which keys a row sees is taken from `masks.py`. It builds the whole mask, one sequence at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm.attention.inputs import AttentionOptions, ContextWeights
from dllm.attention.masks import ALL, Mask, QuerySpan, visible_range


def dense_mask(span: QuerySpan, layer_mask: Mask = ALL) -> Tensor:
    """``[query_len, seq_len]`` bool on the CPU: True where a key is seen."""
    mask = torch.zeros(span.query_len, span.seq_len, dtype=torch.bool)
    for row in range(span.query_len):
        start, stop = visible_range(row, span, layer_mask)
        mask[row, start:stop] = True
    return mask


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, span: QuerySpan, options: AttentionOptions
) -> Tensor:
    """``[query_len, num_heads, head_size]`` fp32, as query; key, value ``[seq_len, num_kv_heads,
    head_size]``. Keys that no row sees become zeros: a NaN among them cannot reach the output.
    """
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    mask = dense_mask(span, options.mask).to(query.device)
    is_seen = mask.any(dim=0)[:, None, None]  # [seq_len, 1, 1]
    group = num_heads // num_kv_heads
    key = torch.where(is_seen, key.float(), 0.0).repeat_interleave(group, dim=1)
    value = torch.where(is_seen, value.float(), 0.0).repeat_interleave(group, dim=1)

    # [num_heads, query_len, seq_len]
    logits = options.scale * torch.einsum("ihd,khd->hik", query.float(), key)
    if options.logit_softcap > 0:
        logits = options.logit_softcap * torch.tanh(logits / options.logit_softcap)
    logits = logits.masked_fill(~mask, float("-inf"))
    probs = torch.softmax(logits, dim=-1)  # NaN in rows that see no key
    probs = torch.where(mask.any(dim=1)[:, None], probs, 0.0)
    return torch.einsum("hik,khd->ihd", probs, value)


def gather_pages(cache: Tensor, pages: Tensor, seq_len: int) -> Tensor:
    """In order, ``[seq_len, num_kv_heads, head_size]``; pages: its row of the block table."""
    page_size = cache.shape[1]
    position = torch.arange(seq_len, device=pages.device)
    return cache[pages[position // page_size].long(), position % page_size]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    spans: list[QuerySpan],
    options: AttentionOptions,
) -> list[Tensor]:
    """Of several sequences over a paged cache; one fp32 tensor per sequence.

    query ``[>= sum(query_len), num_heads, head_size]``: sequences lie one after the other; caches
    ``[num_pages, page_size, num_kv_heads, head_size]``, of an fp8 cache the numbers it stands for
    (multiplied by its scale); block_tables ``[num_seqs, max_pages]``.
    """
    outputs, start = [], 0
    for index, span in enumerate(spans):
        rows = query[start : start + span.query_len]
        key = gather_pages(key_cache, block_tables[index], span.seq_len)
        value = gather_pages(value_cache, block_tables[index], span.seq_len)
        outputs.append(dense_attention(rows, key, value, span, options))
        start += span.query_len
    return outputs


def context_kv(
    hidden: Tensor, positions: Tensor, weights: ContextWeights, num_kv_heads: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of a drafter's context, each ``[layers, tokens, heads, head_size]`` fp32.

    For token t, layer l and KV head h, with x_t the normalized hidden state:

        k = RoPE(RMSNorm(W_k[l, h] x_t + b) * k_norm[l], position of t)
        v = W_v[l, h] x_t + b

    hidden ``[tokens, hidden]``, positions ``[tokens]``.
    """
    layers, head_size = weights.k_norm.shape
    product = hidden.float() @ weights.weight.float().T
    if weights.bias is not None:
        product = product + weights.bias.float()
    keys, values = product.view(-1, layers, 2, num_kv_heads, head_size).movedim(0, 2).unbind(1)
    keys = keys * (keys.square().mean(-1, keepdim=True) + weights.eps).rsqrt()
    keys = keys * weights.k_norm.float()[:, None, None]
    cos, sin = weights.cos_sin.float()[positions][:, None].chunk(2, dim=-1)  # [tokens, 1, pairs]
    half = cos.shape[-1]
    first, second = slice(0, half), slice(half, 2 * half)
    if not weights.is_neox:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    turned = keys.clone()
    turned[..., first] = keys[..., first] * cos - keys[..., second] * sin
    turned[..., second] = keys[..., second] * cos + keys[..., first] * sin
    return turned, values

"""The Triton kernels of vLLM's sampler for autoregressive models, in numpy and torch.

A diffusion model has its own sampler and never launches them. `batch` explains how these functions
are written. Here

    logits                [N, V], one row for each position that is sampled; changed in place
    expanded_idx_mapping  [N], the slot of each logits row
"""

import numpy as np
import torch

from dllm.attention.ragged import lengths
from dllm.cpu.gumbel import DRAFT_NOISE_SALT, best_per_block, drawn_at_once, gumbel_noise

# --------------------------------------------------------------------------- sampling


def _gumbel_sample_kernel(
    local_argmax_ptr: torch.Tensor,
    local_max_ptr: torch.Tensor,
    logits_cache_ptr: torch.Tensor | None,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
    SEED_HAS_STEP: bool = True,
) -> None:
    """Find the best token of each vocabulary block, for every logits row.

    The best is the largest logit, plus Gumbel noise unless the temperature is 0; the largest over
    all blocks is a sample from the softmax. vLLM reduces the blocks itself. local_argmax,
    local_max: [N, blocks]. Rows with a negative slot are padding and count as temperature 0.
    logits_cache: [max_num_reqs, columns, V] keeps the rows of logits_cache_source, at each row's
    slot. SEED_HAS_STEP: the column, a step of drafting, is mixed into the seed.
    """
    slots = expanded_idx_mapping_ptr.numpy()
    temperatures = np.where(slots >= 0, temp_ptr.float().numpy()[slots], np.float32(0))
    if logits_cache_ptr is not None:
        assert logits_cache_col_ptr is not None and logits_cache_source_ptr is not None
        rows = np.flatnonzero(slots >= 0)
        columns = logits_cache_col_ptr.view(-1).numpy()
        cells = slots[rows], columns[rows] if PER_TOKEN_COL else columns[0]
        logits_cache_ptr[*cells, :vocab_size] = logits_cache_source_ptr[rows]

    def keep_best(rows: np.ndarray | slice, values: np.ndarray) -> None:
        tokens, best = best_per_block(values, BLOCK_SIZE)
        local_argmax_ptr.numpy()[rows], local_max_ptr.numpy()[rows] = tokens, best

    random = np.flatnonzero(temperatures)
    greedy = slice(None) if not len(random) else np.flatnonzero(temperatures == 0)
    keep_best(greedy, logits_ptr[greedy].float().numpy())
    for rows in drawn_at_once(random, vocab_size):
        logits = logits_ptr[rows].float().numpy()
        if APPLY_TEMPERATURE:
            logits = logits / temperatures[rows, None]
        positions = pos_ptr.numpy()[rows] + DRAFT_NOISE_SALT * IS_DRAFTING
        seeds = seeds_ptr.numpy()[slots[rows]]
        if logits_cache_ptr is not None and SEED_HAS_STEP:
            steps = columns[rows] if PER_TOKEN_COL else columns[0]
            seeds = seeds ^ (np.asarray(steps, np.int64) << 32)
        keep_best(rows, logits + gumbel_noise(seeds, positions, vocab_size, USE_FP64))


# --------------------------------------------------------------------------- shaping the logits


def _temperature_kernel(
    logits_ptr: torch.Tensor, expanded_idx_mapping_ptr: torch.Tensor, temperature_ptr: torch.Tensor
) -> None:
    """Rows with temperature 0 stay."""
    temperature = temperature_ptr[expanded_idx_mapping_ptr].float()
    temperature.masked_fill_(temperature == 0, 1)
    logits_ptr.div_(temperature.unsqueeze(1))


def _min_p_kernel(
    logits_ptr: torch.Tensor, expanded_idx_mapping_ptr: torch.Tensor, min_p_ptr: torch.Tensor
) -> None:
    """min_p 0 sets none to -inf."""
    log_min_p = min_p_ptr[expanded_idx_mapping_ptr].float().log()
    threshold = logits_ptr.amax(1).float() + log_min_p
    logits_ptr.masked_fill_(logits_ptr < threshold.unsqueeze(1), -torch.inf)


# --------------------------------------------------------------------------- counting


def _get_num_sampled_and_rejected_kernel(
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
) -> None:
    """num_rejected = logits rows - num_sampled; 0 for both within a prompt."""
    slots = idx_mapping_ptr.numpy()
    num_rows = len(slots)
    is_done = seq_lens_ptr.numpy()[:num_rows] >= prefill_len_ptr.numpy()[slots]
    num_sampled, num_rejected = num_sampled_ptr.numpy(), num_rejected_ptr.numpy()
    num_sampled[:num_rows] *= is_done
    num_logits = lengths(cu_num_logits_ptr.numpy()[: num_rows + 1])
    num_rejected[:num_rows] = (num_logits - num_sampled[:num_rows]) * is_done


def _num_nans_kernel(logits_ptr: torch.Tensor, num_nans_ptr: torch.Tensor) -> None:
    num_nans_ptr.copy_(logits_ptr.isnan().sum(1))

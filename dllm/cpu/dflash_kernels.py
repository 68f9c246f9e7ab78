"""The Triton kernel that lays out a DFlash drafter's step, in numpy.

Conventions as in kernels.py. A drafter reads the target's query tokens as context and proposes with
Q query tokens per row: the last sampled token, then masks.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch


def _cache_slots(
    block_ids: np.ndarray, block_size: int, pad_id: int, positions: np.ndarray
) -> np.ndarray:
    """Return where positions go in the KV cache, pad_id where their block is the null block 0.

    block_ids: [blocks] of one row; positions after the last block stay in it.
    """
    blocks = block_ids[np.minimum(positions // block_size, len(block_ids) - 1)].astype(np.int64)
    return np.where(blocks != 0, blocks * block_size + positions % block_size, pad_id)


def _fill(out: torch.Tensor, values: np.ndarray, padding: int | None = None) -> None:
    """Write values, flattened, to the start of `out`, and padding to the rest of it."""
    flat = out.numpy()
    flat[: values.size] = values.reshape(-1)
    if padding is not None:
        flat[values.size :] = padding


def _prepare_dflash_inputs_kernel(
    out_input_ids_ptr: torch.Tensor,
    out_query_positions_ptr: torch.Tensor,
    out_query_start_loc_ptr: torch.Tensor,
    out_seq_lens_ptr: torch.Tensor,
    out_query_slot_mapping_ptr: torch.Tensor,
    out_context_positions_ptr: torch.Tensor,
    out_context_slot_mapping_ptr: torch.Tensor,
    out_sample_indices_ptr: torch.Tensor,
    out_sample_pos_ptr: torch.Tensor,
    out_sample_idx_mapping_ptr: torch.Tensor,
    out_temperature_ptr: torch.Tensor,
    out_seeds_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    target_query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    BLOCK_SIZE: int,
) -> None:
    """Fill every buffer of the drafter's step, and pad each to its end.

    Context tokens keep their positions; the rejected ones at a row's end get position 0 and no
    cache slot. Q query tokens follow the last context token that is kept. Drafts are sampled at
    all of them (SAMPLE_FROM_ANCHOR, each for the position after it) or all but the first.
    """
    assert CP_SIZE == 1, f"context parallelism needs CUDA, but CP_SIZE is {CP_SIZE}"
    slots, spans = idx_mapping_ptr.numpy(), target_query_start_loc_ptr.tolist()
    num_rows, num_queries = len(slots), num_query_per_req
    num_query_tokens = num_rows * num_queries
    target_positions, block_table = target_positions_ptr.numpy(), block_table_ptr.numpy()
    context_positions = out_context_positions_ptr.numpy()
    context_slots = out_context_slot_mapping_ptr.numpy()
    query_slots = out_query_slot_mapping_ptr.numpy()

    positions = np.empty((num_rows, num_queries), dtype=np.int64)
    for row, num_rejected in enumerate(num_rejected_ptr.tolist()[:num_rows]):
        start, end = spans[row], spans[row + 1]
        kept_end = end - num_rejected
        kept = target_positions[start:kept_end]
        positions[row] = kept[-1] + 1 + np.arange(num_queries)
        slots_of = partial(_cache_slots, block_table[row], block_size, PAD_SLOT_ID)
        context_positions[start:kept_end], context_positions[kept_end:end] = kept, 0
        context_slots[start:kept_end], context_slots[kept_end:end] = slots_of(kept), PAD_SLOT_ID
        query_slots[row * num_queries : (row + 1) * num_queries] = slots_of(positions[row])
    query_slots[num_query_tokens:max_num_tokens] = PAD_SLOT_ID

    bonus = np.where(
        num_sampled_ptr.numpy()[:num_rows] > 0,
        last_sampled_ptr.numpy().reshape(-1)[slots],
        next_prefill_tokens_ptr.numpy().reshape(-1)[slots],
    )
    input_ids = np.full((num_rows, num_queries), parallel_drafting_token_id)
    input_ids[:, 0] = bonus
    last_position = max_model_len - 1
    _fill(out_input_ids_ptr[:num_query_tokens], input_ids)
    _fill(out_query_positions_ptr[:num_query_tokens], np.minimum(positions, last_position))
    starts = np.arange(max_num_reqs + 1) * num_queries
    _fill(out_query_start_loc_ptr[: max_num_reqs + 1], np.minimum(starts, num_query_tokens))
    seq_lens = np.minimum(positions[:, -1], last_position) + 1
    _fill(out_seq_lens_ptr[:max_num_reqs], seq_lens, padding=0)

    first = 0 if SAMPLE_FROM_ANCHOR else 1
    query_indices = np.arange(num_query_tokens).reshape(num_rows, num_queries)[:, first:]
    num_samples = max_num_reqs * num_speculative_steps
    _fill(out_sample_indices_ptr[:num_samples], query_indices, padding=0)
    sample_positions = positions[:, first:] + SAMPLE_FROM_ANCHOR
    _fill(out_sample_pos_ptr[:num_samples], sample_positions, padding=0)
    sample_slots = np.repeat(slots, num_queries - first)
    _fill(out_sample_idx_mapping_ptr[:num_samples], sample_slots, padding=-1)
    out_temperature_ptr[idx_mapping_ptr] = temperature_ptr[idx_mapping_ptr]
    out_seeds_ptr[idx_mapping_ptr] = seeds_ptr[idx_mapping_ptr]


DFLASH_KERNELS: dict[str, Callable[..., None]] = {
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": (
        _prepare_dflash_inputs_kernel
    ),
}

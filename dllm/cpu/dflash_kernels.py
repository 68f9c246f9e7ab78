"""The Triton kernel that lays out a DFlash drafter's step, in numpy.

Conventions as in kernels.py. A drafter reads the target's query tokens as context and proposes with
Q query tokens per row: the last sampled token, then masks.
"""

from collections.abc import Callable

import numpy as np
import torch


def _cache_slots(
    block_ids: np.ndarray, positions: np.ndarray, block_size: int, pad_id: int
) -> np.ndarray:
    """Return where positions go in the KV cache, pad_id where their block is the null block 0.

    block_ids: [blocks] of one row; positions after the last block stay in it.
    """
    blocks = block_ids[np.minimum(positions // block_size, len(block_ids) - 1)].astype(np.int64)
    return np.where(blocks != 0, blocks * block_size + positions % block_size, pad_id)


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
    target_positions, block_table = target_positions_ptr.numpy(), block_table_ptr.numpy()
    context_positions = out_context_positions_ptr.numpy()
    context_slots = out_context_slot_mapping_ptr.numpy()
    rejected = num_rejected_ptr.tolist()

    last_kept = np.empty(num_rows, dtype=np.int64)
    query_slots = np.empty((num_rows, num_queries), dtype=np.int64)
    for row, (start, end) in enumerate(zip(spans[:num_rows], spans[1:], strict=False)):
        kept_end = end - rejected[row]
        kept = target_positions[start:kept_end]
        context_positions[start:kept_end] = kept
        context_positions[kept_end:end] = 0
        context_slots[start:kept_end] = _cache_slots(
            block_table[row], kept, block_size, PAD_SLOT_ID
        )
        context_slots[kept_end:end] = PAD_SLOT_ID
        last_kept[row] = kept[-1]
        query_slots[row] = _cache_slots(
            block_table[row], kept[-1] + 1 + np.arange(num_queries), block_size, PAD_SLOT_ID
        )

    # Query tokens: [rows, Q].
    num_query_tokens = num_rows * num_queries
    positions = last_kept[:, None] + 1 + np.arange(num_queries)
    bonus = np.where(
        num_sampled_ptr.numpy()[:num_rows] > 0,
        last_sampled_ptr.numpy().reshape(-1)[slots],
        next_prefill_tokens_ptr.numpy().reshape(-1)[slots],
    )
    input_ids = out_input_ids_ptr.numpy()[:num_query_tokens].reshape(num_rows, num_queries)
    input_ids[:] = parallel_drafting_token_id
    input_ids[:, 0] = bonus
    out_query_positions_ptr.numpy()[:num_query_tokens] = np.minimum(
        positions, max_model_len - 1
    ).reshape(-1)
    out_slots = out_query_slot_mapping_ptr.numpy()
    out_slots[:num_query_tokens] = query_slots.reshape(-1)
    out_slots[num_query_tokens:max_num_tokens] = PAD_SLOT_ID
    starts = np.minimum(np.arange(max_num_reqs + 1) * num_queries, num_query_tokens)
    out_query_start_loc_ptr.numpy()[: max_num_reqs + 1] = starts
    seq_lens = out_seq_lens_ptr.numpy()
    seq_lens[:num_rows] = np.minimum(last_kept + 1 + num_queries, max_model_len)
    seq_lens[num_rows:max_num_reqs] = 0

    # Samples: [rows, num_speculative_steps].
    first = 0 if SAMPLE_FROM_ANCHOR else 1
    query_indices = np.arange(num_query_tokens).reshape(num_rows, num_queries)
    for out, values, padding in (
        (out_sample_indices_ptr, query_indices[:, first:], 0),
        (out_sample_pos_ptr, positions[:, first:] + SAMPLE_FROM_ANCHOR, 0),
        (out_sample_idx_mapping_ptr, slots[:, None].repeat(num_queries - first, 1), -1),
    ):
        samples = out.numpy()[: max_num_reqs * num_speculative_steps]
        samples = samples.reshape(max_num_reqs, num_speculative_steps)
        samples[:num_rows] = values
        samples[num_rows:] = padding

    out_temperature_ptr[idx_mapping_ptr] = temperature_ptr[idx_mapping_ptr]
    out_seeds_ptr[idx_mapping_ptr] = seeds_ptr[idx_mapping_ptr]


DFLASH_KERNELS: dict[str, Callable[..., None]] = {
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": (
        _prepare_dflash_inputs_kernel
    ),
}

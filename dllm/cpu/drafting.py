"""The Triton kernels of drafts in numpy: the inputs of a DFlash drafter, and verification's tokens.

`batch` explains how these functions are written. Which drafts are kept is decided by
`drafter.verification`, which needs no kernel of its own. A DFlash drafter (arXiv 2602.06036)
proposes tokens for the target, the model that is served. In each step it takes two kinds of tokens
per row:

    context tokens   the target's query tokens of this step; the drafter's keys and values for them
                     come from the target's hidden states
    query tokens     Q of them: the token that follows the context (the anchor), then Q - 1 mask
                     tokens, at which the drafter predicts; a DSpark drafter does at the anchor, too
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dllm.attention.ragged import fill, lengths, spread, starts_of


@dataclass(frozen=True)
class _Cache:
    """The drafter's KV cache. Block 0 is vLLM's null block: for blocks that are not allocated."""

    block_table: np.ndarray  # [rows, blocks], block ids
    block_size: int
    pad_id: int

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where each position of a row goes in the cache; pad_id in the null block.

        Positions behind the end of the table use its last block, as in the Triton kernel.
        """
        index, offsets = np.divmod(positions, self.block_size)
        index = np.minimum(index, self.block_table.shape[1] - 1)
        blocks = self.block_table[rows, index].astype(np.int64)
        return np.where(blocks != 0, blocks * self.block_size + offsets, self.pad_id)


def _fill_context(
    out: tuple[torch.Tensor, torch.Tensor],
    target_positions: np.ndarray,
    starts: np.ndarray,
    num_rejected: np.ndarray,
    cache: _Cache,
) -> np.ndarray:
    """Write positions and cache slots of the context tokens; return each row's last kept position.

    starts: [rows + 1], of each row's query tokens of the target. The last num_rejected[row] of them
    get position 0 and no cache slot.
    """
    rows, offsets = spread(starts)
    is_kept = offsets < (lengths(starts) - num_rejected)[rows]
    positions = np.where(is_kept, target_positions[: starts[-1]], 0)
    fill(out[0], positions)
    fill(out[1], np.where(is_kept, cache.slots(rows, positions), cache.pad_id))
    return positions[starts[1:] - num_rejected - 1]


def _fill_queries(
    out: Sequence[torch.Tensor],
    bonus: np.ndarray,
    mask_token_id: int,
    positions: np.ndarray,
    last_position: int,
    cache: _Cache,
) -> None:
    """Write the query tokens of every row.

    out: ids, positions, cache slots, starts, sequence lengths, for Q tokens of each of at most
    `max_num_reqs` rows. bonus: [rows], the first token of each row; mask tokens follow. positions:
    [rows, Q]; what is beyond last_position, the model's last, is written as last_position.
    """
    ids_out, positions_out, slots_out, starts_out, lengths_out = out
    num_rows, num_queries = positions.shape
    input_ids = np.full(positions.shape, mask_token_id)
    input_ids[:, 0] = bonus
    fill(ids_out, input_ids)
    fill(positions_out, np.minimum(positions, last_position))
    fill(slots_out, cache.slots(np.arange(num_rows)[:, None], positions), cache.pad_id)
    starts = np.arange(len(starts_out)) * num_queries
    fill(starts_out, np.minimum(starts, num_rows * num_queries))
    fill(lengths_out, np.minimum(positions[:, -1], last_position) + 1, padding=0)


def _fill_samples(
    out: Sequence[torch.Tensor],
    num_samples: int,
    positions: np.ndarray,
    slots: np.ndarray,
    from_anchor: bool,
) -> None:
    """Write index of each query token at which a draft is sampled, the draft's position, its slot.

    These are the mask tokens, at their own positions; or all, and the next token is sampled.
    """
    indices_out, positions_out, slots_out = (buffer[:num_samples] for buffer in out)
    indices = np.arange(positions.size).reshape(positions.shape)
    if from_anchor:
        positions = positions + 1
    else:
        indices, positions = indices[:, 1:], positions[:, 1:]
    fill(indices_out, indices, padding=0)
    fill(positions_out, positions, padding=0)
    fill(slots_out, slots.repeat(len(indices[0])), padding=-1)


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
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    out_is_padding_ptr: torch.Tensor | None = None,
) -> None:
    """Each input buffer of the drafter's step is padded to its end."""
    assert CP_SIZE == 1, f"context parallelism needs CUDA, but CP_SIZE is {CP_SIZE}"
    slots = idx_mapping_ptr.numpy()
    cache = _Cache(block_table_ptr.numpy(), block_size, PAD_SLOT_ID)
    last = _fill_context(
        (out_context_positions_ptr, out_context_slot_mapping_ptr),
        target_positions_ptr.numpy(),
        target_query_start_loc_ptr.numpy()[: len(slots) + 1],
        num_rejected_ptr.numpy()[: len(slots)],
        cache,
    )
    positions = last[:, None] + 1 + np.arange(num_query_per_req)
    sampled, prompt = last_sampled_ptr.numpy(), next_prefill_tokens_ptr.numpy()
    has_sampled = num_sampled_ptr.numpy()[: len(slots)] > 0  # otherwise its prompt goes on
    bonus = np.where(has_sampled, sampled.reshape(-1)[slots], prompt.reshape(-1)[slots])
    queries = (
        out_input_ids_ptr,
        out_query_positions_ptr,
        out_query_slot_mapping_ptr[:max_num_tokens],
        out_query_start_loc_ptr[: max_num_reqs + 1],
        out_seq_lens_ptr[:max_num_reqs],
    )
    _fill_queries(queries, bonus, parallel_drafting_token_id, positions, max_model_len - 1, cache)
    if out_is_padding_ptr is not None:
        out_is_padding_ptr.numpy()[:max_num_tokens] = np.arange(max_num_tokens) >= positions.size
        out_input_ids_ptr.numpy()[positions.size : max_num_tokens] = 0
        out_query_positions_ptr.numpy()[positions.size : max_num_tokens] = 0
    samples = (out_sample_indices_ptr, out_sample_pos_ptr, out_sample_idx_mapping_ptr)
    num_samples = max_num_reqs * num_speculative_steps
    _fill_samples(samples, num_samples, positions, slots, SAMPLE_FROM_ANCHOR)
    out_temperature_ptr.numpy()[slots] = temperature_ptr.numpy()[slots]
    out_seeds_ptr.numpy()[slots] = seeds_ptr.numpy()[slots]


def _selector_walk_kernel(
    scores_ptr: torch.Tensor,
    candidate_ptr: torch.Tensor,
    tokens_ptr: torch.Tensor,
    realized_scores_ptr: torch.Tensor,
    num_steps: int,
    top_k: int,
    SAMPLE_PROBABILISTIC: bool,
) -> None:
    """Choose each place's best candidate of DFlash 2, given the one chosen in front of it.

    scores: [rows, steps, k, k], of each candidate behind each candidate of the place before; those
    behind the chosen one are kept in realized_scores. In front of the first place the first of the
    k is chosen.
    """
    assert not SAMPLE_PROBABILISTIC, "refused at start"
    scores = scores_ptr.view(-1, num_steps, top_k, top_k)
    rows = torch.arange(len(scores))
    candidates = candidate_ptr.view(-1, num_steps, top_k)
    chosen = torch.zeros(len(rows), dtype=torch.long)
    for step in range(num_steps):
        realized = scores[rows, step, chosen].float()
        realized_scores_ptr.view(-1, num_steps, top_k)[: len(rows), step] = realized
        chosen = realized.argmax(-1)
        tokens_ptr.view(-1, num_steps)[: len(rows), step] = candidates[rows, step, chosen]


def _flatten_sampled_kernel(
    flat_sampled_ptr: torch.Tensor,
    sampled_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
) -> None:
    """The first num_sampled tokens of a row of [rows, width] go to the first of its logits rows."""
    num_sampled = num_sampled_ptr.numpy()
    rows, offsets = spread(starts_of(num_sampled))
    target = cu_num_logits_ptr.numpy()[rows] + offsets
    flat_sampled_ptr.numpy()[target] = sampled_ptr.numpy()[rows, offsets]


def _gather_draft_sampled_kernel(
    draft_sampled_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    num_logits: int,
) -> None:
    """Copy the input token and the position of every logits row.

    Real drafts follow a sampled token, which is behind the prompt. What looks like drafts of a row
    that is still within its prompt are placeholders; they become -1.
    """
    tokens = logits_indices_ptr.numpy()[:num_logits]
    local_pos = expanded_local_pos_ptr.numpy()[:num_logits]
    positions = positions_ptr.numpy()[tokens]
    prefill_len = prefill_len_ptr.numpy()[expanded_idx_mapping_ptr.numpy()[:num_logits]]
    is_placeholder = (local_pos > 0) & (positions - local_pos < prefill_len)
    sampled = np.where(is_placeholder, -1, input_ids_ptr.numpy()[tokens])
    draft_sampled_ptr.numpy()[:num_logits] = sampled
    pos_ptr.numpy()[:num_logits] = positions

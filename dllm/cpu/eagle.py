"""The Triton kernels of drafts one by one that read the target's hidden states: EAGLE-3, MTP.

`batch` explains how these functions are written. In the first pass of a step the drafter reads the
target's tokens of this step, each shifted by one: the hidden states of a token go with the token
behind it. Rejected drafts stay in the buffers, and nothing is written for them. Each further pass
reads one token of each row, the draft of the pass before.
"""

import numpy as np
import torch

from dllm.attention.ragged import fill, lengths, spread


def _prepare_prefill_inputs_kernel(
    last_token_indices_ptr: torch.Tensor,
    draft_current_step_ptr: torch.Tensor,
    draft_input_ids_ptr: torch.Tensor,
    draft_positions_ptr: torch.Tensor,
    draft_query_start_loc_ptr: torch.Tensor,
    draft_seq_lens_ptr: torch.Tensor,
    target_input_ids_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    max_num_reqs: int,
) -> None:
    """Shift each row's kept tokens by one, put the next token behind them, and pad the rest."""
    slots = idx_mapping_ptr.numpy()
    num_rows = len(slots)
    starts = query_start_loc_ptr.numpy()[: num_rows + 1]
    kept = lengths(starts) - num_rejected_ptr.numpy()[:num_rows]
    rows, offsets = spread(starts)
    tokens = starts[0] + np.flatnonzero(offsets < kept[rows])
    draft_positions_ptr.numpy()[tokens] = target_positions_ptr.numpy()[tokens]
    shifted = starts[0] + np.flatnonzero((offsets < kept[rows]) & (offsets > 0))
    ids = draft_input_ids_ptr.numpy()
    ids[shifted - 1] = target_input_ids_ptr.numpy()[shifted]
    last = starts[:-1] + kept - 1
    sampled, prompt = last_sampled_ptr.numpy(), next_prefill_tokens_ptr.numpy()
    has_sampled = num_sampled_ptr.numpy()[:num_rows] > 0  # otherwise its prompt goes on
    ids[last] = np.where(has_sampled, sampled.reshape(-1)[slots], prompt.reshape(-1)[slots])
    draft_current_step_ptr.zero_()
    fill(last_token_indices_ptr[:max_num_reqs], last, 0)
    fill(draft_query_start_loc_ptr[: max_num_reqs + 1], starts[:-1], starts[-1])
    fill(draft_seq_lens_ptr[:max_num_reqs], seq_lens_ptr.numpy()[:num_rows], 0)


def _prepare_decode_inputs_kernel(
    draft_tokens_ptr: torch.Tensor,
    target_seq_lens_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    sample_src_positions_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    max_model_len: int,
    max_num_reqs: int,
    ADVANCE_DRAFT_POSITIONS: bool,
) -> None:
    num_rows = len(draft_tokens_ptr)
    input_ids_ptr.numpy()[:num_rows] = draft_tokens_ptr.numpy()
    sample_src_positions_ptr.numpy()[:num_rows] += 1
    seq_lens = target_seq_lens_ptr.numpy()[:num_rows] - num_rejected_ptr.numpy()[:num_rows]
    if ADVANCE_DRAFT_POSITIONS:
        positions = positions_ptr.numpy()[:num_rows]
        np.minimum(positions + 1, max_model_len - 1, out=positions)
        seq_lens = np.minimum(seq_lens + 1, max_model_len)
    fill(seq_lens_ptr[:max_num_reqs], seq_lens, 0)
    fill(query_start_loc_ptr[: max_num_reqs + 1], np.arange(num_rows), num_rows)


def _update_draft_inputs_kernel(
    output_draft_tokens_ptr: torch.Tensor,
    next_input_hidden_states_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    sample_src_positions_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    current_draft_step_ptr: torch.Tensor,
    hidden_states_ptr: torch.Tensor,
    max_model_len: int,
    num_speculative_steps: int,
    ADVANCE_DRAFT_POSITIONS: bool,
) -> None:
    """Keep a pass's drafts, and make them the input of the next pass, if there is one."""
    num_rows, step = len(draft_tokens_ptr), int(current_draft_step_ptr)
    output_draft_tokens_ptr[:num_rows, step] = draft_tokens_ptr
    if step >= num_speculative_steps - 1:
        return
    sample_src_positions_ptr[:num_rows] += 1
    input_ids_ptr[:num_rows] = draft_tokens_ptr
    next_input_hidden_states_ptr[:num_rows] = hidden_states_ptr[:num_rows]
    if ADVANCE_DRAFT_POSITIONS:
        positions_ptr[:num_rows] = (positions_ptr[:num_rows] + 1).clamp(max=max_model_len - 1)
        seq_lens_ptr[:num_rows] = (seq_lens_ptr[:num_rows] + 1).clamp(max=max_model_len)

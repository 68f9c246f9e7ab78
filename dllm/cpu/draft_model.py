"""The Triton kernel of a small model that drafts beside the target, in numpy.

`batch` explains how these functions are written.
"""

import numpy as np
import torch

from dllm.attention.ragged import fill, lengths, spread


def _prepare_prefill_inputs_kernel(
    target_input_ids_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    out_input_ids_ptr: torch.Tensor,
    out_positions_ptr: torch.Tensor,
    last_token_indices_ptr: torch.Tensor,
    out_query_start_loc_ptr: torch.Tensor,
    out_seq_lens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    max_num_reqs: int,
    max_model_len: int,
) -> None:
    """Write each row's tokens with one place more: the token behind those that were kept.

    Zeros stand behind it, for the rejected drafts; a later step overwrites their keys and values.
    """
    slots = idx_mapping_ptr.numpy()
    num_rows = len(slots)
    starts = query_start_loc_ptr.numpy()[: num_rows + 1]
    kept = lengths(starts) - num_rejected_ptr.numpy()[:num_rows]
    longer = starts + np.arange(num_rows + 1)
    rows, offsets = spread(longer)
    places = np.arange(longer[0], longer[-1])
    ids = np.zeros(len(places), dtype=np.int32)
    is_kept = offsets < kept[rows]
    ids[is_kept] = target_input_ids_ptr.numpy()[(starts[rows] + offsets)[is_kept]]
    sampled = last_sampled_ptr.numpy().reshape(-1)[slots]
    ids[offsets == kept[rows]] = sampled
    out_input_ids_ptr.numpy()[places] = ids
    first = target_positions_ptr.numpy()[starts[:-1]]
    out_positions_ptr.numpy()[places] = np.minimum(first[rows] + offsets, max_model_len - 1)
    fill(last_token_indices_ptr[:max_num_reqs], longer[:-1] + kept, 0)
    fill(out_query_start_loc_ptr[: max_num_reqs + 1], longer[:-1], longer[-1])
    seq_lens = np.minimum(seq_lens_ptr.numpy()[:num_rows] + 1, max_model_len)
    fill(out_seq_lens_ptr[:max_num_reqs], seq_lens, 0)

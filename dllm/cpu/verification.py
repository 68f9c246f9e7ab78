"""The Triton kernels around the verification of draft tokens, in numpy.

`batch` explains how these functions are written. The verification itself is
`drafter.verification`, which needs no kernel of its own.
"""

import numpy as np
import torch

from dllm.cpu.ragged import Kernel, spread

_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler."


def _flatten_sampled_kernel(
    flat_sampled_ptr: torch.Tensor,
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    num_warps: int = 1,
) -> None:
    """Copy sampled tokens [rows, width] to a flat array that is indexed by logits row.

    The first num_sampled tokens of a row go to the first of its logits rows.
    """
    num_sampled = num_sampled_ptr.numpy()
    rows, offsets = spread(np.concatenate(([0], np.cumsum(num_sampled))))
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
    BLOCK_SIZE: int,
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


VERIFICATION_KERNELS: dict[str, Kernel] = {
    _SAMPLER + "_flatten_sampled_kernel": _flatten_sampled_kernel,
    _SAMPLER + "_gather_draft_sampled_kernel": _gather_draft_sampled_kernel,
}

"""The Triton kernels that report log-probabilities and apply grammars, in torch and numpy.

vLLM launches them for diffusion models too. `batch` explains how these functions are written.
`logits` is [N, V] here, one row for each position that is sampled.
"""

import numpy as np
import torch


def _topk_log_softmax_kernel(
    output_ptr: torch.Tensor, logits_ptr: torch.Tensor, topk_ids_ptr: torch.Tensor
) -> None:
    """`topk_ids`: [N, topk]; fp32."""
    logits = logits_ptr.float()
    output_ptr.copy_(logits.gather(1, topk_ids_ptr) - logits.logsumexp(1, keepdim=True))


def _ranks_kernel(
    output_ptr: torch.Tensor, logits_ptr: torch.Tensor, token_ids_ptr: torch.Tensor
) -> None:
    """1 is best. A token at -inf has rank V here. The Triton kernel gives a larger number: it also
    counts the padding of its last vocabulary block.
    """
    chosen = logits_ptr.gather(1, token_ids_ptr.long().unsqueeze(1))
    output_ptr.copy_((logits_ptr >= chosen).sum(1))


def _fill_logprob_token_ids_kernel(
    out_token_ids_ptr: torch.Tensor,
    out_valid_mask_ptr: torch.Tensor,
    sampled_token_ids_ptr: torch.Tensor,
    topk_indices_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_ptr: torch.Tensor,
    NUM_TOPK: int,
) -> None:
    """First the sampled token, then those that the request has named, else the likeliest.

    out_token_ids, out_valid_mask: [N, 1 + columns]; cells that no token needs stay as they are.
    With NUM_TOPK 0, topk_indices is not read.
    """
    out, valid = out_token_ids_ptr.numpy(), out_valid_mask_ptr.numpy()
    out[:, 0], valid[:, 0] = sampled_token_ids_ptr.numpy(), True
    slots = expanded_idx_mapping_ptr.numpy()
    num_wanted = num_per_req_token_ids_ptr.numpy()[slots]
    has_own = num_wanted > 0
    if NUM_TOPK:
        out[~has_own, 1 : 1 + NUM_TOPK] = topk_indices_ptr.numpy()[~has_own, :NUM_TOPK]
        valid[~has_own, 1 : 1 + NUM_TOPK] = True
    rows, places = np.nonzero(np.arange(num_wanted.max(initial=0)) < num_wanted[:, None])
    out[rows, 1 + places] = per_req_token_ids_ptr.numpy()[slots[rows], places]
    valid[rows, 1 + places] = True


def _apply_grammar_bitmask_kernel(
    logits_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    bitmask_ptr: torch.Tensor,
    vocab_size: int,
    MASK_STRIDE: int,
) -> None:
    """Set the logits of tokens that a grammar forbids (bit 0) to -inf.

    bitmask: [masks, ceil(V / 32)] int32, lowest bit first. Mask i is for logits row
    `logits_indices[i] % MASK_STRIDE` of batch row `logits_indices[i] // MASK_STRIDE`. It is not
    used if that batch row has fewer logits rows.
    """
    bits = np.unpackbits(bitmask_ptr.numpy().view(np.uint8), axis=1, bitorder="little")
    is_forbidden = torch.from_numpy(bits[:, :vocab_size] == 0)
    cu_num_logits = cu_num_logits_ptr.tolist()
    for mask, target in enumerate(logits_indices_ptr.tolist()):
        row, position = divmod(target, MASK_STRIDE)
        logits_row = cu_num_logits[row] + position
        if logits_row < cu_num_logits[row + 1]:
            logits_ptr[logits_row].masked_fill_(is_forbidden[mask], -torch.inf)

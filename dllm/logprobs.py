"""Logprobs of emitted blocks.

A block is emitted in the very step in which it converged, so its logprobs are computed then and
never kept. They are those of the distribution that the last denoise step sampled from: the
logits over the temperature of that step, filtered by top-k and top-p if the request asks for it.
"""

import torch
from vllm.v1.outputs import LogprobsTensors


def block_logprobs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    chosen: torch.Tensor,
    num_logprobs: int,
    num_emitted: list[int],
) -> LogprobsTensors:
    """Top-k and chosen logprobs of the rows that are emitted.

    Args:
        logits: ``[rows, vocab]`` of the emitted rows only, in batch order.
        temperature: ``[rows]``.
        chosen: ``[rows]`` int64, the emitted tokens.
        num_logprobs: how many alternatives the widest request wants.
        num_emitted: tokens emitted per batch row, zeros included.

    Returns:
        Column 0 is the chosen token, the others the top ``num_logprobs``. A rank is 1-based and
        counts ties, as vLLM's does for autoregressive models.
    """
    logprobs = (logits.float() / temperature[:, None]).log_softmax(dim=-1)
    ids = torch.cat([chosen[:, None], logprobs.topk(num_logprobs, dim=-1).indices], dim=1)
    picked = logprobs.gather(1, ids)
    starts = [0]
    for count in num_emitted[:-1]:
        starts.append(starts[-1] + count)
    return LogprobsTensors(
        logprob_token_ids=ids,
        logprobs=picked,
        selected_token_ranks=(logprobs >= picked[:, :1]).sum(dim=1),
        cu_num_generated_tokens=starts,
    )

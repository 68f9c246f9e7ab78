"""Which tokens of a step belong to prompts that somebody wants the logprobs of.

vLLM runs the head over every token of a step in which any request wants them. Here that would be
the canvases and the emitted blocks of everybody else, too.
"""

from dataclasses import replace

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch


def asking_requests(
    uses_prompt_logprobs: np.ndarray, input_batch: InputBatch, prompt_lens: np.ndarray
) -> np.ndarray:
    """The batch rows that hold prompt tokens of a request that wants them scored.

    uses_prompt_logprobs: ``[slots]`` bool; prompt_lens: ``[slots]``.
    """
    slots = input_batch.idx_mapping_np[: input_batch.num_reqs]
    holds_prompt = input_batch.num_computed_prefill_tokens_np < prompt_lens[slots]
    return np.flatnonzero(uses_prompt_logprobs[slots] & holds_prompt)


def batch_of_requests(
    input_batch: InputBatch, requests: np.ndarray
) -> tuple[torch.Tensor, InputBatch]:
    """The flat token indices of some requests, and a batch of these requests alone.

    The batch is complete in what vLLM's `PromptLogprobsWorker` reads of it.
    """
    device = input_batch.idx_mapping.device
    lens = input_batch.num_scheduled_tokens[requests]
    ends = np.cumsum(lens)
    shift = input_batch.query_start_loc_np[requests] - (ends - lens)
    tokens = np.arange(lens.sum()) + np.repeat(shift, lens)
    starts = np.concatenate(([0], ends)).astype(np.int32)
    part = replace(
        input_batch,
        req_ids=[input_batch.req_ids[row] for row in requests],
        num_reqs=len(requests),
        num_tokens=len(tokens),
        idx_mapping=input_batch.idx_mapping[torch.from_numpy(requests).to(device)],
        idx_mapping_np=input_batch.idx_mapping_np[requests],
        num_scheduled_tokens=lens,
        query_start_loc=torch.from_numpy(starts).to(device),
        query_start_loc_np=starts,
        num_computed_prefill_tokens_np=input_batch.num_computed_prefill_tokens_np[requests],
        prefill_len_np=input_batch.prefill_len_np[requests],
    )
    return torch.from_numpy(tokens).to(device), part

"""Finds the tokens of a step that belong to prompts whose logprobs a request asks for.

If one request asks for prompt logprobs, vLLM computes logits for all tokens of the step. Here that
would include the canvases and emitted blocks of all other requests.
"""

from dataclasses import replace

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.engine.spans import Spans
from dllm.ops.staging import to_device


def asking_requests(
    uses_prompt_logprobs: np.ndarray, input_batch: InputBatch, prompt_lens: np.ndarray
) -> np.ndarray:
    """The batch rows that hold prompt tokens of a request that asks for prompt logprobs.

    Args:
        uses_prompt_logprobs: ``[slots]`` bool, whether the slot's request asks.
        prompt_lens: ``[slots]``.

    Returns:
        Indices of batch rows, in order.
    """
    slots = input_batch.idx_mapping_np[: input_batch.num_reqs]
    holds_prompt = input_batch.num_computed_prefill_tokens_np < prompt_lens[slots]
    return np.flatnonzero(uses_prompt_logprobs[slots] & holds_prompt)


def batch_of_requests(
    input_batch: InputBatch, requests: np.ndarray
) -> tuple[torch.Tensor, InputBatch]:
    """The heads of some requests, as indices into the batch, and a batch of these heads alone.

    A canvas behind the last prompt token is left out. Only the fields that vLLM's
    `PromptLogprobsWorker` reads are those of the smaller batch.

    Args:
        requests: indices of batch rows, in order.
    """
    device = input_batch.idx_mapping.device
    spans = Spans.of_schedule(
        input_batch.num_scheduled_tokens, input_batch.num_draft_tokens_per_req
    )
    lens = spans.head_lens[requests]
    ends = np.cumsum(lens)
    shift = input_batch.query_start_loc_np[requests] - (ends - lens)
    tokens = np.arange(lens.sum()) + np.repeat(shift, lens)
    starts = np.concatenate(([0], ends)).astype(np.int32)
    part = replace(
        input_batch,
        req_ids=[input_batch.req_ids[row] for row in requests],
        num_reqs=len(requests),
        num_tokens=len(tokens),
        idx_mapping=input_batch.idx_mapping[to_device(requests, device)],
        idx_mapping_np=input_batch.idx_mapping_np[requests],
        num_scheduled_tokens=lens,
        query_start_loc=to_device(starts, device),
        query_start_loc_np=starts,
        num_computed_prefill_tokens_np=input_batch.num_computed_prefill_tokens_np[requests],
        prefill_len_np=input_batch.prefill_len_np[requests],
    )
    return to_device(tokens, device), part

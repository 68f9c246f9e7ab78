"""Per-slot state of the canvases: preallocated device tensors, one reset.

A slot is a stable index into these tensors for as long as a request runs. The canvas itself (the
noisy input of the next denoise step) lives in vLLM's ``RequestState.draft_tokens``, from where the
model runner puts it into the next batch; everything else about it lives here.

| tensor         | shape            | written by              | read by                        |
|----------------|------------------|-------------------------|--------------------------------|
| seeds, options | [slots]          | reset                   | sampler                        |
| argmax_canvas  | [slots, C] int64 | sampler, each step      | sampler: stability, emission   |
| stable_count   | [slots] int32    | sampler, each step      | sampler: stop rule             |
| steps_done     | [slots] int32    | sampler, each step      | sampler; prepare_inputs        |
| soft_embeds    | [slots, C, H]    | sampler, each step      | prepare_inputs, if steps_done  |
"""

import hashlib

import torch

from dllm.options import RequestOptions


class CanvasState:
    """State of up to ``num_slots`` canvases of ``canvas_length`` tokens."""

    def __init__(
        self,
        num_slots: int,
        canvas_length: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # One slot more than requests: it keeps a lone row company (sampler.CanvasRows).
        self.spare_slot = num_slots

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_slots + 1, *shape, dtype=dtype, device=device)

        self.argmax_canvas = zeros(canvas_length, dtype=torch.int64)
        self.stable_count = zeros(dtype=torch.int32)
        self.steps_done = zeros(dtype=torch.int32)
        self.soft_embeds = zeros(canvas_length, hidden_size, dtype=dtype)

        self.seeds = zeros(dtype=torch.int64)
        self.max_steps = zeros(dtype=torch.int32)
        # The reference subtracts in float64; its temperatures are matched to the last bit.
        self.t_min = zeros(dtype=torch.float64)
        self.t_max = zeros(dtype=torch.float64)
        self.entropy_bound = zeros(dtype=torch.float32)
        self.confidence = zeros(dtype=torch.float32)
        self.is_greedy = zeros(dtype=torch.bool)

    def reset(self, slot: int, options: RequestOptions, seed: int) -> None:
        """Prepare ``slot`` for a new (or resumed) request; whatever was there is forgotten.

        A soft embedding is only read once ``steps_done`` is above zero, so it need not be cleared.
        """
        self.steps_done[slot] = 0
        self.stable_count[slot] = 0
        self.seeds[slot] = seed
        self.max_steps[slot] = options.max_steps
        self.t_min[slot] = options.t_min
        self.t_max[slot] = options.t_max
        self.entropy_bound[slot] = options.entropy_bound
        self.confidence[slot] = options.confidence
        self.is_greedy[slot] = options.is_greedy


def request_seed(options: RequestOptions, request_id: str, server_seed: int) -> int:
    """The 64-bit seed of a request's noise.

    The request's own, else one derived from its (random) id: every tensor-parallel rank finds the
    same one, and so does the worker when a preempted request comes back.
    """
    if options.seed is not None:
        return options.seed
    digest = hashlib.blake2b(f"{server_seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)

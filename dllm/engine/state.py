"""Per-slot state of the canvases: preallocated device tensors, one reset.

A slot is a stable index into these tensors for as long as a request runs. The canvas itself (the
noisy input of the next denoise step) lives in vLLM's ``RequestState.draft_tokens``, from where the
model runner puts it into the next batch; everything else about it lives here.

| tensor         | shape            | written by              | read by                        |
|----------------|------------------|-------------------------|--------------------------------|
| seeds, options | [slots]          | reset                   | sampler                        |
| is_stop        | [slots, V] bool  | reset                   | sampler: stop rule             |
| seed_canvas    | [slots, C] int64 | reset                   | sampler: the first canvas      |
| is_pinned      | [slots, C] bool  | reset                   | sampler: the first canvas      |
| argmax_canvas  | [slots, C] int64 | sampler, each step      | sampler: stability, emission   |
| stable_count   | [slots, C] int32 | sampler, each step      | sampler: stop rule             |
| steps_done     | [slots] int32    | sampler, each step      | sampler; prepare_inputs        |
| soft_embeds    | [slots, C, H]    | sampler, each step      | prepare_inputs, if steps_done  |
"""

import hashlib

import torch

from dllm.models.gemma.rule import DenoiseRules
from dllm.settings.request import RequestOptions


class CanvasState:
    """State of up to ``num_slots`` canvases of ``canvas_length`` tokens."""

    def __init__(
        self,
        num_slots: int,
        canvas_length: int,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # One slot more than requests: it keeps a lone row company (CanvasRows).
        self.spare_slot = num_slots

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_slots + 1, *shape, dtype=dtype, device=device)

        self.argmax_canvas = zeros(canvas_length, dtype=torch.int64)
        self.stable_count = zeros(canvas_length, dtype=torch.int32)
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
        self.is_read_only = zeros(dtype=torch.bool)
        self.is_stop = zeros(vocab_size, dtype=torch.bool)

        self.seed_canvas = zeros(canvas_length, dtype=torch.int64)
        self.is_pinned = zeros(canvas_length, dtype=torch.bool)
        # Where the canvas that the request brings starts, -1 if it brings none.
        self.seeded_at = zeros(dtype=torch.int64).fill_(-1)

    def reset(self, slot: int, options: RequestOptions, seed: int, prompt_len: int) -> None:
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
        self.is_read_only[slot] = options.is_read_only
        self.is_stop[slot] = False
        self.is_stop[slot, sorted(options.stops)] = True
        self.seeded_at[slot] = prompt_len if options.seed_canvas else -1
        if options.seed_canvas:
            ids = torch.tensor(options.seed_canvas)
            self.seed_canvas[slot, : len(ids)] = ids.to(self.seed_canvas.device)
            self.is_pinned[slot] = False
            self.is_pinned[slot, list(options.pinned)] = True

    def rules(self, slots: torch.Tensor, stability_window: int) -> DenoiseRules:
        """How the canvases of ``slots`` are denoised, one number per row."""
        return DenoiseRules(
            t_min=self.t_min[slots],
            t_max=self.t_max[slots],
            max_steps=self.max_steps[slots],
            entropy_bound=self.entropy_bound[slots],
            confidence=self.confidence[slots],
            stability_window=stability_window,
        )

    def with_seeds(
        self, slots: torch.Tensor, starts: torch.Tensor, drawn: torch.Tensor
    ) -> torch.Tensor:
        """What the canvases of ``slots`` that start at ``starts`` begin as: ``[R, C]`` int64.

        ``drawn`` (random tokens, ``[R, C]``), unless it is the one that the request brought.
        """
        is_seeded = starts == self.seeded_at[slots]
        return torch.where(is_seeded[:, None], self.seed_canvas[slots], drawn)

    def pins(self, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """The positions whose input stays what the request brought: ``[R, C]`` bool."""
        return self.is_pinned[slots] & (starts == self.seeded_at[slots])[:, None]


def request_seed(options: RequestOptions, request_id: str, server_seed: int) -> int:
    """The 64-bit seed of a request's noise.

    The request's own, else one derived from its (random) id: every tensor-parallel rank finds the
    same one, and so does the worker when a preempted request comes back.
    """
    if options.seed is not None:
        return options.seed
    digest = hashlib.blake2b(f"{server_seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)

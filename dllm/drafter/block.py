"""The draft block of vLLM's DFlash speculator, whose length a policy may decide row by row.

The pass is over [last token, MASK x N] for every row. A row's block is shortened to w drafts by
hiding the keys behind them from everybody (``seq_lens``): its first w drafts are then those of a
pass over [last token, MASK x w]. The others mean nothing. The pass itself becomes no cheaper.
"""

import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from dllm.drafter.sources import SteeredBlocks
from dllm.drafter.steering import DraftPass
from dllm.drafter.step import TargetStep

Logits = Callable[[torch.Tensor], torch.Tensor]


class DraftBlock(SteeredBlocks):
    """Blocks as long as a policy that ``narrows`` says."""

    _block_widths: np.ndarray | None = None  # [rows] of the pass that runs; None: N drafts each

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        self._target_logits = cast(Logits, target_model.compute_logits)
        self.policy.load(self.device)

    def _observe(self, step: TargetStep) -> None:
        super()._observe(step)
        if self.policy.reads_prompts and len(ended := step.ended_prompts):
            start = time.perf_counter()
            logits = self._target_logits(step.hidden_behind(ended))
            self.policy.read_prompts(step.batch.idx_mapping_np[ended], logits)
            self._counts.add("pilot_choices", len(ended))
            self._counts.add("pilot_seconds", time.perf_counter() - start)

    def _draft(self, step: TargetStep, draft: DraftPass) -> torch.Tensor:
        if self.policy.narrows:
            self._block_widths = self._choose_widths(step.batch)
        try:
            return super()._draft(step, draft)
        finally:
            self._block_widths = None

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Called when the KV cache exists."""
        super().set_attn(*args, **kwargs)
        if self.policy.narrows:
            # Metadata is built outside of CUDA graphs: lengths are changed there.
            self.supports_decode_metadata_update = False

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Before vLLM builds the metadata, let rows end behind the last draft that is asked for."""
        if self._block_widths is not None:
            num_reqs, size = kwargs["num_reqs"], self.num_query_per_req
            firsts = self.input_buffers.positions[: num_reqs * size : size]
            ends = firsts + 1 + torch.from_numpy(self._block_widths).to(firsts.device)
            self.input_buffers.seq_lens[:num_reqs] = ends.clamp(max=self.max_model_len)
        return super()._build_uniform_attn_metadata(*args, **kwargs)

"""One step of the target as the drafter receives it: its tokens, and which of them were kept."""

from typing import NamedTuple

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch


class TargetStep(NamedTuple):
    """What vLLM gives to a speculator. Views of its buffers: valid until the next step begins.

    Attributes:
        batch: the rows (one for each request) and their tokens.
        last_hidden_states: ``[tokens or more, hidden]``, output of the target's last layer.
        aux_hidden_states: the output of each layer that the drafter reads, of the same shape.
        num_sampled, num_rejected: ``[rows]``, tokens emitted, and drafts that were rejected.
        last_sampled: ``[slots, 1]``, the last token of each request.
    """

    batch: InputBatch
    last_hidden_states: torch.Tensor
    aux_hidden_states: list[torch.Tensor] | None
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor

    def features(self) -> torch.Tensor:
        """The hidden states that the drafter reads, side by side: ``[tokens, layers * hidden]``."""
        assert self.aux_hidden_states, "the drafter reads layers of the target"
        num_tokens = self.batch.num_tokens
        return torch.cat([hidden[:num_tokens] for hidden in self.aux_hidden_states], dim=-1)

    def is_rejected(self) -> torch.Tensor:
        """``[tokens]`` bool: the drafts that the target rejected, always the last ones of a row."""
        ends = torch.from_numpy(self.batch.query_start_loc_np[1 : self.batch.num_reqs + 1])
        lengths = torch.from_numpy(self.batch.num_scheduled_tokens)
        kept_ends = (ends - self.num_rejected.cpu()).repeat_interleave(lengths)
        rejected: torch.Tensor = torch.arange(self.batch.num_tokens) >= kept_ends
        return rejected.to(self.num_rejected.device)

"""One step of the target as a drafter finds it: its tokens, and what came of them."""

from typing import NamedTuple

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch


class TargetStep(NamedTuple):
    """What vLLM hands to a speculator; valid until the next step begins.

    Attributes:
        batch: rows and tokens.
        last_hidden_states: ``[tokens or more, hidden]``, behind the target's last layer.
        aux_hidden_states: behind each layer that the drafter reads, the same shape.
        num_sampled, num_rejected: ``[rows]``, tokens emitted, and drafts that were not kept.
        last_sampled: ``[slots, 1]``, the last token of each request.
    """

    batch: InputBatch
    last_hidden_states: torch.Tensor
    aux_hidden_states: list[torch.Tensor] | None
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor

    def features(self) -> torch.Tensor:
        """``[tokens, layers * hidden]``: what the drafter reads of each token."""
        assert self.aux_hidden_states, "the drafter reads layers of the target"
        num_tokens = self.batch.num_tokens
        return torch.cat([hidden[:num_tokens] for hidden in self.aux_hidden_states], dim=-1)

    def is_rejected(self) -> torch.Tensor:
        """``[tokens]`` bool: the drafts that the target did not keep, the last ones of each row."""
        ends = torch.from_numpy(self.batch.query_start_loc_np[1 : self.batch.num_reqs + 1])
        lengths = torch.from_numpy(self.batch.num_scheduled_tokens)
        kept_ends = (ends - self.num_rejected.cpu()).repeat_interleave(lengths)
        rejected: torch.Tensor = torch.arange(self.batch.num_tokens) >= kept_ends
        return rejected.to(self.num_rejected.device)

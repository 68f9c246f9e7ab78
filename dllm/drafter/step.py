"""One step of the target as the drafter receives it: its tokens, and which of them were kept."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch


@dataclass(frozen=True, eq=False)
class TargetStep:
    """What vLLM gives to a speculator. Views of its buffers: valid until the next step begins.

    The properties are on the host, and those that wait for the device do so once.
    """

    batch: InputBatch
    aux_hidden_states: list[torch.Tensor] | None  # [tokens or more, hidden], of layers to be read
    num_sampled: torch.Tensor  # [rows], tokens emitted
    num_rejected: torch.Tensor  # [rows], drafts
    last_sampled: torch.Tensor  # [slots, 1], the last token of each request
    last_hidden_states: torch.Tensor | None = None  # [tokens or more, hidden], normalized

    @property
    def in_prompt(self) -> np.ndarray:
        """``[rows]`` bool: the row computed prompt tokens."""
        return np.asarray(self.batch.is_prefilling_np)

    @cached_property
    def verified(self) -> np.ndarray:
        """``[rows]``: drafts that the target verified."""
        drafts = self.batch.num_draft_tokens_per_req
        none = np.zeros(self.batch.num_reqs, dtype=np.int64)
        return none if drafts is None else np.where(self.in_prompt, 0, drafts)

    @cached_property
    def samples(self) -> np.ndarray:
        """``[rows]`` bool: the row emitted tokens. Waits for the device."""
        sampled: np.ndarray = self.num_sampled.cpu().numpy() > 0
        return sampled

    @property
    def ended_prompts(self) -> np.ndarray:
        """Rows whose prompt ended in this step. Waits for the device if there are prompts."""
        none = np.zeros(0, dtype=np.int64)
        return np.flatnonzero(self.in_prompt & self.samples) if self.in_prompt.any() else none

    def hidden_behind(self, rows: np.ndarray) -> torch.Tensor:
        """``[rows, hidden]``: the output of the last layer at the last tokens of these rows."""
        assert self.last_hidden_states is not None
        places = torch.from_numpy(self.batch.query_start_loc_np[rows + 1] - 1)
        return self.last_hidden_states[places.to(self.last_hidden_states.device)]

    @cached_property
    def rejected(self) -> np.ndarray:
        """``[rows]``: drafts that were rejected, the last tokens of a row. Waits for the device."""
        rejected: np.ndarray = self.num_rejected.cpu().numpy()
        return rejected

    @cached_property
    def kept(self) -> np.ndarray:
        """``[rows]``: tokens of each row without the rejected ones. Waits for the device."""
        kept: np.ndarray = self.batch.num_scheduled_tokens - self.rejected
        return kept

    @cached_property
    def starts(self) -> np.ndarray:
        """``[rows]``: position of each row's first token. Waits for the device."""
        firsts = torch.from_numpy(self.batch.query_start_loc_np[: self.batch.num_reqs])
        positions = self.batch.positions
        starts: np.ndarray = positions[firsts.to(positions.device)].cpu().numpy()
        return starts

    @cached_property
    def tokens(self) -> np.ndarray:
        """``[tokens]``: token ids of all rows, one row after the other. Waits for the device."""
        tokens: np.ndarray = self.batch.input_ids[: self.batch.num_tokens].cpu().numpy()
        return tokens

    @cached_property
    def followers(self) -> np.ndarray:
        """``[rows]``: the token behind the kept ones; -1 in a prompt. Waits for the device."""
        last = self.last_sampled.view(-1)[self.batch.idx_mapping].cpu().numpy()
        return np.where(self.samples, last, -1)

    @property
    def token_bytes(self) -> int:
        return sum(hidden[:1].nbytes for hidden in self._hidden_states)

    def features(self, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """``[tokens, layers * hidden]``, side by side, of the chosen tokens (None: all)."""
        layers = self._hidden_states
        if chosen is None:
            return torch.cat([hidden[: self.batch.num_tokens] for hidden in layers], dim=-1)
        rows = chosen.to(layers[0].device)
        return torch.cat([hidden[rows] for hidden in layers], dim=-1)

    @property
    def _hidden_states(self) -> list[torch.Tensor]:
        assert self.aux_hidden_states, "the drafter reads layers of the target"
        return self.aux_hidden_states

    def is_rejected(self) -> torch.Tensor:
        """``[tokens]`` bool, on the device, without a wait: the drafts that were rejected."""
        starts = self.batch.query_start_loc[: self.batch.num_reqs + 1]
        kept_ends = starts[1:] - self.num_rejected
        num_tokens = self.batch.num_tokens
        ends = kept_ends.repeat_interleave(starts.diff(), output_size=num_tokens)
        return torch.arange(num_tokens, device=ends.device) >= ends

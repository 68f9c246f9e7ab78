"""What a request does to its logits before anything is drawn from them; vLLM's own states do it.

`logit_bias`, `allowed_token_ids`, `min_tokens`, the three penalties and `bad_words` are vLLM's
processors (Model Runner V2), launched on canvas rows. They were written for speculative decoding,
where row p of a request is conditioned on its drafts 1..p. On a canvas the "drafts" in front of
position p are the tokens that the previous denoise step would have emitted there:

    row p of a canvas sees    prompt, committed tokens, argmax_canvas[0..p - 1] of the step before

so that penalties count, and bad words are completed, from left to right as in an autoregressive
model; positions behind p do not count. At a fixed point of the canvas (two equal argmax canvases)
every row was edited for exactly the tokens in front of it. Before that, a prefix that has settled
is exact, and each step settles at least one position more, if the logits do not move (this is
Jacobi decoding). What depends on the position alone is exact at once.

A step that ends without a fixed point (out of steps, or a `stability_threshold` of 0) may hold a
bad word in its argmax canvas. `completes_bad_word` finds them, and only what is in front of the
first is emitted. That is one token at least: in front of position 0 are committed tokens alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.state import CanvasState

NO_TOKEN = -1  # equals no id: nothing was decided there


class LogitEdits:
    """The edits of every slot.

    Args:
        logit_bias, penalties, bad_words: vLLM's states, in the order in which vLLM applies them
            (biases add and penalties scale, so it matters).
        num_slots: of the states.
    """

    def __init__(
        self,
        logit_bias: LogitsProcessor,
        penalties: LogitsProcessor,
        bad_words: LogitsProcessor,
        num_slots: int,
    ) -> None:
        self._processors: Sequence[LogitsProcessor] = (logit_bias, penalties, bad_words)
        self._bad_words = bad_words
        self._is_edited = np.zeros(num_slots, dtype=bool)
        self._has_bad_words = np.zeros(num_slots, dtype=bool)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Note what a new (or resumed) request asks for; the slot's last one is forgotten."""
        asked = [processor.add_request(slot, params) for processor in self._processors]
        self._is_edited[slot] = any(asked)
        self._has_bad_words[slot] = asked[-1]

    def apply_staged_writes(self) -> None:
        """Send what ``add_request`` noted to the device."""
        for processor in self._processors:
            processor.apply_staged_writes()

    def context(
        self, rows: CanvasRows, state: CanvasState, input_batch: InputBatch
    ) -> LogitsContext | None:
        """This step as vLLM's processors see it, None if no request of the batch edits anything.

        They read the draft in front of row i > 0 as the input id of row i, and take a row's
        position for that of its input, one in front of the token that is decided.
        """
        if not self._is_edited[_slots_np(input_batch)].any():
            return None
        slots = rows.slots[rows.row_of]
        in_front = state.argmax_canvas[slots, (rows.place - 1).clamp(min=0)]
        in_front = torch.where(state.steps_done[slots] > 0, in_front, NO_TOKEN)
        return LogitsContext(
            expanded_idx_mapping=input_batch.expanded_idx_mapping,
            idx_mapping=input_batch.idx_mapping,
            idx_mapping_np=_slots_np(input_batch),
            expanded_local_pos=input_batch.expanded_local_pos,
            input_ids=in_front.to(torch.int32),
            pos=input_batch.positions[input_batch.logits_indices] - 1,
            seq_lens_upper_bound_np=input_batch.seq_lens_cpu_upper_bound.numpy(),
        )

    def apply(self, logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
        """Edit the logits of the rows of ``context`` in place: ``[N, vocab]`` fp32."""
        for processor in self._processors:
            logits = processor.apply(logits, context)
        return logits

    def may_forbid_words(self, input_batch: InputBatch) -> bool:
        """Whether ``completes_bad_word`` has to be asked (host arithmetic)."""
        return bool(self._has_bad_words[_slots_np(input_batch)].any())

    def completes_bad_word(
        self, logits: torch.Tensor, argmax: torch.Tensor, context: LogitsContext
    ) -> torch.Tensor:
        """Which argmax tokens complete a bad word, if all in front of them are emitted: [N] bool.

        The words are masked once more in ``logits``, now behind the tokens of this step: a token
        that is masked by that completes one.

        Args:
            logits: ``[N, vocab]`` that the argmax was taken from, edited; changed in place.
            argmax: ``[N]`` int64.
        """
        in_front = argmax.roll(1).to(torch.int32)  # not read at position 0
        self._bad_words.apply(logits, replace(context, input_ids=in_front))
        return logits.gather(1, argmax[:, None]).squeeze(1) == -torch.inf


def clean_lengths(rows: CanvasRows, is_bad: torch.Tensor) -> torch.Tensor:
    """How many tokens of each canvas come before its first bad one: ``[R]`` int64.

    is_bad: ``[N]`` bool. From 1 to the width, 0 where there is no canvas: a position 0 that is bad
    has no token left, which admission rules out, and must not stop the request.
    """
    first_bad = torch.where(is_bad, rows.place, rows.widths[rows.row_of])
    clean = rows.widths.scatter_reduce(0, rows.row_of, first_bad, "amin")
    return torch.maximum(clean, (rows.widths > 0).long())


def _slots_np(input_batch: InputBatch) -> np.ndarray:
    return input_batch.idx_mapping_np[: input_batch.num_reqs]

"""Edits the logits of canvases as requests ask, with vLLM's own logits processors.

An edit changes logits before anything is sampled from them: `logit_bias`, `allowed_token_ids`,
`min_tokens`, the three penalties and `bad_words`. vLLM's processors (Model Runner V2) were written
for speculative decoding. There, the logits of a request's row p depend on the draft tokens in front
of row p. Here the "draft tokens" in front of canvas position p are the most likely tokens of the
previous denoise step:

    position p is edited for    prompt, emitted tokens, argmax_canvas[0..p - 1] of the step before

So penalties count, and bad words are recognized, from left to right, as in an autoregressive model.
Positions behind p do not count.

An edit that depends on the position alone is exact in every step. The others are exact once the
argmax canvas equals that of the step before. Until then, a prefix that does not change any more is
exact, and grows by at least one position in each step if the model's logits stay the same (this is
Jacobi decoding).

A canvas may have to be emitted while it still changes: it ran out of steps, or the checkpoint has a
`stability_threshold` of 0. It may then hold a bad word: `trim_` ends it in front of the last token
of that. At least one token is left, because position 0 was edited for emitted tokens only.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor

from dllm import LOGGER
from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.state import CanvasState
from dllm.ops.staging import to_device
from dllm.settings.denoising import NO_TOKEN

logger = init_logger(LOGGER)


class PreparedEdits(NamedTuple):
    """What denoise steps need to know about a batch whose logits are edited."""

    # A step as vLLM's processors expect it, but ``input_ids``, which each step has.
    context: LogitsContext
    forbids_words: torch.Tensor | None  # [N] bool, rows in which a bad word may end


class LogitEdits:
    """The edits of the requests in all slots; ``is_edited``: ``[slots]`` bool, for the host.

    Processors of other packages (entry points ``vllm.logits_processors``) are left out, and logged:
    what they forbid could be emitted before the tokens in front of it have settled. vLLM's stay in
    its order: a bias is added, and a penalty multiplies.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], num_slots: int) -> None:
        self._processors = [one for one in processors if type(one).__module__.startswith("vllm.")]
        _, _, self._bad_words = self._processors  # biases and penalties come first
        for other in processors:
            if other not in self._processors:
                logger.warning_once(
                    "dllm: the logits processor %s is not applied: a canvas is not written one "
                    "token after the other",
                    f"{type(other).__module__}:{type(other).__qualname__}",
                    scope="local",
                )
        self.is_edited = np.zeros(num_slots, dtype=bool)
        self._has_bad_words = np.zeros(num_slots, dtype=bool)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        asked = [processor.add_request(slot, params) for processor in self._processors]
        self.is_edited[slot] = any(asked)
        self._has_bad_words[slot] = asked[-1]

    def apply_staged_writes(self) -> None:
        for processor in self._processors:
            processor.apply_staged_writes()

    def prepare(
        self,
        input_batch: InputBatch,
        rows: CanvasRows,
        state: CanvasState,
        is_pinned: torch.Tensor | None,
    ) -> PreparedEdits | None:
        """None if no request of the batch edits. Does not wait.

        To vLLM's processors the input id of row i > 0 is the draft token in front of the token that
        row i decides, and the position of a row is that of its input. ``is_pinned``: ``[N, 1]``
        bool; a held pin is emitted whatever it completes.
        """
        slots = input_batch.idx_mapping_np[: input_batch.num_reqs]
        if not self.is_edited[slots].any():
            return None
        context = LogitsContext(
            expanded_idx_mapping=input_batch.expanded_idx_mapping,
            idx_mapping=input_batch.idx_mapping,
            idx_mapping_np=slots,
            expanded_local_pos=input_batch.expanded_local_pos,
            input_ids=input_batch.expanded_local_pos,
            pos=input_batch.positions[input_batch.logits_indices] - 1,
            seq_lens_upper_bound_np=input_batch.seq_lens_cpu_upper_bound.numpy(),
        )
        has_words = self._has_bad_words[slots]
        if not has_words.any():
            return PreparedEdits(context, None)
        forbids_words = to_device(has_words, rows.request_of.device)[rows.request_of]
        if is_pinned is not None:
            is_held = is_pinned[:, 0] & state.holds_pins[rows.slots[rows.request_of]]
            forbids_words = forbids_words & ~is_held
        return PreparedEdits(context, forbids_words)

    def apply_(
        self,
        logits: torch.Tensor,
        rows: CanvasRows,
        state: CanvasState,
        prepared: PreparedEdits | None,
    ) -> torch.Tensor:
        """Edit ``logits`` ``[N, vocab]`` fp32 in place, for the tokens of the step before."""
        if prepared is None:
            return logits
        slots = rows.slots[rows.request_of]
        in_front = state.argmax_canvas[slots, (rows.place - 1).clamp(min=0)]
        in_front = torch.where(state.steps_done[slots] > 0, in_front, NO_TOKEN)
        context = replace(prepared.context, input_ids=in_front.to(torch.int32))
        for processor in self._processors:
            logits = processor.apply(logits, context)
        return logits

    def trim_(
        self,
        logits: torch.Tensor,
        num_emitted: torch.Tensor,
        argmax_canvas: torch.Tensor,
        rows: CanvasRows,
        prepared: PreparedEdits | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Shorten what is emitted (``num_emitted`` ``[R]`` int64 of ``[R, C]``), so that it ends in
        front of the first bad word.

        Bad words are masked once more in ``logits`` ``[N, vocab]``, in place, for the tokens of
        this step. A token at -inf after that ends one, or is a pin that an edit excludes.
        """
        if prepared is None or prepared.forbids_words is None:
            return logits, num_emitted
        tokens = argmax_canvas[rows.request_of, rows.place]  # [N]
        # [N], the token in front of each row. Wrong at position 0, where it is not read.
        in_front = tokens.roll(1).to(torch.int32)
        logits = self._bad_words.apply(logits, replace(prepared.context, input_ids=in_front))
        is_out = logits.gather(1, tokens[:, None]).squeeze(1) == -torch.inf
        clean = clean_lengths(rows, prepared.forbids_words & is_out)
        return logits, torch.minimum(num_emitted, clean)


def clean_lengths(rows: CanvasRows, is_bad: torch.Tensor) -> torch.Tensor:
    """``[R]`` int64, how many tokens of each canvas come before its first bad one (``[N]`` bool).

    At least 1 for a row with a canvas, also where position 0 is a pin that is bad: the request must
    go on.
    """
    first_bad = torch.where(is_bad, rows.place, rows.widths[rows.request_of])
    clean = rows.widths.scatter_reduce(0, rows.request_of, first_bad, "amin")
    return torch.maximum(clean, (rows.widths > 0).long())

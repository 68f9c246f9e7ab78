"""Edits the logits of canvases as requests ask, with vLLM's own logits processors.

An edit changes logits before anything is sampled from them: `logit_bias`, `allowed_token_ids`,
`min_tokens`, the three penalties and `bad_words`. vLLM's processors (Model Runner V2) were written
for speculative decoding. There, the logits of a request's row p depend on the draft tokens in front
of row p. Here the "draft tokens" in front of canvas position p are the most likely tokens of the
previous denoise step:

    position p is edited for    prompt, emitted tokens, argmax_canvas[0..p - 1] of the step before

So penalties count, and bad words are recognized, from left to right, as in an autoregressive model.
Positions behind p do not count.

When is the result exact? An edit that depends on the position alone is exact in every step. The
others are exact once the argmax canvas equals that of the step before: then every position was
edited for exactly the tokens in front of it. Until then, a prefix that does not change any more is
exact, and grows by at least one position in each step if the model's logits stay the same (this is
Jacobi decoding).

A canvas may have to be emitted while it still changes: it ran out of steps, or the checkpoint has a
`stability_threshold` of 0. Its argmax canvas may then hold a bad word. `completes_bad_word` finds
it, and only the tokens in front of the bad word's last token are emitted. At least one token is
left, because position 0 was edited for emitted tokens only, which do not change.
"""

from collections.abc import Sequence
from dataclasses import replace

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


class LogitEdits:
    """The edits of the requests in all slots.

    Processors of other packages (entry points ``vllm.logits_processors``) are left out, and a line
    in the log says so: a canvas may be emitted before the tokens in front of each position have
    settled, so that what a processor forbids could be emitted.

    Args:
        processors: of vLLM's sampler, in the order in which vLLM applies them. The order matters:
            a bias is added, and a penalty multiplies.
        num_slots: how many requests the processors have room for.

    Attributes:
        is_edited: ``[slots]`` bool, for the host.
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
        """Store what a new (or resumed) request asks for, in place of the slot's last request."""
        asked = [processor.add_request(slot, params) for processor in self._processors]
        self.is_edited[slot] = any(asked)
        self._has_bad_words[slot] = asked[-1]

    def apply_staged_writes(self) -> None:
        """Send what ``add_request`` stored to the device."""
        for processor in self._processors:
            processor.apply_staged_writes()

    def context(
        self, rows: CanvasRows, state: CanvasState, input_batch: InputBatch
    ) -> LogitsContext:
        """This step as vLLM's processors expect it.

        They expect two things. The input id of row i > 0 is the draft token in front of the token
        that row i decides. The position of a row is that of its input, which is one less than the
        position of the token that it decides.
        """
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

    def forbids_words(self, input_batch: InputBatch, rows: CanvasRows) -> torch.Tensor | None:
        """Which logits rows are of requests with bad words, ``[N]`` bool; None: there are none.

        Does not wait for the device.
        """
        has_words = self._has_bad_words[_slots_np(input_batch)]
        if not has_words.any():
            return None
        return to_device(has_words, rows.row_of.device)[rows.row_of]

    def completes_bad_word(
        self,
        logits: torch.Tensor,
        argmax: torch.Tensor,
        context: LogitsContext,
        forbids_words: torch.Tensor,
    ) -> torch.Tensor:
        """Which argmax tokens would complete a bad word if the canvas were emitted: ``[N]`` bool.

        ``logits`` were edited for the tokens of the step before. Here bad words are masked once
        more, for the tokens of this step. An argmax token whose logit is -inf after that is the
        last token of a bad word. (A pin may be a token that another edit excludes.)

        Args:
            logits: ``[N, vocab]`` fp32, the edited logits of this step; changed in place.
            argmax: ``[N]`` int64, the most likely token of each row.
            context: what ``context`` returned for this step.
            forbids_words: ``[N]`` bool, where a bad word may end.
        """
        # [N], the token in front of each row. Wrong at position 0, where it is not read.
        in_front = argmax.roll(1).to(torch.int32)
        self._bad_words.apply(logits, replace(context, input_ids=in_front))
        return forbids_words & (logits.gather(1, argmax[:, None]).squeeze(1) == -torch.inf)


def clean_lengths(rows: CanvasRows, is_bad: torch.Tensor) -> torch.Tensor:
    """How many tokens of each canvas come before its first bad one: ``[R]`` int64.

    The result is at least 1 for a row with a canvas, and 0 for a row without. Position 0 can be bad
    only if it is a hint, or if the request forbids every token, which is refused when a request
    arrives (``settings.admission``). Then the token is emitted: the request must go on.

    is_bad: ``[N]`` bool.
    """
    first_bad = torch.where(is_bad, rows.place, rows.widths[rows.row_of])
    clean = rows.widths.scatter_reduce(0, rows.row_of, first_bad, "amin")
    return torch.maximum(clean, (rows.widths > 0).long())


def _slots_np(input_batch: InputBatch) -> np.ndarray:
    return input_batch.idx_mapping_np[: input_batch.num_reqs]

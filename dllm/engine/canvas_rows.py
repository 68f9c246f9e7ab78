"""CanvasRows: which canvas each row of logits belongs to, and where in the canvas it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from dllm.ops.staging import to_device

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class CanvasRows(NamedTuple):
    """Where the canvases of a step are: R requests, N rows of logits, C the served canvas length.

    A request has one row of logits for each token of its canvas, or for its first tokens alone
    (``logit_rows.leave_out_rows``): the others take no part in the step. A request without a canvas
    has width 0 and no rows.
    """

    slots: torch.Tensor  # [R] int64, each request's index into tensors of state
    widths: torch.Tensor  # [R] int64, how many canvas tokens take part in the step
    starts: torch.Tensor  # [R] int64, position of the canvas's first token in its sequence
    seq_lens: torch.Tensor  # [R], the length of that sequence, all canvas tokens included
    request_of: torch.Tensor  # [N] int64, whose row it is
    place: torch.Tensor  # [N] int64, the position of a row in its canvas
    # [R, C] int64, the row of a canvas position. Beyond the width it is that of some other
    # one, and what is read there must not be used.
    padded: torch.Tensor

    @property
    def are_read(self) -> torch.Tensor:
        """``[N]`` bool. Nobody reads the logits of a deferred commit."""
        return (self.widths > 0)[self.request_of]

    @classmethod
    def of_batch(cls, input_batch: InputBatch, canvas_length: int, spare_slot: int) -> CanvasRows:
        """Of a batch of vLLM's. Does not wait for the device.

        A batch of one request gets one more, without a canvas, in a slot that no request has:
        ``torch.compile`` treats a size of 1 as a special case, and would compile a second graph.
        """
        num_reqs = input_batch.num_reqs
        num_more = max(2 - num_reqs, 0)
        starts = input_batch.cu_num_logits_np[: num_reqs + 1]
        starts = np.concatenate((starts, np.repeat(starts[-1:], num_more)))
        widths = np.diff(starts)
        slots = np.concatenate(
            (input_batch.idx_mapping_np[:num_reqs], np.full(num_more, spare_slot))
        )
        request_of = np.repeat(np.arange(num_reqs + num_more), widths)
        # [R, C]: positions beyond the width become the last position of the canvas.
        places = np.minimum(np.arange(canvas_length), np.maximum(widths - 1, 0)[:, None])
        last_row = max(int(starts[-1]) - 1, 0)  # the limit for a last row without a canvas
        device = input_batch.seq_lens.device

        def sent(array: np.ndarray) -> torch.Tensor:
            return to_device(array.astype(np.int64), device)

        # [R], all tokens of each canvas.
        lens = input_batch.num_draft_tokens_per_req
        lens = widths if lens is None else np.pad(lens[:num_reqs], (0, num_more))
        sent_widths = sent(widths)
        sent_lens = sent_widths if np.array_equal(lens, widths) else sent(lens)
        seq_lens = input_batch.seq_lens[:num_reqs]
        # A tensor of its own: torch.compile would compile again for a part of another one.
        seq_lens = F.pad(seq_lens, (0, num_more)) if num_more else seq_lens.clone()
        return cls(
            slots=sent(slots),
            widths=sent_widths,
            starts=seq_lens - sent_lens,
            seq_lens=seq_lens,
            request_of=sent(request_of),
            place=sent(np.arange(len(request_of)) - starts[request_of]),
            padded=sent(np.minimum(starts[:-1, None] + places, last_row)),
        )

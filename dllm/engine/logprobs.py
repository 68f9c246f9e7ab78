"""Logprobs of emitted blocks, computed with vLLM's own functions in the step that emits a block.

They are the log-probabilities of softmax(edited logits / temperature of the step), before top-k,
top-p and min-p. (These filters would put the tokens that they leave out at -inf and raise the
others.) For a read-only request (``diffusion_read_only``) the temperature is 1.

If a family decides tokens one after the other (``Denoised.decided``), the step is the one that
decided the token: in later steps the model sees it as an input.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dllm.engine.canvas_rows import CanvasRows
from dllm.ops.staging import to_device

# How many logits are copied and scaled at a time: 64 MiB of fp32. No result depends on it.
WORKSPACE_LOGITS = 2**24


class BlockLogprobs:
    """Computes the logprobs of emitted tokens, and of the top or the given token ids beside them.

    Args:
        sampler: vLLM's, which stores which request asked for which logprobs.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        # By slot: the logits [C, vocab] from which the canvas tokens of a request were decided.
        self._decided_from: dict[int, torch.Tensor] = {}
        self._reports_logits = sampler.logprobs_mode in ("raw_logits", "processed_logits")

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Store a new request's ``logprob_token_ids``.

        vLLM's SamplingStates stores how many top logprobs it asks for.
        """
        self._sampler.logprob_token_ids_state.add_request(slot, params)
        self._decided_from.pop(slot, None)

    def apply_staged_writes(self) -> None:
        """Send what ``add_request`` stored to the device."""
        self._sampler.logprob_token_ids_state.apply_staged_writes()

    def are_wanted(self, input_batch: InputBatch) -> bool:
        """Whether a request of the batch asks for logprobs. Does not wait for the device."""
        return self._dims(input_batch) is not None

    def when_decided(
        self, logits: torch.Tensor, decided: torch.Tensor, input_batch: InputBatch
    ) -> torch.Tensor:
        """The logits from which each canvas token was decided: ``[N, vocab]``, a copy.

        Of tokens that have not been decided they mean nothing.

        Args:
            logits: ``[N, vocab]`` of this step, edited.
            decided: ``[R, C]`` bool, from ``Denoised``.
        """
        starts, result = input_batch.cu_num_logits_np, logits.clone()
        for row, slot in enumerate(input_batch.idx_mapping_np[: input_batch.num_reqs].tolist()):
            width = int(starts[row + 1] - starts[row])
            if width == 0 or self._sampler.get_logprobs_dims(np.array([slot])) is None:
                continue
            mine = slice(int(starts[row]), int(starts[row + 1]))
            kept = self._decided_from.get(slot)
            if kept is None:
                kept = logits.new_zeros(decided.shape[1], logits.shape[1])
                self._decided_from[slot] = kept
            kept[:width] = torch.where(decided[row, :width, None], logits[mine], kept[:width])
            result[mine] = kept[:width]
        return result

    def of_blocks(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        argmax_canvas: torch.Tensor,
        num_emitted: torch.Tensor,
        rows: CanvasRows,
        input_batch: InputBatch,
    ) -> LogprobsTensors | None:
        """The logprobs of emitted tokens; None if nothing is emitted. Waits for the device.

        Logits that ``when_decided`` kept of a block are let go when the block is emitted.

        Args:
            logits: ``[N, vocab]``, edited.
            temperature: ``[N]``, of each row of logits.
            argmax_canvas: ``[R, C]`` int64, the tokens of each canvas.
            num_emitted: ``[R]``, how many tokens of each canvas are emitted, from its start.

        Returns:
            One row for each emitted token. Column 0 is the token itself, the others are the top or
            the given token ids. Its rank is 1 for the most likely token, and counts ties. With a
            ``--logprobs-mode`` of logits the values are logits / temperature.
        """
        dims = self._dims(input_batch)
        counts = num_emitted.cpu().numpy()  # the only wait
        if dims is None or not counts.any():
            return None
        for slot in input_batch.idx_mapping_np[: len(counts)][counts > 0].tolist():
            self._decided_from.pop(slot, None)
        starts = input_batch.cu_num_logits_np[: len(counts)]
        skipped = starts - np.cumsum(counts) + counts  # [R], rows in front that are not emitted
        emitted_np = np.arange(counts.sum()) + np.repeat(skipped, counts)
        emitted = to_device(emitted_np, logits.device)
        parts = [
            self._scores(
                logits[some],
                temperature[some],
                argmax_canvas[rows.row_of[some], rows.place[some]],
                input_batch.expanded_idx_mapping[some],
                dims,
            )
            for some in emitted.split(max(WORKSPACE_LOGITS // logits.shape[1], 1))
        ]
        return LogprobsTensors(
            torch.cat([part.logprob_token_ids for part in parts]),
            torch.cat([part.logprobs for part in parts]),
            torch.cat([part.selected_token_ranks for part in parts]),
            (np.cumsum(counts) - counts).tolist(),
        )

    def _scores(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        dims: tuple[int, int],
    ) -> LogprobsTensors:
        """The logprobs of the emitted ``tokens`` ``[n]``.

        logits: ``[n, vocab]``, changed in place. temperature, slots: ``[n]``. dims: from ``_dims``.
        """
        if not self._reports_logits:
            logits -= logits.amax(dim=1, keepdim=True)
        logits /= temperature[:, None]
        return compute_topk_scores(
            logits,
            dims[0],
            tokens,
            logprob_token_ids_state=self._sampler.logprob_token_ids_state,
            expanded_idx_mapping=slots,
            max_per_req_token_ids=dims[1],
            logits_mode=self._reports_logits,
        )

    @staticmethod
    def joined(
        parts: Sequence[LogprobsTensors | None], num_requests: Sequence[int]
    ) -> LogprobsTensors | None:
        """The logprobs of a batch, joined from those of its parts.

        A part with fewer columns than the widest is padded with columns that nobody reads.

        Args:
            parts: what ``of_blocks`` returned for each part.
            num_requests: how many requests each part holds.
        """
        known = [part for part in parts if part is not None]
        if not known:
            return None
        width = max(part.logprobs.shape[1] for part in known)
        starts: list[int] = []
        num_rows = 0
        for part, count in zip(parts, num_requests, strict=True):
            offsets = [0] * count if part is None else part.cu_num_generated_tokens
            assert offsets is not None and len(offsets) == count, (offsets, count)
            starts.extend(num_rows + offset for offset in offsets)
            num_rows += 0 if part is None else len(part.logprobs)
        return LogprobsTensors(
            torch.cat([_widened(part.logprob_token_ids, width) for part in known]),
            torch.cat([_widened(part.logprobs, width) for part in known]),
            torch.cat([part.selected_token_ranks for part in known]),
            starts,
        )

    def _dims(self, input_batch: InputBatch) -> tuple[int, int] | None:
        """How many top logprobs, and how many given token ids, a request asks for at most.

        None if no request of the batch asks for any.
        """
        return self._sampler.get_logprobs_dims(input_batch.idx_mapping_np[: input_batch.num_reqs])


def _widened(columns: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(columns, (0, width - columns.shape[1]))

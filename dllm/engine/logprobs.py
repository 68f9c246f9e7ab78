"""Logprobs of emitted blocks, taken in the step that emits them; vLLM's own functions report them.

A block is emitted in the very step in which it converged, so its logprobs are computed then and
never kept. They are those of the distribution that this step would sample from without its filters:
the logits, as the request edited them, over the temperature of the step. (top-k, top-p and min-p
would only renormalize what they leave, and put everything else at -inf.) A read-only request
(``diffusion_read_only``) gets temperature 1.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dllm.engine.canvas_rows import CanvasRows

# Logits that are copied and scaled at a time, 64 MiB of fp32. No result depends on it.
WORKSPACE_LOGITS = 2**24


class BlockLogprobs:
    """Top logprobs, or those of a request's own ``logprob_token_ids``, and the emitted token's.

    Args:
        sampler: vLLM's, which knows who asked for what.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._reports_logits = sampler.logprobs_mode in ("raw_logits", "processed_logits")

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Note which tokens a request asks about; the number of top ones is in SamplingStates."""
        self._sampler.logprob_token_ids_state.add_request(slot, params)

    def apply_staged_writes(self) -> None:
        """Send what ``add_request`` noted to the device."""
        self._sampler.logprob_token_ids_state.apply_staged_writes()

    def are_wanted(self, input_batch: InputBatch) -> bool:
        """Whether any request of the batch asks for them (host arithmetic)."""
        return self._dims(input_batch) is not None

    def of_blocks(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        argmax_canvas: torch.Tensor,
        num_emitted: torch.Tensor,
        rows: CanvasRows,
        input_batch: InputBatch,
    ) -> LogprobsTensors | None:
        """The logprobs of what is emitted, None if that is nothing. Waits for the device.

        Args:
            logits: ``[N, vocab]``.
            temperature: ``[N]``.
            argmax_canvas: ``[R, C]`` int64, of which the first ``num_emitted`` ``[R]`` leave.

        Returns:
            Column 0 is the emitted token, the others what was asked for. A rank is 1-based and
            counts ties. Or, with ``--logprobs-mode`` of logits: logits over temperature.
        """
        dims = self._dims(input_batch)
        emitted = (rows.place < num_emitted[rows.row_of]).nonzero().squeeze(1)
        if dims is None or len(emitted) == 0:
            return None
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
            (num_emitted.cumsum(0) - num_emitted).tolist(),
        )

    def _scores(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        dims: tuple[int, int],
    ) -> LogprobsTensors:
        """Of some emitted tokens, one to each row of ``logits``, which are changed in place."""
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
        """The logprobs of a batch from those of its parts, of so many requests each.

        A part whose requests ask for less than others gets columns that none of them reads.
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
        """(top logprobs, own ids) that the widest request of the batch asks for."""
        return self._sampler.get_logprobs_dims(input_batch.idx_mapping_np[: input_batch.num_reqs])


def _widened(columns: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(columns, (0, width - columns.shape[1]))

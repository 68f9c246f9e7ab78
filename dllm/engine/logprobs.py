"""Logprobs of emitted blocks, computed with vLLM's own functions.

They are the log-probabilities of softmax(edited logits / temperature of the step), before top-k,
top-p and min-p. (These filters would put the tokens that they leave out at -inf and raise the
others.) For a read-only request (``diffusion_read_only``) the temperature is 1.

The step is the one that emits the block. If an algorithm decides tokens one after the other
(``Denoised.decided``), it is the one that decided the token: in later steps the model sees it as an
input. Then the few scores that were asked for are kept until the block is emitted.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dllm.attention.ragged import spread, starts_of
from dllm.engine.algorithm import Denoised
from dllm.engine.steps import StepRecord, Tile
from dllm.ops.staging import to_device
from dllm.settings.request import LOGITS_MODES

# How many logits are copied and scaled at a time: 64 MiB of fp32. No result depends on it.
WORKSPACE_LOGITS = 2**24


class BlockLogprobs:
    """With ``is_async`` every pass scores whole canvases: the host does not know which are emitted.

    ``kept``: for an algorithm that decides tokens one after the other.
    """

    def __init__(self, sampler: Sampler, is_async: bool, kept: "KeptScores | None") -> None:
        self._sampler = sampler
        self._is_async = is_async
        self._kept = kept
        self._asks = np.zeros(sampler.sampling_states.max_num_reqs, dtype=bool)
        self._reports_logits = sampler.logprobs_mode in LOGITS_MODES

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """vLLM's SamplingStates stores how many top logprobs a request asks for."""
        self._sampler.logprob_token_ids_state.add_request(slot, params)
        self._asks[slot] = params.num_logprobs is not None
        if self._kept is not None:
            most = params.logprobs or 0
            most = self._sampler.sampling_states.vocab_size if most < 0 else most
            self._kept.make_room(max(most, len(params.logprob_token_ids or ())))

    def apply_staged_writes(self) -> None:
        self._sampler.logprob_token_ids_state.apply_staged_writes()

    def shrink(self) -> None:
        """Keep no room for more than requests to come ask for."""
        if self._kept is not None:
            self._kept.shrink()

    def are_wanted(self, input_batch: InputBatch) -> bool:
        """Does not wait for the device."""
        return bool(self._asks[input_batch.idx_mapping_np[: input_batch.num_reqs]].any())

    def of_decided(
        self, logits: torch.Tensor, step: Denoised, tile: Tile
    ) -> LogprobsTensors | None:
        """The scores of all tokens of requests that ask; None if the next step decides them anew.

        Does not wait for the device. ``logits``: ``[N, vocab]``, edited.
        """
        if self._kept is None or tile.is_read_only is None:
            return None
        some = _row_indices(self._rows_that_ask(tile.batch), tile)
        return self._scored(some, logits, step, tile) if len(some) else None

    def of_blocks(self, record: StepRecord) -> LogprobsTensors | None:
        """None if nobody who asks has a canvas that is emitted.

        Under synchronous scheduling it waits for the device if the scores were not kept, and the
        result holds emitted tokens only. Otherwise it holds whole canvases, of which vLLM reads as
        many rows as are emitted.

        Column 0 is the token itself, the others are the top or the given token ids. Its rank is 1
        for the most likely token, and counts ties. With a ``--logprobs-mode`` of logits the values
        are logits / temperature.
        """
        tile = record.tile
        if tile.is_read_only is None:
            return None
        counts = self._rows_that_ask(tile.batch)
        if self._kept is None and not self._is_async:
            counts = np.minimum(counts, record.num_emitted.cpu().numpy()[: len(counts)])  # waits
        if not counts.any():
            return None
        some = _row_indices(counts, tile)
        if self._kept is None:
            found = self._scored(some, record.logits, record.denoised, tile)
        else:
            found = self._kept.updated(some, record, 1 + max(self._dims(tile.batch)))
        return found._replace(cu_num_generated_tokens=(np.cumsum(counts) - counts).tolist())

    def _rows_that_ask(self, input_batch: InputBatch) -> np.ndarray:
        """``[R]``: how many rows of logits each request has, 0 if it asks for no logprobs."""
        slots = input_batch.idx_mapping_np[: input_batch.num_reqs]
        widths = np.diff(input_batch.cu_num_logits_np[: len(slots) + 1])
        return np.where(self._asks[slots], widths, 0)

    def _scored(
        self, some: torch.Tensor, logits: torch.Tensor, step: Denoised, tile: Tile
    ) -> LogprobsTensors:
        """The scores of the rows ``some`` ``[n]`` of the logits, a few at a time."""
        rows, dims = tile.rows, self._dims(tile.batch)
        assert tile.is_read_only is not None, "a request asks for logprobs"
        temperature = torch.where(tile.is_read_only, 1.0, step.temperature)  # [N]
        parts = [
            self._scores(
                logits[few],
                temperature[few],
                step.argmax_canvas[rows.request_of[few], rows.place[few]],
                tile.batch.expanded_idx_mapping[few],
                dims,
            )
            for few in some.split(max(WORKSPACE_LOGITS // logits.shape[1], 1))
        ]
        return LogprobsTensors(
            torch.cat([part.logprob_token_ids for part in parts]),
            torch.cat([part.logprobs for part in parts]),
            torch.cat([part.selected_token_ranks for part in parts]),
        )

    def _scores(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        dims: tuple[int, int],
    ) -> LogprobsTensors:
        """``logits``: ``[n, vocab]``, changed in place; temperature, tokens, slots: ``[n]``."""
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

    def _dims(self, input_batch: InputBatch) -> tuple[int, int]:
        """How many top logprobs, and how many given token ids, a request asks for at most."""
        slots = input_batch.idx_mapping_np[: input_batch.num_reqs]
        dims = self._sampler.get_logprobs_dims(slots)
        assert dims is not None, "a request asks for logprobs"
        return dims


class KeptScores:
    """The scores of decided tokens until their canvas (``[slots, C]``) is emitted.

    It is as wide as a request has asked for, and as vLLM's memory profile has counted
    (``DiffusionSampler.profile``). What a slot's last request left there is overwritten before it
    is read: an emitted token was decided on this canvas.
    """

    def __init__(self, canvases: torch.Tensor) -> None:
        self._ids = torch.zeros((*canvases.shape, 1), dtype=torch.int32, device=canvases.device)
        self._scores = torch.zeros_like(self._ids, dtype=torch.float32)
        self._ranks = torch.zeros_like(canvases, dtype=torch.int64)

    def make_room(self, num_scores: int) -> None:
        more = max(1 + num_scores - self._ids.shape[-1], 0)
        if more:
            self._ids, self._scores = F.pad(self._ids, (0, more)), F.pad(self._scores, (0, more))

    def shrink(self) -> None:
        self._ids, self._scores = self._ids[..., :1].clone(), self._scores[..., :1].clone()

    def updated(self, some: torch.Tensor, record: StepRecord, width: int) -> LogprobsTensors:
        """Keep the scores that a step decides; return ``width`` columns of the rows ``[n]``."""
        rows, new, is_decided = record.tile.rows, record.decided_scores, record.denoised.decided
        assert new is not None and is_decided is not None, "an algorithm that decides for good"
        row, places = rows.request_of[some], rows.place[some]
        slots, is_new = rows.slots[row], is_decided[row, places]
        num_new = new.logprobs.shape[1]
        for table, values in (
            (self._ids[..., :num_new], new.logprob_token_ids),
            (self._scores[..., :num_new], new.logprobs),
            (self._ranks[..., None], new.selected_token_ranks[:, None]),
        ):
            kept = torch.where(is_new[:, None], values.to(table.dtype), table[slots, places])
            table[slots, places] = kept
        return LogprobsTensors(
            self._ids[slots, places, :width].long(),
            self._scores[slots, places, :width],
            self._ranks[slots, places],
        )


def joined(parts: Sequence[SamplerOutput]) -> LogprobsTensors | None:
    """Of tiles. One with fewer columns than the widest gets columns that nobody reads."""
    known = [part.logprobs_tensors for part in parts if part.logprobs_tensors is not None]
    if not known:
        return None
    width = max(one.logprobs.shape[1] for one in known)
    starts: list[int] = []
    num_rows = 0
    for part in parts:
        found = part.logprobs_tensors
        offsets = None if found is None else found.cu_num_generated_tokens
        # A tile without logprobs has as many requests as counts.
        starts.extend(num_rows + start for start in offsets or [0] * len(part.num_sampled))
        num_rows += 0 if found is None else len(found.logprobs)
    return LogprobsTensors(
        torch.cat([_widened(one.logprob_token_ids, width) for one in known]),
        torch.cat([_widened(one.logprobs, width) for one in known]),
        torch.cat([one.selected_token_ranks for one in known]),
        starts,
    )


def _row_indices(counts: np.ndarray, tile: Tile) -> torch.Tensor:
    """The first ``counts`` ``[R]`` rows of logits of each request, end to end: ``[n]``."""
    starts = tile.batch.cu_num_logits_np[: len(counts)]
    rows, offsets = spread(starts_of(counts))
    return to_device(starts[rows] + offsets, tile.rows.request_of.device)


def _widened(columns: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(columns, (0, width - columns.shape[1]))

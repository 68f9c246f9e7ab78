"""DiffusionSampler: denoise steps for every canvas of the batch, until one has converged.

    logits of the canvas rows -> logit edits -> grammars -> the family's denoise step
                                                         -> state of the next step
                                                         -> tokens to emit

vLLM's runner calls the sampler once in a visit, with the logits of its own forward pass. Then
``engine.loop`` may repeat the forward pass and the denoise step.

The next canvas of a request always stands in ``draft_tokens``: a request gets its first canvas when
it is admitted. A canvas that has not converged goes on; one that has converged is followed by a
fresh one.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dllm.engine import pending
from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.compilation import maybe_compile
from dllm.engine.edits import LogitEdits, clean_lengths
from dllm.engine.family import FREE, Denoised, Family
from dllm.engine.frame_taker import FrameTaker
from dllm.engine.grammars import CanvasGrammars
from dllm.engine.logit_rows import LogitRows, rows_at_once, tiles_of_batch
from dllm.engine.logprobs import BlockLogprobs
from dllm.engine.loop import DenoiseLoop
from dllm.engine.state import NOT_PINNED, CanvasState
from dllm.ops.filters import RowFilters
from dllm.ops.staging import to_device


class StepResult(NamedTuple):
    """The result of a denoise step of R rows.

    Attributes:
        step: what the family decided. ``steps_done`` and ``carried`` are set to 0 where a fresh
            canvas starts.
        next_canvas: ``[R, C]`` int64, the input of the next step.
        is_pinned: ``[R, C]`` bool, positions whose input token the request fixed
            (``settings.pins``).
    """

    step: Denoised
    next_canvas: torch.Tensor
    is_pinned: torch.Tensor

    def first_rows(self, num_rows: int) -> "StepResult":
        """The first rows alone, without the row that ``CanvasRows.at_least_two`` added."""
        step = self.step
        return StepResult(
            step=step._replace(
                argmax_canvas=step.argmax_canvas[:num_rows],
                accepted=step.accepted[:num_rows],
                converged=step.converged[:num_rows],
                steps_done=step.steps_done[:num_rows],
                carried={name: column[:num_rows] for name, column in step.carried.items()},
            ),
            next_canvas=self.next_canvas[:num_rows],
            is_pinned=self.is_pinned[:num_rows],
        )


class Tile(NamedTuple):
    """Canvases whose logits exist at once, and what the host decides about them for a visit.

    Attributes:
        logit_rows: their rows among all logits of the batch.
        batch: their requests alone.
        rows: where the canvases are in it.
        filters: top-k, top-p and min-p; None if no request uses them.
        free: ``[N]`` int64, FREE everywhere: no grammar has chosen a token.
        is_edited, forbids_words: whether a request edits logits, and whether it has bad words.
        grammars: what ``CanvasGrammars.prepare`` returned for the requests.
        all_have_canvases: every request; False also where it is not known.
    """

    logit_rows: slice
    batch: InputBatch
    rows: CanvasRows
    filters: RowFilters | None
    free: torch.Tensor
    is_edited: bool
    forbids_words: bool
    grammars: Any
    all_have_canvases: bool


class DiffusionSampler:
    """Takes the place of vLLM's sampler for a diffusion model.

    Args:
        vllm_config: for the vocabulary size, the logits workspace and whether to compile.
        family: of the model that is served.
        state: of all canvases; updated in place.
        sampler: vLLM's own, whose tables of requests and sampling parameters are used.
        grammars: of requests with structured outputs.
        loop: decides how often the forward pass and the denoise step are repeated.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        family: Family,
        state: CanvasState,
        sampler: Sampler,
        grammars: CanvasGrammars,
        loop: DenoiseLoop,
    ) -> None:
        self.family = family
        self.grammars = grammars
        self.state = state
        self.loop = loop
        self.req_states = sampler.req_states
        self.sampling_states = sampler.sampling_states
        self.penalties_state = sampler.penalties_state  # the runner counts emitted tokens there
        logit_bias, penalties, bad_words = sampler.logits_processors
        self.edits = LogitEdits(
            logit_bias, penalties, bad_words, num_slots=self.req_states.max_num_reqs
        )
        self.logprobs = BlockLogprobs(sampler)
        self.frames = FrameTaker(num_slots=self.req_states.max_num_reqs)
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self._is_async = bool(vllm_config.scheduler_config.async_scheduling)
        self._rows_at_once = rows_at_once(vllm_config)
        # Longer than any batch: torch.compile takes two equal sizes for the same one, and would
        # compile the step again for the first batch that is not the longest.
        longest = vllm_config.scheduler_config.max_num_batched_tokens + 1
        self._free = torch.full((longest,), FREE, dtype=torch.int64, device=state.seeds.device)
        self._denoise_rows = maybe_compile(denoise_rows, vllm_config)
        self._fresh_canvas = maybe_compile(family.fresh_canvas, vllm_config)
        self._new_slots: list[int] = []  # of requests that have no canvas yet

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Store the sampling parameters of a new (or resumed) request.

        ``DiffusionModelState.add_request`` has reset the slot's canvas already.
        """
        self.sampling_states.add_request(req_idx, sampling_params)
        self.edits.add_request(req_idx, sampling_params)
        self.logprobs.add_request(req_idx, sampling_params)
        self.frames.add_request(req_idx, sampling_params)
        self._new_slots.append(req_idx)

    def apply_staged_writes(self) -> None:
        """Send what ``add_request`` stored to the device, and draw first canvases."""
        self.sampling_states.apply_staged_writes()
        self.edits.apply_staged_writes()
        self.logprobs.apply_staged_writes()
        if self._new_slots:
            self._draw_first_canvases(self._new_slots)
            self._new_slots = []

    def _draw_first_canvases(self, new_slots: list[int]) -> None:
        """The canvases behind the prompts (or what was generated before a preemption)."""
        # A batch of one would be compiled as a special case, so one slot is given twice.
        slots_np = np.array(new_slots * 2 if len(new_slots) == 1 else new_slots)
        starts_np = self.req_states.prefill_len.np[slots_np].astype(np.int64)
        slots, starts = to_device(np.stack([slots_np, starts_np]), self.state.seeds.device)
        drawn = self._fresh_canvas(self.state.seeds[slots], starts)
        self.req_states.draft_tokens[slots] = self.state.with_seeds(slots, starts, drawn)

    def __call__(
        self, logits: torch.Tensor | LogitRows, input_batch: InputBatch, draft_logits: None = None
    ) -> SamplerOutput:
        """Denoise, once or until a canvas has converged (``engine.loop``).

        Args:
            logits: ``[N, vocab]`` fp32, of the canvas rows alone, in batch order; edited in place.
                ``LogitRows`` where they do not fit the workspace: then one tile after the other.
            input_batch: vLLM's; its draft tokens are the canvases.
            draft_logits: an argument that vLLM passes to samplers; not used.
        """
        if input_batch.num_draft_tokens == 0:
            output = _nothing_sampled(input_batch, self.family.settings.block_size)
            if self._is_async:
                pending.store(self.state, input_batch, output.num_sampled)
            return output
        tiles = self._tiles(input_batch, isinstance(logits, torch.Tensor))
        output = self._denoise(logits, tiles)
        if self.loop.may_repeat(input_batch) and self.loop.goes_on(output.num_sampled):
            with self.loop.forward_of(input_batch) as forward:
                output = self._denoise(forward(), tiles)
                while self.loop.goes_on(output.num_sampled):
                    output = self._denoise(forward(), tiles)
        return output

    def _tiles(self, input_batch: InputBatch, fits: bool) -> list[Tile]:
        """The canvases of a visit, in one tile if all logits fit the workspace."""
        parts: Iterable[tuple[slice, InputBatch]] = [(slice(None), input_batch)]
        if not fits:
            parts = tiles_of_batch(input_batch, self._rows_at_once)
        return [self._tile(logit_rows, batch) for logit_rows, batch in parts]

    def _tile(self, logit_rows: slice, batch: InputBatch) -> Tile:
        rows = CanvasRows.of_batch(batch, self.family.settings.canvas_length)
        if self._is_async:
            rows = pending.without_commits(rows, self.state)
        return Tile(
            logit_rows=logit_rows,
            batch=batch,
            rows=rows,
            filters=self._filters(batch),
            free=self._free[: int(batch.cu_num_logits_np[batch.num_reqs])],
            is_edited=self.edits.are_wanted(batch),
            forbids_words=self.edits.may_forbid_words(batch),
            grammars=self.grammars.prepare(batch, rows),
            # Under asynchronous scheduling that is known on the device only (`pending`).
            all_have_canvases=not self._is_async
            and bool(np.diff(batch.cu_num_logits_np[: batch.num_reqs + 1]).all()),
        )

    def _denoise(self, logits: torch.Tensor | LogitRows, tiles: Sequence[Tile]) -> SamplerOutput:
        """A denoise step of all canvases."""
        return _joined([self._denoise_tile(logits[tile.logit_rows], tile) for tile in tiles])

    def _denoise_tile(self, logits: torch.Tensor, tile: Tile) -> SamplerOutput:
        """A denoise step of the canvases of a tile, whose logits are given."""
        rows = tile.rows
        context = None
        if tile.is_edited:
            context = self.edits.context(rows, self.state, tile.batch)
            logits = self.edits.apply(logits, context)
        written = None
        if tile.grammars is not None:
            written = self.grammars.write(logits, rows, tile.grammars)
        result = self._denoise_rows(
            logits,
            self.req_states.draft_tokens[tile.batch.expanded_idx_mapping, rows.place],
            tile.free if written is None else written.chosen,
            rows.at_least_two(self.state.spare_slot),
            self.state,
            self.family,
            tile.filters,
        ).first_rows(tile.batch.num_reqs)
        self._store_soft_embeddings(logits, rows, result)
        scored = logits
        if result.step.decided is not None and self.logprobs.are_wanted(tile.batch):
            scored = self.logprobs.when_decided(logits, result.step.decided, tile.batch)
        num_emitted = torch.where(result.step.converged, rows.widths, 0)
        if context is not None and tile.forbids_words:
            tokens = result.step.argmax_canvas[rows.row_of, rows.place]  # [N]
            is_bad = self.edits.completes_bad_word(logits, tokens, context)
            num_emitted = torch.minimum(num_emitted, clean_lengths(rows, is_bad))
            result = self._trim_at_bad_word(rows, result, num_emitted)
        if written is not None:
            self.grammars.emitted(written, num_emitted, tile.grammars)
        if self.frames.are_wanted(tile.batch):
            steps_before = self.state.steps_done
            self.frames.take(rows, result.step, result.next_canvas, steps_before, tile.batch)
        self._store_state(tile, result)
        return self._emit(scored, rows, result.step, num_emitted, tile.batch)

    def _filters(self, input_batch: InputBatch) -> RowFilters | None:
        """Top-k, top-p and min-p of each logit row; None if no request of the batch uses them.

        On a CPU never None. There, rows that are not filtered are skipped anyway, and a None would
        make ``torch.compile`` compile the step a second time.
        """
        states, slots = self.sampling_states, input_batch.idx_mapping_np[: input_batch.num_reqs]
        is_filtered = (
            (states.top_k.np[slots] != self.vocab_size)
            | (states.top_p.np[slots] != 1.0)
            | (states.min_p.np[slots] != 0.0)
        )
        if not is_filtered.any() and states.top_k.gpu.is_cuda:
            return None
        row_slots = input_batch.expanded_idx_mapping
        return RowFilters(
            top_k=states.top_k.gpu[row_slots],
            top_p=states.top_p.gpu[row_slots],
            min_p=states.min_p.gpu[row_slots],
        )

    def _trim_at_bad_word(
        self, rows: CanvasRows, result: StepResult, num_emitted: torch.Tensor
    ) -> StepResult:
        """Start the next canvas of a trimmed row directly behind the tokens that are emitted."""
        starts = rows.seq_lens - rows.widths + num_emitted
        is_trimmed = result.step.converged & (num_emitted < rows.widths)
        drawn = self.family.fresh_canvas(self.state.seeds[rows.slots], starts)
        redrawn = self.state.with_seeds(rows.slots, starts, drawn)
        next_canvas = torch.where(is_trimmed[:, None], redrawn, result.next_canvas)
        return result._replace(next_canvas=next_canvas)

    def _store_state(self, tile: Tile, result: StepResult) -> None:
        """Write the state that the next step of each canvas reads.

        A row without a canvas keeps its state. With blocks, the tail in front of a canvas may be
        scheduled without the canvas, which waits in the middle of its steps for room.
        """
        state, step, slots = self.state, result.step, tile.rows.slots
        columns = [
            (self.req_states.draft_tokens, result.next_canvas),
            (state.argmax_canvas, step.argmax_canvas),
            (state.steps_done, step.steps_done),
            *((state.carried[name], step.carried[name]) for name in state.carried),
        ]
        for column, values in columns:
            written = values.to(column.dtype)
            if not tile.all_have_canvases:
                has_canvas = (tile.rows.widths > 0).view(-1, *[1] * (values.dim() - 1))
                written = torch.where(has_canvas, written, column[slots])
            column[slots] = written

    def _store_soft_embeddings(
        self, logits: torch.Tensor, rows: CanvasRows, result: StepResult
    ) -> None:
        """Write what the next step is conditioned on.

        Called before ``completes_bad_word``, which changes the logits.
        """
        if self.family.soft_size is None:
            return
        soft = self.family.look_back(logits, result.step)
        # [N, soft_size]. The model's own choice at a pinned position must not reach the next step.
        soft = torch.where(result.is_pinned[rows.row_of, rows.place][:, None], 0, soft)
        soft_embeds = self.state.soft_embeds
        soft_embeds[rows.slots[rows.row_of], rows.place] = soft.to(soft_embeds.dtype)

    def _emit(
        self,
        logits: torch.Tensor,
        rows: CanvasRows,
        step: Denoised,
        num_emitted: torch.Tensor,
        input_batch: InputBatch,
    ) -> SamplerOutput:
        """The output for vLLM: the tokens of converged canvases.

        Every canvas token counts as rejected, also of a converged canvas. So vLLM does not advance
        the KV position. That is right because this step wrote bidirectional KV; an emitted block
        gets its causal KV in the next step. Head tokens of a block that is not whole yet count as
        rejected, too: they saw this canvas.
        """
        logprobs = None
        if self.logprobs.are_wanted(input_batch):
            row_slots = rows.slots[rows.row_of]
            temperature = torch.where(self.state.is_read_only[row_slots], 1.0, step.temperature)
            logprobs = self.logprobs.of_blocks(
                logits, temperature, step.argmax_canvas, num_emitted, rows, input_batch
            )
        if self._is_async:
            num_rejected = pending.num_rejected(self.state, input_batch)
            pending.store(self.state, input_batch, num_emitted)
        else:
            tails = (rows.seq_lens - rows.widths) % self.family.settings.block_size
            num_rejected = rows.widths + tails
        return SamplerOutput(
            sampled_token_ids=step.argmax_canvas.to(torch.int32),
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_emitted.to(torch.int32),
            num_rejected=num_rejected.to(torch.int32),
        )


def _nothing_sampled(input_batch: InputBatch, block_size: int) -> SamplerOutput:
    """The output of a batch without canvases: prompt chunks, and blocks in a pass of their own."""
    seq_lens = input_batch.seq_lens[: input_batch.num_reqs]
    nothing = torch.zeros_like(seq_lens)
    return SamplerOutput(
        sampled_token_ids=nothing[:, None],
        logprobs_tensors=None,
        num_nans=None,
        num_sampled=nothing,
        num_rejected=seq_lens % block_size,
    )


def _joined(parts: Sequence[SamplerOutput]) -> SamplerOutput:
    """The output of a batch, joined from the outputs of its tiles."""
    if len(parts) == 1:
        return parts[0]
    return SamplerOutput(
        sampled_token_ids=torch.cat([part.sampled_token_ids for part in parts]),
        logprobs_tensors=BlockLogprobs.joined(
            [part.logprobs_tensors for part in parts], [len(part.num_sampled) for part in parts]
        ),
        num_nans=None,
        num_sampled=torch.cat([part.num_sampled for part in parts]),
        num_rejected=torch.cat([part.num_rejected for part in parts]),
    )


def denoise_rows(
    logits: torch.Tensor,
    ids: torch.Tensor,
    chosen: torch.Tensor,
    rows: CanvasRows,
    state: CanvasState,
    family: Family,
    filters: RowFilters | None,
) -> StepResult:
    """The compiled part of a step: the family's denoise step, and the canvas of the next step.

    Args:
        logits: ``[N, V]`` fp32, edited.
        ids: ``[N]`` int64, the canvas tokens that entered the model.
        chosen: ``[N]`` int64, the tokens that grammars have chosen; FREE in other rows.
        rows: at least two of them (``CanvasRows.at_least_two``).
        state: read only.
    """
    pins = state.pins(rows.slots, rows.seq_lens - rows.widths)
    canvases = state.canvases(rows.slots, ids, chosen, pins)
    step = family.denoise(logits, rows, canvases, filters)
    goes_on = (rows.widths > 0) & ~step.converged  # [R]
    canvas = torch.where(pins != NOT_PINNED, pins, step.canvas)
    fresh = state.with_seeds(rows.slots, rows.seq_lens, step.fresh)
    return StepResult(
        step=step._replace(
            steps_done=torch.where(goes_on, step.steps_done, 0),
            carried={  # [R, ...], so that goes_on has to be [R, 1, ...]
                name: torch.where(goes_on.view(-1, *[1] * (column.dim() - 1)), column, 0)
                for name, column in step.carried.items()
            },
        ),
        next_canvas=torch.where(goes_on[:, None], canvas, fresh),
        is_pinned=pins != NOT_PINNED,
    )

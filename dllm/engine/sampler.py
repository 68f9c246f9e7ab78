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

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dllm.engine import pending
from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.compilation import maybe_compile
from dllm.engine.edits import LogitEdits, clean_lengths
from dllm.engine.family import Denoised, Family
from dllm.engine.frame_taker import FrameTaker
from dllm.engine.grammars import CanvasGrammars, Written
from dllm.engine.logit_rows import LogitRows, joined_outputs, rows_at_once, tiles_of_batch
from dllm.engine.logprobs import BlockLogprobs, KeptScores
from dllm.engine.loop import DenoiseLoop
from dllm.engine.state import CanvasState, denoise_rows, num_rejected, store_rows
from dllm.engine.traces import BlockTraces
from dllm.ops.filters import RowFilters
from dllm.ops.staging import to_device
from dllm.settings.denoising import NO_TOKEN


class Tile(NamedTuple):
    """Canvases whose logits exist at once, and what the host decides about them for a visit.

    Attributes:
        logit_rows: their rows among all logits of the batch.
        batch: their requests alone.
        rows: where the canvases are in it; at least two, of which the last may be empty.
        traced: rows of logits whose tokens are traced, ``[n]``; None if nobody asks.
        is_pinned: ``[N, 1]`` bool, rows whose input token is a pin; None if nobody pins.
        filters: top-k, top-p and min-p; None if no request uses them.
        free: ``[N]`` int64, NO_TOKEN everywhere: no grammar has chosen a token.
        is_edited: whether a request edits logits.
        forbids_words: ``[N]`` bool, rows in which a bad word may end; None if nobody has bad words.
        grammars: what ``CanvasGrammars.prepare`` returned for the requests.
    """

    logit_rows: slice
    batch: InputBatch
    rows: CanvasRows
    traced: torch.Tensor | None
    is_pinned: torch.Tensor | None
    filters: RowFilters | None
    free: torch.Tensor
    is_edited: bool
    forbids_words: torch.Tensor | None
    grammars: Any


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
        num_slots = self.req_states.max_num_reqs
        self.edits = LogitEdits(sampler.logits_processors, num_slots)
        self._is_async = bool(vllm_config.scheduler_config.async_scheduling)
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        most = vllm_config.model_config.max_logprobs
        self._most_logprobs = self.vocab_size if most < 0 else most
        kept = KeptScores(state.argmax_canvas) if family.decides_for_good else None
        self.logprobs = BlockLogprobs(sampler, self._is_async, kept)
        self.frames = FrameTaker(num_slots)
        self.traces = BlockTraces(state.argmax_canvas, family.decides_for_good)
        self._rows_at_once = rows_at_once(vllm_config)
        # Longer than any batch: torch.compile would take two equal sizes for the same one.
        longest = vllm_config.scheduler_config.max_num_batched_tokens + 1
        # Made as a grammar makes its choice: torch.compile compiles for either kind of tensor.
        with torch.inference_mode():
            self._free = state.seeds.new_full((longest,), NO_TOKEN, dtype=torch.int64)
        self._denoise_rows = maybe_compile(denoise_rows, vllm_config)
        self._store_rows = maybe_compile(store_rows, vllm_config)
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
        self.traces.add_request(req_idx, sampling_params)
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
        thoughts = self.state.thoughts(slots, starts)
        self.req_states.draft_tokens[slots] = self.state.with_seeds(slots, drawn, thoughts)

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
            return self._nothing_sampled(input_batch)
        tiles = self._tiles(input_batch, isinstance(logits, torch.Tensor))
        output = self._denoise(logits, tiles)
        if self.loop.may_repeat(input_batch) and self.loop.goes_on(output.num_sampled):
            with self.loop.forward_of(input_batch) as forward:
                output = self._denoise(forward(), tiles)
                while self.loop.goes_on(output.num_sampled):
                    output = self._denoise(forward(), tiles)
        return output

    def profile(self, logits: torch.Tensor | LogitRows, input_batch: InputBatch) -> None:
        """Take a denoise step whose requests all ask for as many logprobs as the server allows.

        Args:
            logits, input_batch: as of a call; requests of these slots must not be running.
        """
        slots = input_batch.idx_mapping_np[: input_batch.num_reqs].tolist()
        asking, not_asking = SamplingParams(logprobs=self._most_logprobs), SamplingParams()
        for params in (asking, not_asking):
            for slot in slots:
                self.sampling_states.add_request(slot, params)
                self.logprobs.add_request(slot, params)
            if params is asking:
                self.loop.begin_visit(allows_more_passes=False)
                with self.grammars.largest():
                    self(logits, input_batch)
        self.logprobs.shrink()

    def _tiles(self, input_batch: InputBatch, fits: bool) -> list[Tile]:
        """The canvases of a visit, in one tile if all logits fit the workspace."""
        if fits:
            return [self._tile(slice(None), input_batch)]
        return [self._tile(*part) for part in tiles_of_batch(input_batch, self._rows_at_once)]

    def _tile(self, logit_rows: slice, batch: InputBatch) -> Tile:
        rows = self._rows(batch)
        if self._is_async:
            rows = pending.without_commits(rows, self.state)
        state, slots = self.state, batch.idx_mapping_np[: batch.num_reqs]
        is_pinned, forbids_words = None, self.edits.forbids_words(batch, rows)
        if state.has_pins[slots].any():
            pins = state.pins(rows.slots, rows.seq_lens - rows.widths)
            is_pinned = (pins != NO_TOKEN)[rows.row_of, rows.place, None]
            if forbids_words is not None:  # a held pin is emitted whatever it completes
                is_held = is_pinned[:, 0] & state.holds_pins[rows.slots[rows.row_of]]
                forbids_words = forbids_words & ~is_held
        return Tile(
            logit_rows=logit_rows,
            batch=batch,
            rows=rows,
            traced=self.traces.rows_of(batch),
            is_pinned=is_pinned,
            filters=self._filters(batch),
            free=self._free[: int(batch.cu_num_logits_np[batch.num_reqs])],
            is_edited=bool(self.edits.is_edited[slots].any()),
            forbids_words=forbids_words,
            grammars=self.grammars.prepare(batch, rows),
        )

    def _rows(self, batch: InputBatch) -> CanvasRows:
        return CanvasRows.of_batch(batch, self.family.settings.canvas_length, self.state.spare_slot)

    def _denoise(self, logits: torch.Tensor | LogitRows, tiles: Sequence[Tile]) -> SamplerOutput:
        """A denoise step of all canvases."""
        outputs = [self._denoise_tile(logits[tile.logit_rows], tile) for tile in tiles]
        return joined_outputs(outputs, [tile.batch for tile in tiles])

    def _denoise_tile(self, logits: torch.Tensor, tile: Tile) -> SamplerOutput:
        """A denoise step of the canvases of a tile, whose logits are given."""
        rows = tile.rows
        context = None
        is_changed = tile.is_edited or tile.grammars is not None  # the logits, in place
        own = logits[tile.traced] if tile.traced is not None and is_changed else None
        if tile.is_edited:
            context = self.edits.context(rows, self.state, tile.batch)
            logits = self.edits.apply(logits, context)
        ids = self.req_states.draft_tokens[tile.batch.expanded_idx_mapping, rows.place]
        written = None if tile.grammars is None else self._write_texts(logits, ids, tile)
        step = self._denoise_rows(
            logits,
            ids,
            tile.free if written is None else written.chosen,
            rows,
            self.state,
            self.family,
            tile.filters,
        )
        self._store_soft_embeddings(logits, tile, step)
        scored_at = None
        if self.logprobs.are_wanted(tile.batch):
            is_read_only = self.state.is_read_only[rows.slots[rows.row_of]]
            scored_at = torch.where(is_read_only, 1.0, step.temperature)  # [N]
            self.logprobs.keep_decided(logits, scored_at, step, rows, tile.batch)
        if tile.traced is not None:
            own = logits[tile.traced] if own is None else own
            self.traces.record(own, tile.traced, ids, tile.is_pinned, step, self.state, rows)
        step, num_emitted = self._emission(logits, context, step, tile)
        if written is not None:
            self.grammars.emitted(written, num_emitted, tile.grammars)
        records = None if tile.traced is None else self.traces.records
        self.frames.take(rows, step, self.state.steps_done, records, tile.batch)
        if tile.traced is not None:
            self.traces.end(self.state.written_slots(rows), step.converged)
        tokens, sampled, rejected = self._store_rows(
            num_emitted,
            step,
            rows,
            self.state,
            self.req_states.draft_tokens,
            self._lengths(rows),
            self.family.settings.block_size,
        )
        logprobs = None
        if scored_at is not None:
            logprobs = self.logprobs.of_blocks(
                logits, scored_at, step, num_emitted, rows, tile.batch
            )
        return self._output(tokens, sampled, rejected, logprobs, tile.batch.num_reqs)

    def _write_texts(self, logits: torch.Tensor, ids: torch.Tensor, tile: Tile) -> Written:
        """Let grammars choose texts, and mask the logits.

        Args:
            logits: ``[N, vocab]`` fp32, edited; changed in place.
            ids: ``[N]`` int64, the canvas tokens that entered the model.
        """
        canvases = self.state.canvases(tile.rows, ids, tile.free)

        def scores(part: slice) -> torch.Tensor:
            return self.family.scores_of_texts(logits, tile.rows, canvases, tile.filters, part)

        return self.grammars.write(logits, scores, tile.rows, tile.grammars)

    def _filters(self, input_batch: InputBatch) -> RowFilters | None:
        """Top-k, top-p and min-p of each logit row; None if no request of the batch uses them.

        On a CPU never None. There, rows that are not filtered are skipped anyway, and a None would
        make ``torch.compile`` compile the step a second time.
        """
        states, slots = self.sampling_states, input_batch.idx_mapping_np[: input_batch.num_reqs]
        if states.top_k.gpu.is_cuda and not self.is_filtered(slots).any():
            return None
        row_slots = input_batch.expanded_idx_mapping
        return RowFilters(
            top_k=states.top_k.gpu[row_slots],
            top_p=states.top_p.gpu[row_slots],
            min_p=states.min_p.gpu[row_slots],
        )

    def is_filtered(self, slots: np.ndarray) -> np.ndarray:
        """Which of these requests use top-k, top-p or min-p: ``[R]`` bool."""
        states = self.sampling_states
        columns = ((states.top_k, self.vocab_size), (states.top_p, 1.0), (states.min_p, 0.0))
        found: np.ndarray = np.any([column.np[slots] != off for column, off in columns], axis=0)
        return found

    def _emission(
        self, logits: torch.Tensor, context: LogitsContext | None, step: Denoised, tile: Tile
    ) -> tuple[Denoised, torch.Tensor]:
        """How many tokens of each canvas are emitted: ``[R]``, in front of the first bad word.

        Args:
            logits: edited; changed in place.
            context: of the edits; None if there are none.

        Returns:
            The step, in which the next canvas of a trimmed row starts directly behind the tokens
            that are emitted; and their number.
        """
        rows = tile.rows
        num_emitted = torch.where(step.converged, rows.widths, 0)
        if context is None or tile.forbids_words is None:
            return step, num_emitted
        tokens = step.argmax_canvas[rows.row_of, rows.place]  # [N]
        is_bad = self.edits.completes_bad_word(logits, tokens, context, tile.forbids_words)
        num_emitted = torch.minimum(num_emitted, clean_lengths(rows, is_bad))
        is_trimmed = step.converged & (num_emitted < rows.widths)
        behind = self.state.thoughts_of(rows).behind(step.argmax_canvas, num_emitted)
        drawn = self.family.fresh_canvas(self.state.seeds[rows.slots], behind.canvas_start)
        redrawn = self.state.with_seeds(rows.slots, drawn, behind)
        canvas = torch.where(is_trimmed[:, None], redrawn, step.canvas)
        return step._replace(canvas=canvas), num_emitted

    def _store_soft_embeddings(self, logits: torch.Tensor, tile: Tile, step: Denoised) -> None:
        """Write what the next step is conditioned on.

        Called before ``completes_bad_word``, which changes the logits.
        """
        if self.family.soft_size is None:
            return
        rows, soft_embeds = tile.rows, self.state.soft_embeds
        soft = self.family.look_back(logits, step)  # [N, soft_size]
        # The model's own choice of a given token must not reach the next step.
        if tile.is_pinned is not None:
            soft = torch.where(tile.is_pinned, 0, soft)
        if self.state.has_budget[tile.batch.idx_mapping_np[: tile.batch.num_reqs]].any():
            is_end = self.state.thoughts_of(rows).ends_at(step.argmax_canvas)
            soft = torch.where(is_end[rows.row_of, rows.place, None], 0, soft)
        soft_embeds[tile.batch.expanded_idx_mapping, rows.place] = soft.to(soft_embeds.dtype)

    def _output(
        self,
        tokens: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        logprobs: LogprobsTensors | None,
        num_reqs: int,
    ) -> SamplerOutput:
        """The output for vLLM: the tokens of converged canvases, of the first rows.

        Every canvas token counts as rejected, also of a converged canvas. So vLLM does not advance
        the KV position. That is right because this step wrote bidirectional KV; an emitted block
        gets its causal KV in the next step. Head tokens of a block that is not whole yet count as
        rejected, too: they saw this canvas.
        """
        return SamplerOutput(
            sampled_token_ids=tokens[:num_reqs],
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled[:num_reqs],
            num_rejected=num_rejected[:num_reqs],
        )

    def _nothing_sampled(self, batch: InputBatch) -> SamplerOutput:
        """The output of a batch without canvases: prompt chunks, blocks in a pass of their own."""
        rows, size = self._rows(batch), self.family.settings.block_size
        rejected = num_rejected(self.state, rows, self._lengths(rows), size).int()
        nothing = torch.zeros_like(rejected)
        return self._output(nothing[:, None], nothing, rejected, None, batch.num_reqs)

    def _lengths(self, rows: CanvasRows) -> torch.Tensor:
        """As of ``num_rejected``. Under synchronous scheduling no block is pending."""
        if not self._is_async:
            return rows.seq_lens
        lengths = self.req_states.total_len.gpu  # has no spare slot
        return lengths[rows.slots.clamp(max=len(lengths) - 1)]

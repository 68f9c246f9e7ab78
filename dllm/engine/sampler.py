"""DiffusionSampler: a denoise step of every canvas of the batch, or several.

The runner calls the sampler once in an engine step, with hidden states of vLLM's forward pass.
Then ``engine.loop`` may repeat the forward pass and the denoise step, until a canvas converges or a
request arrives; not under asynchronous scheduling. A denoise step (``_denoise_tile``) is:

    edit, constrain  logits, in place, as requests and their grammars ask
    denoise          the algorithm's decisions
    emit             how many tokens of each canvas are complete
    record           all of this (``engine.steps``)
    store            what the next step reads
    report           logprobs, traces and frames

The next canvas of a request always stands in ``CanvasState.canvas``: a request gets its first
canvas in the step that admits it (``_draw_first_canvases``), and a fresh one follows one that has
converged.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dllm.engine import pending
from dllm.engine.algorithm import Denoised, DenoisingAlgorithm
from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.compilation import maybe_compile, of_fixed_size
from dllm.engine.edits import LogitEdits
from dllm.engine.frame_taker import FrameTaker
from dllm.engine.grammars import CanvasGrammars, Written
from dllm.engine.logit_rows import joined_outputs, rows_at_once, tiles_of_batch
from dllm.engine.logprobs import BlockLogprobs, KeptScores
from dllm.engine.loop import DenoiseLoop
from dllm.engine.state import CanvasState
from dllm.engine.step_rows import begin_rows, begins_behind, denoise_rows, num_rejected, store_rows
from dllm.engine.steps import StepRecord, Tile
from dllm.engine.traces import BlockTraces
from dllm.ops.filters import RowFilters
from dllm.ops.staging import to_device
from dllm.settings.denoising import NO_TOKEN
from dllm.settings.server import options_of


class DiffusionSampler:
    """In place of vLLM's sampler, whose tables of requests and parameters it uses."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: Any,
        algorithm: DenoisingAlgorithm,
        state: CanvasState,
        sampler: Sampler,
        grammars: CanvasGrammars,
        loop: DenoiseLoop,
    ) -> None:
        self.algorithm = algorithm
        self._model = model
        # On a CPU soft-capping is fused with other work. Whether a step reads raw logits depends on
        # all of its requests, and they differ from soft-capped ones in the last digits.
        has_raw_logits = state.canvas.is_cuda and hasattr(model, "raw_logits")
        self._may_read_raw_logits = has_raw_logits and not envs.VLLM_BATCH_INVARIANT
        self.grammars = grammars
        self.state = state
        self.loop = loop
        self.req_states = sampler.req_states
        self.sampling_states = sampler.sampling_states
        self.penalties_state = sampler.penalties_state  # the runner counts emitted tokens there
        num_slots = self.req_states.max_num_reqs
        self.edits = LogitEdits(sampler.logits_processors, num_slots)
        self._is_async = bool(vllm_config.scheduler_config.async_scheduling)
        self._keeps_context = options_of(vllm_config).context_cache == "block"
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        most = vllm_config.model_config.max_logprobs
        self._most_logprobs = self.vocab_size if most < 0 else most
        kept = KeptScores(state.canvas) if algorithm.decides_for_good else None
        self.logprobs = BlockLogprobs(sampler, self._is_async, kept)
        self.frames = FrameTaker(num_slots)
        self.traces = BlockTraces(state, algorithm.decides_for_good)
        self._rows_at_once = rows_at_once(vllm_config)
        # Longer than any batch: torch.compile would take two equal sizes for the same one.
        longest = vllm_config.scheduler_config.max_num_batched_tokens + 1
        # An inference tensor, as what a grammar chooses is one: for another kind of tensor
        # torch.compile would compile the step a second time.
        with torch.inference_mode():
            self._nothing_chosen = state.seeds.new_full((longest,), NO_TOKEN, dtype=torch.int64)
        self._denoise_rows = maybe_compile(denoise_rows, vllm_config)
        self._store_rows = maybe_compile(store_rows, vllm_config)
        self._begin_rows = maybe_compile(begin_rows, vllm_config)
        self._new_slots: list[int] = []  # of requests that have no canvas yet

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """``DiffusionModelState.add_request`` has reset the slot's canvas already."""
        self.sampling_states.add_request(req_idx, sampling_params)
        self.edits.add_request(req_idx, sampling_params)
        self.logprobs.add_request(req_idx, sampling_params)
        self.frames.add_request(req_idx, sampling_params)
        self.traces.add_request(req_idx, sampling_params)
        self._new_slots.append(req_idx)

    def apply_staged_writes(self) -> None:
        self.sampling_states.apply_staged_writes()
        self.edits.apply_staged_writes()
        self.logprobs.apply_staged_writes()
        if self._new_slots:
            self._draw_first_canvases(self._new_slots)
            self._new_slots = []

    def _draw_first_canvases(self, new_slots: list[int]) -> None:
        """Behind the prompts (or what was generated before a preemption)."""
        # A batch of one would be compiled as a special case, so one slot is given twice.
        slots_np = np.array(new_slots * 2 if len(new_slots) == 1 else new_slots)
        starts_np = self.req_states.prefill_len.np[slots_np].astype(np.int64)
        # Not parts of one tensor: torch.compile would compile again for those of a step.
        slots, starts = (to_device(x, self.state.seeds.device) for x in (slots_np, starts_np))
        self.state.looks_for_ends(slots_np)
        self._begin_rows(slots, starts, self.state, self.algorithm)

    def __call__(self, hidden_states: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """``[N, hidden]``: of canvas rows, in batch order, of which the model has yet to compute
        logits.
        """
        if input_batch.num_draft_tokens == 0:
            return self._nothing_sampled(input_batch)
        self.state.looks_for_ends(input_batch.idx_mapping_np[: input_batch.num_reqs])
        tiles = self._tiles(input_batch)
        output = self._denoise_batch(hidden_states, tiles)
        if self.loop.may_repeat(input_batch) and self.loop.begin_next_pass(output.num_sampled):
            with self.loop.forward_of(input_batch) as forward:
                output = self._denoise_batch(forward(), tiles)
                while self.loop.begin_next_pass(output.num_sampled):
                    output = self._denoise_batch(forward(), tiles)
        return output

    def _needs_whole_rows(self, batch: InputBatch) -> bool:
        """Whether somebody needs soft-capped logits in memory, all of a row. Does not wait."""
        slots = batch.idx_mapping_np[: batch.num_reqs]
        return bool(
            self.edits.is_edited[slots].any()
            or self.grammars.has_grammar[slots].any()
            or self.logprobs.are_wanted(batch)
            or self.traces.are_wanted(slots)
        )

    def profile(self, hidden_states: torch.Tensor, input_batch: InputBatch) -> None:
        """With as many logprobs as the server allows. No request may run in these slots."""
        slots = input_batch.idx_mapping_np[: input_batch.num_reqs].tolist()
        asking, not_asking = SamplingParams(logprobs=self._most_logprobs), SamplingParams()
        for params in (asking, not_asking):
            for slot in slots:
                self.sampling_states.add_request(slot, params)
                self.logprobs.add_request(slot, params)
            if params is asking:
                self.loop.begin_engine_step(allows_more_passes=False)
                with self.grammars.largest():
                    self(hidden_states, input_batch)
        self.logprobs.shrink()

    def _tiles(self, input_batch: InputBatch) -> list[Tile]:
        is_raw = self._may_read_raw_logits and not self._needs_whole_rows(input_batch)
        parts = tiles_of_batch(input_batch, self._rows_at_once)
        return [self._tile(*part, is_raw) for part in parts]

    def _tile(self, logit_rows: slice, batch: InputBatch, is_raw: bool) -> Tile:
        rows, state = self._rows(batch), self.state
        if self._is_async:
            rows = pending.without_commits(rows, state)
        is_pinned = is_read_only = None
        if state.has_pins[batch.idx_mapping_np[: batch.num_reqs]].any():
            pins = state.pins(rows.slots, rows.starts)
            is_pinned = (pins != NO_TOKEN)[rows.request_of, rows.place, None]
        if self.logprobs.are_wanted(batch):
            is_read_only = state.is_read_only[rows.slots[rows.request_of]]
        return Tile(
            logit_rows=logit_rows,
            is_raw=is_raw,
            batch=batch,
            rows=rows,
            traced=self.traces.rows_of(batch),
            is_read_only=is_read_only,
            is_pinned=is_pinned,
            filters=self._filters(batch),
            edits=self.edits.prepare(batch, rows, state, is_pinned),
            grammars=self.grammars.prepare(batch, rows),
        )

    def _rows(self, batch: InputBatch) -> CanvasRows:
        return CanvasRows.of_batch(
            batch, self.algorithm.settings.canvas_length, self.state.spare_slot
        )

    def _denoise_batch(self, hidden: torch.Tensor, tiles: Sequence[Tile]) -> SamplerOutput:
        return joined_outputs([self._denoise_tile(hidden[tile.logit_rows], tile) for tile in tiles])

    def _denoise_tile(self, hidden: torch.Tensor, tile: Tile) -> SamplerOutput:
        """What reads the model's logits comes before they are edited; what reads the edited ones
        comes before ``_count_emitted_`` excludes bad words.

        ``logits`` ``[N, vocab]`` fp32 are changed in place by the functions whose names end with an
        underscore. Of raw ones nobody asks these functions for anything.
        """
        cap: float | None = None
        if tile.is_raw:
            logits, cap = self._model.raw_logits(hidden)
        else:
            logits = self._model.compute_logits(hidden)
        ids = self.state.canvas[tile.batch.expanded_idx_mapping, tile.rows.place]
        unedited = None if tile.traced is None else logits[tile.traced]  # a copy

        logits = self.edits.apply_(logits, tile.rows, self.state, tile.edits)
        logits, texts = self._constrain_(logits, ids, tile)
        logits = of_fixed_size(logits, 1)
        denoised = self._denoise_rows(
            logits, ids, texts.chosen, tile.rows, self.state, self.algorithm, tile.filters, cap
        )
        soft = self._soft_embeddings(logits, denoised, tile, cap)
        decided_scores = self.logprobs.of_decided(logits, denoised, tile)
        logits, num_emitted = self._count_emitted_(logits, denoised, tile)

        record = StepRecord(
            tile, ids, unedited, logits, texts, denoised, soft, decided_scores, num_emitted
        )
        stored = self._store(record)
        logprobs = self._report(record)
        return self._output(stored, logprobs, tile.batch.num_reqs, denoised.num_broken)

    def _constrain_(
        self, logits: torch.Tensor, ids: torch.Tensor, tile: Tile
    ) -> tuple[torch.Tensor, Written]:
        """Let grammars choose texts, and mask in the logits what they forbid."""
        nothing = self._nothing_chosen[: len(ids)]
        if tile.grammars is None:
            return logits, Written(nothing)
        canvases = self.state.canvases(tile.rows, ids, nothing)

        # Called for a part of the rows, before ``write_`` masks the logits of these rows.
        def scores(part: slice) -> torch.Tensor:
            return self.algorithm.scores_of_texts(logits, tile.rows, canvases, tile.filters, part)

        return logits, self.grammars.write_(logits, scores, tile.rows, tile.grammars)

    def _soft_embeddings(
        self, logits: torch.Tensor, denoised: Denoised, tile: Tile, cap: float | None
    ) -> torch.Tensor | None:
        """What the next step is conditioned on, ``[N, soft_size]``; 0 for given tokens."""
        if self.algorithm.soft_size is None:
            return None
        soft, rows = self.algorithm.soft_embeddings(logits, denoised, cap), tile.rows
        # At a given token the soft embedding would be that of what the model would write instead.
        if tile.is_pinned is not None:
            soft = torch.where(tile.is_pinned, 0, soft)
        if self.state.has_thinking_budget[tile.batch.idx_mapping_np[: tile.batch.num_reqs]].any():
            thoughts = self.state.thoughts(rows.slots, rows.starts)
            is_end = thoughts.ends_at(denoised.argmax_canvas)
            soft = torch.where(is_end[rows.request_of, rows.place, None], 0, soft)
        return soft

    def _count_emitted_(
        self, logits: torch.Tensor, denoised: Denoised, tile: Tile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[R]``: 0 of a canvas that goes on; else all, or those in front of a bad word."""
        whole = denoised.converged * tile.rows.widths
        return self.edits.trim_(logits, whole, denoised.argmax_canvas, tile.rows, tile.edits)

    def _store(self, record: StepRecord) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tile, num_emitted, soft_embeds = record.tile, record.num_emitted, self.state.soft_embeds
        if record.soft is not None:
            at = tile.batch.expanded_idx_mapping, tile.rows.place
            soft_embeds[at] = record.soft.to(soft_embeds.dtype)
        if tile.grammars is not None:
            self.grammars.advance(record.texts, num_emitted, tile.grammars)
        begins = num_emitted.is_cuda  # the host would wait to learn whether a canvas begins
        stored = self._store_rows(
            num_emitted,
            record.denoised,
            tile.rows,
            self.state,
            self.algorithm,
            self._text_lens(tile.rows),
            begins,
            self._keeps_context,
        )
        if not begins and bool(num_emitted.any()):
            slots, starts = begins_behind(num_emitted, tile.rows, self.state)
            self._begin_rows(slots, starts, self.state, self.algorithm)
        return stored

    def _report(self, record: StepRecord) -> LogprobsTensors | None:
        traces = self.traces.read(record)
        self.frames.read(record, self.state.canvas, traces)
        return self.logprobs.of_blocks(record)

    def _filters(self, input_batch: InputBatch) -> RowFilters | None:
        """Of each logit row; None if no request of the batch uses them.

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

    def _output(
        self,
        stored: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        logprobs: LogprobsTensors | None,
        num_reqs: int,
        num_broken: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Also the tokens of a converged canvas count as rejected (``step_rows.num_rejected``):
        their KV is bidirectional, and an emitted block gets its causal KV in a later pass.
        """
        tokens, num_sampled, num_rejected = (column[:num_reqs] for column in stored)
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=logprobs,
            num_nans=None if num_broken is None else num_broken[:num_reqs],
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _nothing_sampled(self, batch: InputBatch) -> SamplerOutput:
        """Of a batch without canvases: prompt chunks, blocks in a pass of their own."""
        rows, size = self._rows(batch), self.algorithm.settings.block_size
        rejected = num_rejected(self.state, rows, self._text_lens(rows), size).int()
        nothing = torch.zeros_like(rejected)
        return self._output((nothing[:, None], nothing, rejected), None, batch.num_reqs)

    def _text_lens(self, rows: CanvasRows) -> torch.Tensor:
        """``[R]``; only asynchronous scheduling has emitted blocks that ``seq_lens`` lacks."""
        if not self._is_async:
            return rows.seq_lens
        lengths = self.req_states.total_len.gpu  # has no spare slot
        return lengths[rows.slots.clamp(max=len(lengths) - 1)]

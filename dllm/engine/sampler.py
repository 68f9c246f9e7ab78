"""DiffusionSampler: one denoise step for every canvas of the batch, as a few named calls.

    logits of the canvas rows -> edits -> row statistics -> accept, renoise, stop
                              -> next canvas, emission

There is no phase: a row that keeps denoising goes on with its canvas; every other row (a prompt
chunk, an emitted block, a canvas that has just converged) gets a fresh canvas behind its last
token. Noise is a function of the canvas start, so drawing that canvas twice draws the same one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.compilation import maybe_compile
from dllm.engine.edits import LogitEdits, clean_lengths
from dllm.engine.logit_rows import LogitRows, rows_at_once, tiles_of_batch
from dllm.engine.logprobs import BlockLogprobs
from dllm.engine.state import CanvasState
from dllm.models.gemma import rule
from dllm.models.gemma.self_conditioning import soft_embeddings
from dllm.ops import noise
from dllm.ops.dispatch import row_stats, uses_sparse_product
from dllm.ops.filters import RowFilters
from dllm.ops.row_stats import RowStats
from dllm.settings.request import constrained
from dllm.settings.server import DenoiseConfig, PluginOptions


class StepResult(NamedTuple):
    """What a denoise step leaves behind.

    Attributes:
        next_canvas, argmax_canvas: ``[R, C]`` int64.
        converged: ``[R]`` bool, rows whose ``argmax_canvas`` is emitted.
        stable_count: ``[R, C]`` and steps_done ``[R]``, of the next canvas.
        temperature: ``[N]`` fp32, of each logit row.
        stats: of each logit row.
        is_pinned: ``[R, C]`` bool, positions whose input the request holds.
    """

    next_canvas: torch.Tensor
    argmax_canvas: torch.Tensor
    converged: torch.Tensor
    stable_count: torch.Tensor
    steps_done: torch.Tensor
    temperature: torch.Tensor
    stats: RowStats
    is_pinned: torch.Tensor

    def first_rows(self, num_rows: int) -> "StepResult":
        """Without the company of a lone row."""
        return self._replace(
            next_canvas=self.next_canvas[:num_rows],
            argmax_canvas=self.argmax_canvas[:num_rows],
            converged=self.converged[:num_rows],
            stable_count=self.stable_count[:num_rows],
            steps_done=self.steps_done[:num_rows],
            is_pinned=self.is_pinned[:num_rows],
        )


class DiffusionSampler:
    """Takes the place of vLLM's sampler for a diffusion model.

    Args:
        vllm_config: for the vocabulary size and the choice to compile.
        config: server-level denoising.
        canvases: per-slot state, updated in place.
        sampler: vLLM's own, for its request states and the bookkeeping of sampling parameters.
        embedding, normalizer: of the tokens, for self-conditioning.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: DenoiseConfig,
        canvases: CanvasState,
        sampler: Sampler,
        embedding: VocabParallelEmbedding,
        normalizer: torch.Tensor,
    ) -> None:
        self.config = config
        self.canvases = canvases
        self.req_states = sampler.req_states
        self.sampling_states = sampler.sampling_states
        self.penalties_state = sampler.penalties_state  # the runner counts emitted tokens there
        logit_bias, penalties, bad_words = sampler.logits_processors
        self.edits = LogitEdits(
            logit_bias, penalties, bad_words, num_slots=self.req_states.max_num_reqs
        )
        self.logprobs = BlockLogprobs(sampler)
        self.embedding = embedding
        self.normalizer = normalizer
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        # The exact product reads the probabilities; the sparse one computes the few it needs.
        option = PluginOptions.from_vllm(vllm_config).soft_embedding
        is_sparse = uses_sparse_product(option, self.vocab_size, embedding.weight.device)
        self._probs_dtype = None if is_sparse else embedding.weight.dtype
        self._rows_at_once = rows_at_once(vllm_config)
        self._denoise_rows = maybe_compile(denoise_rows, vllm_config)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Note the sampling parameters; the model state has reset the slot already."""
        self.sampling_states.add_request(req_idx, sampling_params)
        self.edits.add_request(req_idx, constrained(sampling_params))
        self.logprobs.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        """Send what ``add_request`` noted to the device."""
        self.sampling_states.apply_staged_writes()
        self.edits.apply_staged_writes()
        self.logprobs.apply_staged_writes()

    def __call__(
        self, logits: torch.Tensor | LogitRows, input_batch: InputBatch, draft_logits: None = None
    ) -> SamplerOutput:
        """Run one denoise step.

        Args:
            logits: ``[N, vocab]`` fp32, of the canvas rows alone, in batch order; edited in place.
            input_batch: vLLM's; canvases are its draft tokens.
        """
        if input_batch.num_draft_tokens == 0:
            return self._start_canvases(CanvasRows.of_batch(input_batch, self.config.canvas_length))
        if isinstance(logits, torch.Tensor):
            return self._denoise(logits, input_batch)
        tiles = tiles_of_batch(input_batch, self._rows_at_once)
        return _joined([self._denoise(logits[rows], tile) for rows, tile in tiles])

    def _denoise(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """A denoise step of the canvases whose logits these are."""
        rows = CanvasRows.of_batch(input_batch, self.config.canvas_length)
        context = self.edits.context(rows, self.canvases, input_batch)
        if context is not None:
            logits = self.edits.apply(logits, context)
        result = self._denoise_rows(
            logits,
            rows.at_least_two(self.canvases.spare_slot),
            self.canvases,
            self.config,
            self._probs_dtype,
            self._filters(input_batch),
        ).first_rows(input_batch.num_reqs)
        self._believe(logits, rows, result)
        num_emitted = torch.where(result.converged, rows.widths, 0)
        if context is not None and self.edits.may_forbid_words(input_batch):
            is_bad = self.edits.completes_bad_word(logits, result.stats.argmax, context)
            num_emitted = torch.minimum(num_emitted, clean_lengths(rows, is_bad))
            result = self._cut(rows, result, num_emitted)
        self._remember(rows, result)
        return self._emit(logits, rows, result, num_emitted, input_batch)

    def _start_canvases(self, rows: CanvasRows) -> SamplerOutput:
        """A step of prompt chunks and emitted blocks: every row is ready for a fresh canvas."""
        drawn = self._draw_canvas(rows.slots, rows.seq_lens)
        self.req_states.draft_tokens[rows.slots] = self.canvases.with_seeds(
            rows.slots, rows.seq_lens, drawn
        )
        nothing = torch.zeros_like(rows.widths, dtype=torch.int32)
        return SamplerOutput(
            sampled_token_ids=nothing[:, None],
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=nothing,
            num_rejected=nothing,
        )

    def _draw_canvas(self, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """The random tokens that the canvases at ``starts`` begin as: ``[R, C]`` int64."""
        seeds = self.canvases.seeds[slots]
        return noise.initial_canvas(seeds, starts, self.config.canvas_length, self.vocab_size)

    def _filters(self, input_batch: InputBatch) -> RowFilters | None:
        """Top-k, top-p and min-p of each logit row, or None where no request filters.

        A CPU always gets them: it passes over rows that are not filtered, and without them the
        step would be another function to the compiler.
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

    def _cut(self, rows: CanvasRows, result: StepResult, num_emitted: torch.Tensor) -> StepResult:
        """Start the next canvas of a converged row behind what is emitted of this one."""
        canvas_start = rows.seq_lens - rows.widths
        is_cut = result.converged & (num_emitted < rows.widths)
        redrawn = self._draw_canvas(rows.slots, canvas_start + num_emitted)
        next_canvas = torch.where(is_cut[:, None], redrawn, result.next_canvas)
        return result._replace(next_canvas=next_canvas)

    def _remember(self, rows: CanvasRows, result: StepResult) -> None:
        """Write the state of the next step."""
        state, slots = self.canvases, rows.slots
        self.req_states.draft_tokens[slots] = result.next_canvas
        state.argmax_canvas[slots] = result.argmax_canvas
        state.stable_count[slots] = result.stable_count.to(state.stable_count.dtype)
        state.steps_done[slots] = result.steps_done.to(state.steps_done.dtype)

    def _believe(self, logits: torch.Tensor, rows: CanvasRows, result: StepResult) -> None:
        """Keep the soft embeddings for the next step, before anything else edits the logits."""
        state, slots = self.canvases, rows.slots
        soft = soft_embeddings(
            logits, result.temperature, result.stats, self.embedding, self.normalizer
        )
        # What the model would put at a pinned position is not to reach the next step.
        soft = torch.where(result.is_pinned[rows.row_of, rows.place][:, None], 0, soft)
        state.soft_embeds[slots[rows.row_of], rows.place] = soft.to(state.soft_embeds.dtype)

    def _emit(
        self,
        logits: torch.Tensor,
        rows: CanvasRows,
        result: StepResult,
        num_emitted: torch.Tensor,
        input_batch: InputBatch,
    ) -> SamplerOutput:
        """Emit converged blocks; the KV position of no canvas moves (its KV is bidirectional)."""
        logprobs = None
        if self.logprobs.are_wanted(input_batch):
            row_slots = rows.slots[rows.row_of]
            temperature = torch.where(
                self.canvases.is_read_only[row_slots], 1.0, result.temperature
            )
            logprobs = self.logprobs.of_blocks(
                logits, temperature, result.argmax_canvas, num_emitted, rows, input_batch
            )
        return SamplerOutput(
            sampled_token_ids=result.argmax_canvas.to(torch.int32),
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_emitted.to(torch.int32),
            num_rejected=rows.widths.to(torch.int32),
        )


def _joined(parts: Sequence[SamplerOutput]) -> SamplerOutput:
    """The output of a batch from those of its tiles."""
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
    rows: CanvasRows,
    canvases: CanvasState,
    config: DenoiseConfig,
    probs_dtype: torch.dtype | None,
    filters: RowFilters | None,
) -> StepResult:
    """The tensor part of a denoise step: statistics of N logit rows, decisions for R canvases."""
    slots, length = rows.slots, config.canvas_length
    starts = rows.seq_lens - rows.widths
    steps_done = canvases.steps_done[slots].long()
    drawn = noise.step_noise(
        canvases.seeds[slots], starts, steps_done, rows.seq_lens, length, logits.shape[-1]
    )
    temperature = rule.temperature(
        steps_done, config.max_denoising_steps, canvases.t_min[slots], canvases.t_max[slots]
    )[rows.row_of]
    stats = row_stats(
        logits, temperature, drawn.keys[rows.row_of, rows.place], probs_dtype, filters
    )
    sample = torch.where(canvases.is_greedy[slots][rows.row_of], stats.argmax, stats.sample)
    argmax = stats.argmax[rows.padded]
    outcome = rule.denoise_step(
        rule.DenoiseState(
            canvas=drawn.renoise_tokens,
            argmax_canvas=canvases.argmax_canvas[slots],
            stable_count=canvases.stable_count[slots],
            steps_done=steps_done,
        ),
        rule.StepInputs(
            argmax=argmax,
            sample=sample[rows.padded],
            entropy=stats.entropy[rows.padded],
            noise_tokens=drawn.renoise_tokens,
            is_stop=canvases.is_stop[slots[:, None], argmax],
        ),
        rows.widths,
        canvases.rules(slots, stability_window=config.stability_threshold + 1),
    )
    goes_on = (rows.widths > 0) & ~outcome.converged
    pins = canvases.pins(slots, starts)
    canvas = torch.where(pins, canvases.seed_canvas[slots], outcome.canvas)
    fresh = canvases.with_seeds(slots, rows.seq_lens, drawn.next_canvas)
    return StepResult(
        next_canvas=torch.where(goes_on[:, None], canvas, fresh),
        argmax_canvas=outcome.argmax_canvas,
        converged=outcome.converged,
        stable_count=torch.where(goes_on[:, None], outcome.stable_count, 0),
        steps_done=torch.where(goes_on, outcome.steps_done, 0),
        temperature=temperature,
        stats=stats,
        is_pinned=pins,
    )

"""DiffusionSampler: one denoise step for every canvas of the batch, as a few named calls.

    logits of the canvas rows -> row statistics -> accept, renoise, stop -> next canvas, emission

There is no phase: a row that keeps denoising goes on with its canvas; every other row (a prompt
chunk, an emitted block, a canvas that has just converged) gets a fresh canvas behind its last
token. Noise is a function of the canvas start, so drawing that canvas twice draws the same one.
"""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dllm import denoise, noise
from dllm.canvas_state import CanvasState
from dllm.compilation import maybe_compile
from dllm.config import DenoiseConfig
from dllm.logprobs import block_logprobs
from dllm.row_stats import row_stats
from dllm.self_conditioning import soft_embeddings


class CanvasRows(NamedTuple):
    """Where the canvases of a step are: R batch rows, N logit rows, C the served canvas length.

    A row without a canvas has width 0 and no logit rows.

    Attributes:
        slots: ``[R]`` int64, into per-slot state.
        widths: ``[R]`` int64, canvas tokens of the row.
        seq_lens: ``[R]`` int64, tokens up to the end of the row: where its next canvas starts.
        row_of, place: ``[N]`` int64, batch row and canvas position of a logit row.
        padded: ``[R, C]`` int64, the logit row of a canvas position (any row beyond the width).
    """

    slots: torch.Tensor
    widths: torch.Tensor
    seq_lens: torch.Tensor
    row_of: torch.Tensor
    place: torch.Tensor
    padded: torch.Tensor

    @classmethod
    def of_batch(cls, input_batch: InputBatch, canvas_length: int) -> "CanvasRows":
        """Read the rows off the batch; host arithmetic only, no device sync."""
        num_reqs = input_batch.num_reqs
        starts = input_batch.cu_num_logits_np[: num_reqs + 1]
        widths = np.diff(starts)
        places = np.minimum(np.arange(canvas_length), np.maximum(widths - 1, 0)[:, None])
        last_row = max(int(starts[-1]) - 1, 0)
        padded = np.minimum(starts[:-1, None] + places, last_row)
        device = input_batch.seq_lens.device

        def to_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)

        return cls(
            slots=input_batch.idx_mapping[:num_reqs].long(),
            widths=to_device(widths),
            seq_lens=input_batch.seq_lens[:num_reqs].long(),
            row_of=to_device(np.repeat(np.arange(num_reqs), widths)),
            place=input_batch.expanded_local_pos.long(),
            padded=to_device(padded),
        )

    def at_least_two(self, spare_slot: int) -> "CanvasRows":
        """Give a lone row an empty one for company, in a slot of its own.

        ``torch.compile`` treats a size of 1 as a special case, which would be compiled apart.
        """
        if len(self.slots) > 1:
            return self
        return self._replace(
            slots=F.pad(self.slots, (0, 1), value=spare_slot),
            widths=F.pad(self.widths, (0, 1)),
            seq_lens=F.pad(self.seq_lens, (0, 1)),
            padded=F.pad(self.padded, (0, 0, 0, 1)),
        )


class StepResult(NamedTuple):
    """What a denoise step leaves behind.

    Attributes:
        next_canvas, argmax_canvas: ``[R, C]`` int64.
        converged: ``[R]`` bool, rows whose ``argmax_canvas`` is emitted.
        stable_count, steps_done: ``[R]``, of the next canvas.
        temperature: ``[N]`` fp32, of each logit row.
        probs: ``[N, V]`` in the embedding's dtype.
    """

    next_canvas: torch.Tensor
    argmax_canvas: torch.Tensor
    converged: torch.Tensor
    stable_count: torch.Tensor
    steps_done: torch.Tensor
    temperature: torch.Tensor
    probs: torch.Tensor

    def first_rows(self, num_rows: int) -> "StepResult":
        """Without the company of a lone row."""
        return self._replace(
            next_canvas=self.next_canvas[:num_rows],
            argmax_canvas=self.argmax_canvas[:num_rows],
            converged=self.converged[:num_rows],
            stable_count=self.stable_count[:num_rows],
            steps_done=self.steps_done[:num_rows],
        )


class DiffusionSampler:
    """Takes the place of vLLM's sampler for a diffusion model.

    Args:
        vllm_config: for the vocabulary size and the choice to compile.
        config: server-level denoising.
        canvases: per-slot state, updated in place.
        sampler: vLLM's own, for its request states and top-k/top-p/logprobs bookkeeping.
        embedding, normalizer: of the tokens, for self-conditioning.
    """

    # The runner counts output tokens for penalties unless there is nothing to count into.
    penalties_state = SimpleNamespace(output_bin_counts=None)

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
        self.embedding = embedding
        self.normalizer = normalizer
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self._denoise_rows = maybe_compile(denoise_rows, vllm_config)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Note top-k, top-p and logprobs; the model state has reset the slot already."""
        self.sampling_states.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        """Send what ``add_request`` noted to the device."""
        self.sampling_states.apply_staged_writes()

    def __call__(
        self, logits: torch.Tensor, input_batch: InputBatch, draft_logits: None = None
    ) -> SamplerOutput:
        """Run one denoise step.

        Args:
            logits: ``[N, vocab]`` fp32, of the canvas rows alone, in batch order.
            input_batch: vLLM's; canvases are its draft tokens.
        """
        rows = CanvasRows.of_batch(input_batch, self.config.canvas_length)
        if input_batch.num_draft_tokens == 0:
            return self._start_canvases(rows)
        logits = self._filter(logits, input_batch)
        result = self._denoise_rows(
            logits,
            rows.at_least_two(self.canvases.spare_slot),
            self.canvases,
            self.config,
            self.embedding.weight.dtype,
        ).first_rows(input_batch.num_reqs)
        self._remember(rows, result)
        return self._emit(logits, rows, result, input_batch)

    def _start_canvases(self, rows: CanvasRows) -> SamplerOutput:
        """A step of prompt chunks and emitted blocks: every row is ready for a fresh canvas."""
        self.req_states.draft_tokens[rows.slots] = noise.initial_canvas(
            self.canvases.seeds[rows.slots],
            rows.seq_lens,
            self.config.canvas_length,
            self.vocab_size,
        )
        nothing = torch.zeros_like(rows.widths, dtype=torch.int32)
        return SamplerOutput(
            sampled_token_ids=nothing[:, None],
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=nothing,
            num_rejected=nothing,
        )

    def _filter(self, logits: torch.Tensor, input_batch: InputBatch) -> torch.Tensor:
        """Mask what top-k and top-p exclude; the argmax survives every filter."""
        slots = input_batch.idx_mapping_np[: input_batch.num_reqs]
        top_k, top_p = self.sampling_states.get_top_k_top_p(input_batch.expanded_idx_mapping, slots)
        if top_k is None and top_p is None:
            return logits
        return apply_top_k_top_p(logits.clone(), top_k, top_p)

    def _remember(self, rows: CanvasRows, result: StepResult) -> None:
        """Write the state of the next step."""
        state, slots = self.canvases, rows.slots
        self.req_states.draft_tokens[slots] = result.next_canvas
        state.argmax_canvas[slots] = result.argmax_canvas
        state.stable_count[slots] = result.stable_count.to(state.stable_count.dtype)
        state.steps_done[slots] = result.steps_done.to(state.steps_done.dtype)
        soft = soft_embeddings(result.probs, self.embedding, self.normalizer)
        state.soft_embeds[slots[rows.row_of], rows.place] = soft.to(state.soft_embeds.dtype)

    def _emit(
        self,
        logits: torch.Tensor,
        rows: CanvasRows,
        result: StepResult,
        input_batch: InputBatch,
    ) -> SamplerOutput:
        """Emit converged blocks; the KV position of no canvas moves (its KV is bidirectional)."""
        num_sampled = torch.where(result.converged, rows.widths, 0).to(torch.int32)
        slots = input_batch.idx_mapping_np[: input_batch.num_reqs]
        num_logprobs = self.sampling_states.max_num_logprobs(slots)
        logprobs = None
        if num_logprobs >= 0 and bool(result.converged.any()):
            emitted = result.converged[rows.row_of]
            chosen = result.argmax_canvas[rows.row_of, rows.place]
            logprobs = block_logprobs(
                logits[emitted],
                result.temperature[emitted],
                chosen[emitted],
                num_logprobs,
                num_sampled.tolist(),
            )
        return SamplerOutput(
            sampled_token_ids=result.argmax_canvas.to(torch.int32),
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=rows.widths.to(torch.int32),
        )


def denoise_rows(
    logits: torch.Tensor,
    rows: CanvasRows,
    canvases: CanvasState,
    config: DenoiseConfig,
    probs_dtype: torch.dtype,
) -> StepResult:
    """The tensor part of a denoise step: statistics of N logit rows, decisions for R canvases."""
    slots, length = rows.slots, config.canvas_length
    vocab_size = logits.shape[-1]
    steps_done = canvases.steps_done[slots].long()
    drawn = noise.step_noise(
        canvases.seeds[slots],
        rows.seq_lens - rows.widths,
        steps_done,
        rows.seq_lens,
        length,
        vocab_size,
    )
    temperature = denoise.temperature(
        steps_done, config.max_denoising_steps, canvases.t_min[slots], canvases.t_max[slots]
    )[rows.row_of]
    stats = row_stats(logits, temperature, drawn.keys[rows.row_of, rows.place], probs_dtype)
    sample = torch.where(canvases.is_greedy[slots][rows.row_of], stats.argmax, stats.sample)
    outcome = denoise.denoise_step(
        denoise.DenoiseState(
            canvas=drawn.renoise_tokens,
            argmax_canvas=canvases.argmax_canvas[slots],
            stable_count=canvases.stable_count[slots],
            steps_done=steps_done,
        ),
        stats.argmax[rows.padded],
        sample[rows.padded],
        stats.entropy[rows.padded],
        drawn.renoise_tokens,
        rows.widths,
        denoise.DenoiseRules(
            t_min=canvases.t_min[slots],
            t_max=canvases.t_max[slots],
            max_steps=canvases.max_steps[slots],
            entropy_bound=canvases.entropy_bound[slots],
            confidence=canvases.confidence[slots],
            stability_window=config.stability_threshold + 1,
        ),
    )
    goes_on = (rows.widths > 0) & ~outcome.converged
    assert stats.probs is not None
    return StepResult(
        next_canvas=torch.where(goes_on[:, None], outcome.canvas, drawn.next_canvas),
        argmax_canvas=outcome.argmax_canvas,
        converged=outcome.converged,
        stable_count=torch.where(goes_on, outcome.stable_count, 0),
        steps_done=torch.where(goes_on, outcome.steps_done, 0),
        temperature=temperature,
        probs=stats.probs,
    )

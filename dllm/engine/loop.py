"""The resident denoise loop: repeats a denoise step before the scheduler is asked again.

    engine step   a message of the scheduler to the worker, and the worker's answer
    pass          one forward pass and one denoise step of every canvas

The first pass of an engine step is vLLM's, and may have causal spans in front of the canvases.
While canvases denoise, only their tokens change. So they can go through the model again without the
scheduler and without new inputs. The loop ends

    when a canvas has converged: a client waits for its tokens, and the next canvas needs KV pages,
    which the scheduler gives;
    when a request has arrived, which the worker can see if it is in the engine core's process;
    when the engine step would take longer than ``denoise_loop_ms`` with one more pass as long as
    the last one: how long a request waits at most for a worker in a process of its own.

There is no loop if a request has no canvas, or if the scheduler knows of requests that are not in
the batch; nor where data parallel replicas share experts, and run each pass together.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.attention.ragged import spread, starts_of
from dllm.engine.ranks import answer_of_first_rank
from dllm.engine.spans import Spans
from dllm.ops.staging import to_device
from dllm.settings.server import options_of

CPU_LOOP_S = 0.05
Forward = Callable[[], torch.Tensor]  # hidden states of canvas rows


class DenoiseLoop:
    """Decides, in the worker, whether another pass follows.

    Attributes:
        clock: seconds.
        has_arrived: whether a message waits for the engine core; set by ``patches.engine_core``
            where the worker shares its process.
        replay: the first pass of this engine step, if it was a full CUDA graph: writes and returns
            the hidden states ``[padded tokens, hidden]``. Set by the runner.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        is_on_cpu: bool,
        forward_of: Callable[[InputBatch], AbstractContextManager[Forward]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        parallel = vllm_config.parallel_config
        loop_ms, default = options_of(vllm_config).denoise_loop_ms, CPU_LOOP_S if is_on_cpu else 0.0
        self.bound = default if loop_ms == "auto" else loop_ms / 1e3
        if parallel.data_parallel_size > 1:
            self.bound = 0.0
        self.clock = clock
        self.has_arrived: Callable[[], bool] = lambda: False
        self.num_passes = 1  # of the engine step that is going on, or of the last one
        self.forward_of = forward_of
        self.replay: Callable[[], torch.Tensor] | None = None
        self._is_allowed = False
        self._start = self._last = 0.0
        self._is_parallel = parallel.tensor_parallel_size > 1

    def begin_engine_step(self, allows_more_passes: bool) -> None:
        self._is_allowed = allows_more_passes and self.bound > 0
        self.num_passes = 1
        self.replay = None
        self._start = self._last = self.clock()

    def may_repeat(self, input_batch: InputBatch) -> bool:
        """Whether every request has a canvas, all of which takes part in the step."""
        widths = input_batch.num_draft_tokens_per_req
        if not self._is_allowed or widths is None:
            return False
        return bool(widths.all()) and int(widths.sum()) == input_batch.num_draft_tokens

    def begin_next_pass(self, num_emitted: torch.Tensor) -> bool:
        """Whether a pass follows one that emitted ``[R]`` tokens. Waits for the device."""
        has_emitted = bool(num_emitted.any())  # waits, so that the clock counts the device's time
        now = self.clock()
        next_ends = now + (now - self._last) - self._start  # if it takes as long as this one
        in_time = next_ends <= self.bound and not self.has_arrived()
        goes_on = in_time and not has_emitted
        self._last = now
        if self._is_parallel:
            goes_on = bool(answer_of_first_rank(goes_on))
        self.num_passes += goes_on
        return goes_on


class CanvasForward:
    """The model's forward pass over canvases (``[slots, C]``) alone, as often as it is called.

    Attention metadata is made once an engine step.
    """

    def __init__(self, model_state: Any, canvases: torch.Tensor) -> None:
        self._model_state = model_state
        self._canvases = canvases
        has_tails = options_of(model_state.vllm_config).context_cache == "none"
        self._block_length = model_state.algorithm.settings.block_size if has_tails else 1
        num_tokens, device = model_state.max_num_tokens, model_state.device
        self._input_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        # Made as a runner's batch: torch.compile compiles for either kind of tensor.
        with torch.inference_mode():
            self._rows = torch.arange(num_tokens, device=device)

    @contextmanager
    def of_batch(self, input_batch: InputBatch) -> Iterator[Forward]:
        """The pass of the canvases of ``input_batch``, all of whose rows have one.

        A full CUDA graph is one of canvases alone (``engine.runner``). It is replayed with other
        tokens in the memory that it reads.
        """
        state = self._model_state
        replay = state.loop.replay
        if replay is not None:
            num_tokens = input_batch.num_tokens
            alone = replace(input_batch, input_ids=input_batch.input_ids[:num_tokens])
            yield self._forward(alone, lambda inputs: replay()[:num_tokens])
            return
        batch, tokens = self._canvases_alone(input_batch)
        if state.map_adapters is not None:
            state.map_adapters(batch)
        metadata, slot_mapping = state.canvas_attention(batch, tokens)
        context = set_forward_context(
            metadata,
            state.vllm_config,
            num_tokens=batch.num_tokens,
            batch_descriptor=BatchDescriptor(num_tokens=batch.num_tokens),
            slot_mapping=slot_mapping,
            is_padding=batch.is_padding,
        )

        def run(inputs: dict[str, Any]) -> torch.Tensor:
            hidden: torch.Tensor = state.model(
                input_ids=batch.input_ids,
                positions=batch.positions,
                intermediate_tensors=None,
                **inputs,
            )
            return hidden

        with context:
            yield self._forward(batch, run)

    def _forward(self, batch: InputBatch, run: Callable[[dict[str, Any]], torch.Tensor]) -> Forward:
        state, rows = self._model_state, batch.logits_indices
        slots, places = batch.expanded_idx_mapping, batch.expanded_local_pos
        is_canvas_alone = batch.num_draft_tokens == batch.num_tokens

        def forward() -> torch.Tensor:
            canvases = self._canvases[slots, places]
            if is_canvas_alone:
                batch.input_ids.copy_(canvases)
            else:
                batch.input_ids[rows] = canvases.to(batch.input_ids.dtype)
            hidden = run(state.canvas_inputs(batch))
            state.before_logits(hidden, batch)
            return hidden if is_canvas_alone else hidden[rows]

        return forward

    def _canvases_alone(self, input_batch: InputBatch) -> tuple[InputBatch, torch.Tensor]:
        """The canvases and their tails alone, and which tokens of ``input_batch`` these are.

        Without blocks there are no tails (``engine.spans``), nor with ``context_cache: block``:
        their keys and values stay.
        """
        spans = Spans.of_schedule(
            input_batch.num_scheduled_tokens, input_batch.num_draft_tokens_per_req
        )
        tails = spans.tail_lens(self._block_length)
        tokens, in_part = input_batch.logits_indices, self._rows
        starts, starts_np = input_batch.cu_num_logits, input_batch.cu_num_logits_np
        if tails.any():
            device = self._rows.device
            starts_np, tokens_np, in_part_np = _with_tails(spans, tails)
            starts, tokens, in_part = (
                to_device(array, device) for array in (starts_np, tokens_np, in_part_np)
            )
            torch.index_select(input_batch.input_ids, 0, tokens, out=self._input_ids[: len(tokens)])
        num_tokens = len(tokens)
        torch.index_select(input_batch.positions, 0, tokens, out=self._positions[:num_tokens])
        widths = input_batch.num_draft_tokens_per_req
        assert widths is not None, "every request has a canvas"
        part = replace(
            input_batch,
            num_scheduled_tokens=widths + tails,
            num_tokens=num_tokens,
            num_tokens_after_padding=num_tokens,
            num_reqs_after_padding=input_batch.num_reqs,
            query_start_loc=starts,
            query_start_loc_np=starts_np,
            seq_lens=input_batch.seq_lens[: input_batch.num_reqs],
            num_computed_tokens_np=input_batch.num_computed_tokens_np + spans.causal_lens - tails,
            input_ids=self._input_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            is_padding=input_batch.is_padding[:num_tokens],
            logits_indices=in_part[: input_batch.num_draft_tokens],
        )
        return part, tokens


def _with_tails(spans: Spans, tails: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the tokens of canvases and their tails ``[R]``: [R + 1] int32, where each request starts
    among them; [tokens] int64, which of the batch they are; [N] int64, which are of canvases.
    """
    lens = spans.canvas_widths + tails
    starts = starts_of(lens)
    rows, offsets = spread(starts)
    ends = np.cumsum(spans.causal_lens + spans.canvas_widths)
    tokens = (ends - lens)[rows] + offsets
    return starts.astype(np.int32), tokens, np.flatnonzero(offsets >= tails[rows])

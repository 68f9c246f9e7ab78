"""CanvasAsyncScheduler: schedules the next engine step before the worker has answered the last one.

The scheduler then does not know yet which canvases converge. It counts every canvas in flight as
tokens to come (vLLM's *placeholders*), and schedules one more canvas for each request. If a canvas
converges in step k, step k + 1 is on its way with a canvas that the worker turns into the causal
pass of the emitted block (``engine.pending``):

    step    scheduled as   what the worker does              what it answers
    k       canvas         denoises; the canvas converges    the C tokens of the block
    k + 1   canvas         the block's causal pass           nothing: all C tokens are rejected
    k + 2   canvas         denoises the next canvas

For this a block takes S + 1 passes for S denoise steps, and the device does not wait for the host.

If nothing of the request is in flight when its block arrives (its canvas did not fit into engine
step k + 1, or would have ended beyond the model's context), the block is counted as in
``CanvasScheduler``: it is scheduled once more, as the causal span of the next canvas.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from dllm.engine.scheduler import CanvasScheduler


class CanvasAsyncScheduler(CanvasScheduler, AsyncScheduler):
    def __init__(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args, **kwargs)
        # Requests for which the engine step whose output is being counted wrote the KV of a block,
        # and nothing else; those for which the next one does so.
        self._committed: set[str] = set()
        self._commits_next: set[str] = set()

    def _may_repeat(self, output: SchedulerOutput) -> bool:
        """Never: the next engine step is scheduled while the worker has this one."""
        return False

    def _give_canvases_to_new_requests(self, output: SchedulerOutput) -> None:
        super()._give_canvases_to_new_requests(output)
        for data in output.scheduled_new_reqs:
            canvas = output.scheduled_spec_decode_tokens.get(data.req_id, ())
            self.requests[data.req_id].num_output_placeholders += len(canvas)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """If the step that writes a block's KV is in flight, its KV counts as computed, and is
        cached: requests that are scheduled later run behind that step.

        With blocks, only a whole one has KV, with the tail that was in front of its canvas. The
        output of a preempted request (``is_stale``) changes no counters.
        """
        num_tokens, size = request.num_tokens, self._block_length
        if not is_stale:
            request.num_computed_tokens -= len(new_token_ids)
            if request.num_in_flight_tokens:
                self._commits_next.add(request.request_id)
                self._counts.add("commit_passes")
                end = num_tokens + len(new_token_ids)
                request.num_computed_tokens += end // size * size - num_tokens // size * size
        update = AsyncScheduler._update_request_with_output
        updated = update(self, request, new_token_ids, is_stale)
        self._count_thoughts(request, updated[0])
        return updated

    # --- metrics ---------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """At most one engine step is in flight behind the one that is counted."""
        self._committed, self._commits_next = self._commits_next, set()
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(self, spec_decoding_stats: Any, *args: Any, **of: Any) -> Any:
        """As the base class; a pass that only writes a block's KV is no denoise step."""
        if of["request_id"] in self._committed:
            return spec_decoding_stats
        return super().make_spec_decoding_stats(spec_decoding_stats, *args, **of)

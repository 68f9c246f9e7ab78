"""What our workers do with a diffusion model: visits, and patches of vLLM's Model Runner V2."""

import functools
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from dllm.engine import visit
from dllm.models import FAMILIES


class Visits:
    """A base class in front of a worker of vLLM: tells the denoise loop when a visit begins."""

    serves_canvases: bool
    model_runner: Any

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM's; before it, the loop learns what the scheduler allows."""
        if self.serves_canvases:
            loop = self.model_runner.model_state.loop
            loop.begin_visit(visit.allows_more_passes(scheduler_output))
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's, whose answer then holds the number of passes, and frames of watched canvases.

        It may still be copied from the device.
        """
        answer = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self.serves_canvases and answer is not None:
            output = getattr(answer, "model_runner_output", answer)
            visit.report_passes(output, self.model_runner.model_state.loop.num_passes)
            self.model_runner.sampler.frames.attach(output)
        return answer


def prepare_runner() -> None:
    """Patch Model Runner V2 in this worker's process; calling it again changes nothing."""
    _profile_whole_canvases()
    _notice_arrivals()


@functools.cache
def _profile_whole_canvases() -> None:
    """Let memory profiling at start run the largest denoise step.

    vLLM profiles its sampler with a dummy batch that holds no canvas, so a denoise step would need
    more memory than vLLM has set aside.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from dllm.engine.warm_up import canvas_batch

    run = GPUModelRunner._dummy_sampler_run

    def _dummy_sampler_run(self: Any, hidden_states: Any) -> None:
        if self.model_config.architecture not in FAMILIES:
            return run(self, hidden_states)
        batch = canvas_batch(self.input_buffers, self.max_num_reqs, self.num_speculative_steps)
        hidden = hidden_states.new_zeros(batch.num_draft_tokens, hidden_states.shape[1])
        self.sampler.loop.begin_visit(allows_more_passes=False)
        self.sampler(self.model.compute_logits(hidden), batch)

    GPUModelRunner._dummy_sampler_run = _dummy_sampler_run  # type: ignore[method-assign]


@functools.cache
def _notice_arrivals() -> None:
    """Let the denoise loop see that a request has arrived, if the engine core is in this process.

    The engine core's input thread puts messages into a queue while the worker denoises.
    """
    from vllm.v1.engine.core import EngineCoreProc

    run = EngineCoreProc.run_busy_loop

    def run_busy_loop(self: Any) -> None:
        driver = getattr(self.model_executor, "driver_worker", None)
        worker: Any = getattr(driver, "worker", None)
        if getattr(worker, "serves_canvases", False):
            queue = self.input_queue
            worker.model_runner.model_state.loop.has_arrived = lambda: not queue.empty()
        run(self)

    EngineCoreProc.run_busy_loop = run_busy_loop  # type: ignore[method-assign]

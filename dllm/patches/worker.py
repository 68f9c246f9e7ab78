"""What our workers do with a diffusion model: visits, and what they see of the engine core."""

import functools
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from dllm.engine.visit import allows_more_passes, report_passes
from dllm.engine.warm_up import canvas_batch


class Visits:
    """A base class in front of a worker of vLLM: tells the denoise loop when a visit begins."""

    serves_canvases: bool
    model_runner: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's. Memory profiling then runs the denoise step that needs the most memory.

        vLLM profiles its sampler with a batch that holds no canvas.
        """
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.serves_canvases:
            self.model_runner._dummy_sampler_run = self._profile_sampler

    @torch.inference_mode()
    def _profile_sampler(self, hidden_states: torch.Tensor) -> None:
        """Takes the place of ``GPUModelRunner._dummy_sampler_run``, with its arguments."""
        runner = self.model_runner
        length = runner.num_speculative_steps
        batch = canvas_batch(runner.input_buffers, runner.max_num_reqs, length)
        hidden = hidden_states.new_zeros(batch.num_draft_tokens, hidden_states.shape[1])
        runner.sampler.profile(runner.model.compute_logits(hidden), batch)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM's; before it, the loop learns what the scheduler allows."""
        if self.serves_canvases:
            loop = self.model_runner.model_state.loop
            loop.begin_visit(allows_more_passes(scheduler_output))
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's, whose answer then holds the number of passes, and frames of watched canvases.

        It may still be copied from the device.
        """
        answer = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self.serves_canvases and answer is not None:
            output = getattr(answer, "model_runner_output", answer)
            report_passes(output, self.model_runner.model_state.loop.num_passes)
            self.model_runner.sampler.frames.attach(output)
        return answer


@functools.cache
def notice_arrivals() -> None:
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

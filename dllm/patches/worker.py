"""What our workers do beside vLLM's: visits of a diffusion model, records of a target's steps."""

import functools
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from dllm.drafter.recorder import Recorder
from dllm.drafter.recording import (
    layers_without_drafter,
    make_recorder,
    refuse_target_without_hidden_states,
    step_without_drafts,
)
from dllm.engine.visit import allows_more_passes, report_passes
from dllm.engine.warm_up import canvas_batch
from dllm.patches.adapters import adapt_layers, adapt_passes
from dllm.patches.new_weights import loading, refuse_other_checkpoint


class Visits:
    """A base class in front of a worker of vLLM: tells the denoise loop when a visit begins."""

    serves_canvases: bool
    vllm_config: VllmConfig
    model_runner: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's. Memory profiling then runs the denoise step that needs the most memory.

        vLLM profiles its sampler with a batch that holds no canvas.
        """
        has_adapters = self.serves_canvases and self.vllm_config.lora_config is not None
        if has_adapters:
            adapt_layers(self.model_runner)
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.serves_canvases:
            self.model_runner._dummy_sampler_run = self._profile_sampler
        if has_adapters:
            adapt_passes(self.model_runner)

    def reload_weights(self, *args: Any, **options: Any) -> None:
        """vLLM's; after an error the server goes on, and says so.

        Raises:
            ValueError: the folder ``weights_path`` has other tensors than the model
                (``new_weights``).
        """
        config, path = self.vllm_config.model_config, options.get("weights_path")
        served = config.model
        if path is not None:
            refuse_other_checkpoint(path, served)
        load = partial(super().reload_weights, *args, **options)  # type: ignore[misc]
        try:
            loading(self.model_runner.model, load)
        except BaseException:
            config.model = served  # vLLM names the new folder before it reads it
            raise

    def update_weights(self, update_info: Any) -> None:
        """vLLM's; after an error the server goes on with the weights that it has."""
        load = partial(super().update_weights, update_info)  # type: ignore[misc]
        loading(self.model_runner.model, load)

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
        if self.serves_canvases:
            self._begin_canvases()
        answer = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self.serves_canvases and answer is not None:
            output = getattr(answer, "model_runner_output", answer)
            report_passes(output, self.model_runner.model_state.loop.num_passes)
            self.model_runner.sampler.frames.attach(output)
        return answer

    @torch.inference_mode()
    def _begin_canvases(self) -> None:
        """Before canvases are denoised: first tokens, where the family asks for them."""
        first_tokens = self.model_runner.model_state.first_tokens
        step = self.model_runner.execute_model_state
        if first_tokens is not None and step is not None:
            first_tokens.write(step.hidden_states, step.input_batch)


class Records:
    """A base class in front of a worker of vLLM: records a target that has no drafter, if asked."""

    vllm_config: VllmConfig
    model_runner: Any
    recorder: Recorder | None = None

    def load_model(self, **options: Any) -> None:
        """vLLM's; then the target returns hidden states of the layers to record."""
        layers = layers_without_drafter(self.vllm_config)
        if layers:
            refuse_target_without_hidden_states(self.vllm_config)
        super().load_model(**options)  # type: ignore[misc]
        if layers:
            # vLLM counts the embedding as layer 0.
            self.model_runner.model.set_aux_hidden_state_layers(tuple(i + 1 for i in layers))
            self.model_runner.use_aux_hidden_state_outputs = True

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """vLLM's, whose steps are not recorded; those after it are."""
        times: CompilationTimes = super().compile_or_warm_up_model()  # type: ignore[misc]
        if layers_without_drafter(self.vllm_config):
            self.recorder = make_recorder(self.vllm_config)
        return times

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's; then the step is recorded. It waits for the copy of its hidden states."""
        if self.recorder is None:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        state = self.model_runner.execute_model_state
        answer = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if state is not None:
            last_sampled = self.model_runner.req_states.last_sampled_tokens
            self.recorder.observe(step_without_drafts(state, last_sampled))
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

"""What our workers do beside vLLM's: steps of a diffusion model, drafts, records of steps."""

import functools
from contextlib import nullcontext
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
from dllm.engine.warm_up import canvas_batch
from dllm.patches.adapters import adapt_passes, adapted_layers
from dllm.patches.contract import SCHEDULERS
from dllm.patches.drafting import make_our_speculators
from dllm.patches.drafts import Draft, draft_of
from dllm.patches.new_weights import loading, refuse_other_checkpoint
from dllm.patches.replace import replaces
from dllm.settings.server import options_of


class EngineSteps:
    """A base class in front of vLLM's worker: tells the denoise loop when an engine step begins."""

    vllm_config: VllmConfig
    model_runner: Any

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        # False for vLLM's built-in DiffusionGemma, which has the same architecture name.
        self.serves_canvases = vllm_config.scheduler_config.scheduler_cls in SCHEDULERS
        if self.serves_canvases:
            notice_arrivals()
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Let memory profiling run the denoise step that needs the most memory.

        vLLM profiles its sampler with a batch that holds no canvas.
        """
        has_adapters = self.serves_canvases and self.vllm_config.lora_config is not None
        with adapted_layers(self.model_runner) if has_adapters else nullcontext():
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.serves_canvases:
            self.model_runner._dummy_sampler_run = self._profile_sampler
            # Our sampler applies grammars. vLLM's worker for them would take a bit for each token
            # and row, which is 0.5 GiB for 64 canvases of 256 rows.
            self.model_runner.structured_outputs_worker = None
        if has_adapters:
            adapt_passes(self.model_runner)

    def reload_weights(self, *args: Any, **options: Any) -> None:
        """After an error the server goes on, and says so.

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
            config.model = served  # vLLM sets the new folder before it reads it
            raise

    def update_weights(self, update_info: Any) -> None:
        """After an error the server goes on with the weights that it has."""
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
        """First tell the loop what the scheduler allows."""
        if self.serves_canvases:
            loop = self.model_runner.model_state.loop
            loop.begin_engine_step(getattr(scheduler_output, "allows_more_passes", False))
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Add the number of passes, and frames of watched canvases, to vLLM's answer.

        They may still be on their way from the device.
        """
        if self.serves_canvases:
            self._before_logits()
        answer = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self.serves_canvases and answer is not None:
            output = getattr(answer, "model_runner_output", answer)
            output.num_passes = self.model_runner.model_state.loop.num_passes
            self.model_runner.sampler.frames.attach(output)
        return answer

    @torch.inference_mode()
    def _before_logits(self) -> None:
        step = self.model_runner.execute_model_state
        if step is not None:
            self.model_runner.model_state.before_logits(step.hidden_states, step.input_batch)


class Drafts:
    """A base class in front of a worker of vLLM: drafts of ours, or of other processes."""

    vllm_config: VllmConfig
    model_runner: Any

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        self._draft = draft_of(vllm_config.speculative_config)
        looks_up = options_of(vllm_config).drafter.prompt_lookup
        self._has_scheduled_drafts = looks_up or self._draft is Draft.REMOTE
        if self._draft is not None:
            make_our_speculators()
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def load_model(self, **options: Any) -> None:
        """Let drafts of ours be kept by the rule of ``verification``.

        On a CPU also those of other methods: vLLM's rule needs Triton.
        """
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

        from dllm.drafter.verification import DrafterInvariantSampler, RatioSampler

        is_ratio = options_of(self.vllm_config).drafter.verification == "rejection"
        rule = RatioSampler if is_ratio else DrafterInvariantSampler
        super().load_model(**options)  # type: ignore[misc]
        runner = self.model_runner
        theirs = getattr(runner, "rejection_sampler", None)
        is_ours = self._draft is not None or runner.device.type == "cpu"
        if isinstance(theirs, RejectionSampler) and is_ours:
            runner.rejection_sampler = rule(
                runner.sampler,
                runner.speculative_config,
                runner.device,
                watermark_key=theirs.watermark_key,
            )

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """First copy drafts that come with the schedule to where the runner reads them."""
        if self._has_scheduled_drafts:
            from dllm.drafter.scheduled import take_scheduled

            runner = self.model_runner
            logits = getattr(runner.speculator, "draft_logits", None)
            take_scheduled(runner.req_states, scheduler_output, logits)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def take_draft_token_ids(self) -> Any:
        """Make late drafts, and report all to the scheduler."""
        runner = self.model_runner
        steering = getattr(runner.speculator, "steering", None)
        if steering is None:
            return super().take_draft_token_ids()  # type: ignore[misc]
        with torch.inference_mode():
            steering.draft_late(runner.req_states, runner.draft_tokens_handler)
        drafts = super().take_draft_token_ids()  # type: ignore[misc]
        return None if drafts is None else steering.report(drafts)

    @torch.inference_mode()
    def save_context_only(self) -> None:
        """Called instead of ``take_draft_token_ids`` after a step that finished every request.

        See ``Steering.save_context_only``.
        """
        steering = getattr(self.model_runner.speculator, "steering", None)
        if steering is not None:  # only the last pipeline stage has a speculator
            steering.save_context_only()


class Records:
    """A base class in front of a worker of vLLM: records a target that has no drafter, if asked."""

    vllm_config: VllmConfig
    model_runner: Any
    recorder: Recorder | None = None

    def load_model(self, **options: Any) -> None:
        """Let the target return the hidden states of the layers to record."""
        layers = layers_without_drafter(self.vllm_config)
        if layers:
            refuse_target_without_hidden_states(self.vllm_config)
        super().load_model(**options)  # type: ignore[misc]
        if layers:
            # vLLM counts the embedding as layer 0.
            self.model_runner.model.set_aux_hidden_state_layers(tuple(i + 1 for i in layers))
            self.model_runner.use_aux_hidden_state_outputs = True

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """The steps of the warm-up are not recorded; those after it are."""
        times: CompilationTimes = super().compile_or_warm_up_model()  # type: ignore[misc]
        if layers_without_drafter(self.vllm_config):
            self.recorder = make_recorder(self.vllm_config)
        return times

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Record the step when vLLM has sampled. Waits for the copy of the step's hidden states."""
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

    @replaces(EngineCoreProc)
    def run_busy_loop(theirs: Any, self: Any) -> None:
        driver = getattr(self.model_executor, "driver_worker", None)
        worker: Any = getattr(driver, "worker", None)
        if getattr(worker, "serves_canvases", False):
            queue = self.input_queue
            worker.model_runner.model_state.loop.has_arrived = lambda: not queue.empty()
        theirs(self)

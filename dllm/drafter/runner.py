"""DraftingRunner: what vLLM's Model Runner V2 does differently where ours draft, or record.

It is a base class in front of vLLM's runner of a device (``patches.cpu_worker``,
``patches.gpu_worker``), of servers that are no diffusion model. Without drafts, and without a
recorder, it is vLLM's.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from dllm.drafter.recorder import Recorder
from dllm.drafter.recording import (
    layers_without_drafter,
    refuse_target_without_hidden_states,
    step_without_drafts,
)
from dllm.drafter.scheduled import ScheduledDrafts, take_scheduled
from dllm.drafter.verification import DrafterInvariantSampler, RatioSampler
from dllm.settings.server import options_of

Base: Any = GPUModelRunner if TYPE_CHECKING else object


class DraftingRunner(Base):
    """Keeps drafts by our rule, makes late ones, takes those of the scheduler, and records."""

    rejection_sampler: Any
    recorder: Recorder | None = None  # of a target without a drafter, from the end of the warm-up

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._options = options_of(vllm_config).drafter
        speculator = self.speculator
        self._steering = getattr(speculator, "steering", None)
        is_scheduled = isinstance(speculator, ScheduledDrafts)
        self._has_scheduled_drafts = self._options.prompt_lookup or is_scheduled
        self._drafts_are_ours = is_scheduled or self._steering is not None

    def load_model(self, *args: Any, **options: Any) -> None:
        """Raises ValueError for a target to be recorded that does not give its layers' outputs."""
        layers = layers_without_drafter(self.vllm_config)
        if layers:
            refuse_target_without_hidden_states(self.vllm_config)
        super().load_model(*args, **options)
        if layers:
            # vLLM counts the embedding as layer 0.
            self.model.set_aux_hidden_state_layers(tuple(i + 1 for i in layers))
            self.use_aux_hidden_state_outputs = True
        theirs = self.rejection_sampler
        # On a CPU also for drafts of other methods: vLLM's rule needs Triton.
        is_ours = self._drafts_are_ours or self.device.type == "cpu"
        if isinstance(theirs, RejectionSampler) and is_ours:
            is_ratio = self._options.verification == "rejection"
            rule = RatioSampler if is_ratio else DrafterInvariantSampler
            self.rejection_sampler = rule(
                self.sampler,
                self.speculative_config,
                self.device,
                watermark_key=theirs.watermark_key,
            )

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **options: Any) -> Any:
        if self._has_scheduled_drafts:
            logits = getattr(self.speculator, "draft_logits", None)
            take_scheduled(self.req_states, scheduler_output, logits)
        return super().execute_model(scheduler_output, *args, **options)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Record the step when vLLM has sampled. Waits for the copy of the step's hidden states."""
        state = self.execute_model_state
        answer = super().sample_tokens(grammar_output)
        if self.recorder is not None and state is not None:
            last_sampled = self.req_states.last_sampled_tokens
            self.recorder.observe(step_without_drafts(state, last_sampled))
        return answer

    @torch.inference_mode()
    def take_draft_token_ids(self) -> Any:
        if self._steering is None:
            return super().take_draft_token_ids()
        self._steering.draft_late(self.req_states, self.draft_tokens_handler)
        drafts = super().take_draft_token_ids()
        return None if drafts is None else self._steering.report(drafts)

    @torch.inference_mode()
    def save_context_only(self) -> None:
        """Called instead of ``take_draft_token_ids`` after a step that finished every request."""
        if self._steering is not None:  # only the last pipeline stage has a speculator
            self._steering.save_context_only()

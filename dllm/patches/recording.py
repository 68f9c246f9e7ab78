"""What our workers do on a server that records a target without a drafter."""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.worker_base import CompilationTimes

from dllm.drafter.recorder import Recorder
from dllm.drafter.recording import (
    give_hidden_states,
    layers_without_drafter,
    make_recorder,
    refuse_target_without_hidden_states,
    step_without_drafts,
)


class Records:
    """A base class in front of a worker of vLLM: records each step, if the server asks for it."""

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
            give_hidden_states(self.model_runner, layers)

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

"""CanvasScheduler: schedules a canvas whole or not at all, and counts only causal KV.

To vLLM's scheduler a canvas is draft tokens (``request.spec_token_ids``). When a block is emitted,
its tokens are added to ``request.num_tokens`` but not to ``num_computed_tokens``. So vLLM's
scheduler schedules the block's tokens once more in the next step, in front of the next canvas. That
pass is causal, and writes the KV that is kept.
"""

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dllm.engine.prompt_logprobs import PendingPromptLogprobs
from dllm.settings.request import requested_canvas_width
from dllm.settings.server import PluginOptions


class CanvasScheduler(Scheduler):
    """vLLM's synchronous scheduler, changed for canvases and emitted blocks."""

    def __init__(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args, **kwargs)
        self._separate_commit = PluginOptions.from_vllm(self.vllm_config).commit == "separate"
        self._prompt_logprobs = PendingPromptLogprobs()

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the canvases from the worker, each cut to the width that its request asked for."""
        for i, req_id in enumerate(draft_token_ids.req_ids):
            request = self.requests.get(req_id)
            if request is not None:
                width = requested_canvas_width(request.sampling_params, self.num_spec_tokens)
                draft_token_ids.draft_token_ids[i] = draft_token_ids.draft_token_ids[i][:width]
        super().update_draft_token_ids(draft_token_ids)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step in which every canvas is whole.

        vLLM's scheduler cuts draft tokens to the token budget that is left, and a cut canvas would
        be denoised as if it were complete. So a canvas that does not fit is taken out for this
        step.
        """
        withheld = self._withhold_canvases_that_do_not_fit()
        output = super().schedule(throttle_prefills)
        for request, canvas in withheld:
            # Give the canvas back, except in two cases: a request that is scheduled without its
            # canvas gets it back from the worker, and a preempted request starts a new canvas.
            is_running = request.status == RequestStatus.RUNNING
            if is_running and request.request_id not in output.num_scheduled_tokens:
                request.spec_token_ids = canvas
        return output

    def _withhold_canvases_that_do_not_fit(self) -> list[tuple[Request, list[int]]]:
        """Take out the canvases that this step has no room for; return (request, canvas) pairs.

        With ``commit: separate``, also the canvases behind an emitted block: the block gets a pass
        of its own.
        """
        budget = self.max_num_scheduled_tokens
        cap = self.scheduler_config.long_prefill_token_threshold or budget
        withheld = []
        for request in self.running:
            # A canvas ends where the model's context ends: cut what is behind it.
            room = max(self.max_model_len - request.num_tokens, 0)
            del request.spec_token_ids[room:]
            head_len = request.num_tokens - request.num_computed_tokens
            needed = head_len + len(request.spec_token_ids)
            commits_alone = self._separate_commit and head_len > 0
            if request.spec_token_ids and (needed > min(budget, cap) or commits_alone):
                withheld.append((request, request.spec_token_ids))
                request.spec_token_ids = []
                needed = head_len
            budget -= min(needed, budget, cap)
        return withheld

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """vLLM's accounting of a step; prompt logprobs are kept until the first block."""
        self._prompt_logprobs.postpone(model_runner_output, self.requests)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Append an emitted block to its request without counting the block's KV as computed.

        A bidirectional pass wrote that KV. vLLM puts KV up to ``num_computed_tokens`` into the
        prefix cache, so the block gets there after its causal pass, and not before.
        """
        if not is_stale:
            request.num_computed_tokens -= len(new_token_ids)
        return super()._update_request_with_output(request, new_token_ids, is_stale)

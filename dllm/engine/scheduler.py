"""Scheduling of canvases: whole or not at all, and no KV counted before its causal pass.

The canvas rides as draft tokens (``request.spec_token_ids``). An emitted block is in
``request.num_tokens`` but not yet in ``num_computed_tokens``: the base scheduler then schedules
it, causal, at the head of the next span, with the next canvas behind it.
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
    """vLLM's synchronous scheduler with the accounting of diffusion blocks."""

    def __init__(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args, **kwargs)
        self._separate_commit = PluginOptions.from_vllm(self.vllm_config).commit == "separate"
        self._prompt_logprobs = PendingPromptLogprobs()

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the worker's canvases, each trimmed to the width its request asked for."""
        for i, req_id in enumerate(draft_token_ids.req_ids):
            request = self.requests.get(req_id)
            if request is not None:
                width = requested_canvas_width(request.sampling_params, self.num_spec_tokens)
                draft_token_ids.draft_token_ids[i] = draft_token_ids.draft_token_ids[i][:width]
        super().update_draft_token_ids(draft_token_ids)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step in which every canvas is whole.

        The base scheduler cuts draft tokens to the token budget that is left; a cut canvas would
        be denoised as if it were complete. Canvases that do not fit are withheld for this step.
        """
        withheld = self._withhold_canvases_that_do_not_fit()
        output = super().schedule(throttle_prefills)
        for request, canvas in withheld:
            # A request that ran without its canvas gets it back from the worker, and a preempted
            # one will start another.
            is_running = request.status == RequestStatus.RUNNING
            if is_running and request.request_id not in output.num_scheduled_tokens:
                request.spec_token_ids = canvas
        return output

    def _withhold_canvases_that_do_not_fit(self) -> list[tuple[Request, list[int]]]:
        """Take the canvases out of the running requests that cannot get one in this step."""
        budget = self.max_num_scheduled_tokens
        cap = self.scheduler_config.long_prefill_token_threshold or budget
        withheld = []
        for request in self.running:
            # A canvas ends with the model's context at the latest.
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
        """Account for a step; prompt logprobs leave with the first block."""
        self._prompt_logprobs.postpone(model_runner_output, self.requests)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Append an emitted block without counting its KV, which a bidirectional pass wrote.

        The prefix cache hashes blocks up to ``num_computed_tokens``: the block enters it after
        its causal pass, and never before.
        """
        if not is_stale:
            request.num_computed_tokens -= len(new_token_ids)
        return super()._update_request_with_output(request, new_token_ids, is_stale)

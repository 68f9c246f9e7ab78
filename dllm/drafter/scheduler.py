"""vLLM's schedulers of servers that draft: counts go to the statistics, places for drafts are cut.

Where steps are scheduled one by one, the worker has the width policy (``steering``), which then
knows how sure the drafter is. Where they are scheduled ahead, ``AsyncDraftingScheduler`` has it.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from dllm.drafter.metrics import CountedDrafts, Counts, send_drafting
from dllm.drafter.widths.make import make_policy, may_skip_passes
from dllm.drafter.widths.policy import VerifiedStep
from dllm.engine.sessions import SessionScheduler
from dllm.settings.server import options_of


class Slots(dict[str, int]):
    """Requests, and the numbers below ``count`` that a policy knows them by."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._free = list(range(count))

    def keep(self, names: Collection[str]) -> None:
        """Give these requests, at most ``count``, a number; others lose theirs if need be."""
        if len(set(names) - self.keys()) > len(self._free):
            for name in self.keys() - set(names):
                self._free.append(self.pop(name))
        for name in names:
            if name not in self:
                self[name] = self._free.pop()

    def of(self, names: Collection[str]) -> np.ndarray:
        """``[rows]``"""
        return np.array([self[name] for name in names], dtype=np.int64)


class StepRows:
    """What the scheduler knows of a step, row by row, without requests that are over.

    Made before vLLM accounts for the step, which ends requests.

    Attributes:
        names: of the requests.
        in_prompt, verified: as in ``VerifiedStep``.
    """

    def __init__(self, scheduled: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        drafts = scheduled.scheduled_spec_decode_tokens
        cut = scheduled.num_invalid_spec_tokens or {}  # by grammars
        # A request that begins with one token left, or goes on after a preemption, gets drafts of
        # nobody from vLLM.
        begun = {each.req_id for each in scheduled.scheduled_new_reqs}
        counts = scheduled.num_scheduled_tokens
        self.names = [
            name for name in counts if name in requests and not requests[name].is_finished()
        ]
        num_drafts = np.array([len(drafts.get(name, ())) for name in self.names], dtype=np.int64)
        num_cut = np.array([cut.get(name, 0) for name in self.names], dtype=np.int64)
        num_tokens = np.array([counts[name] for name in self.names], dtype=np.int64)
        is_first = [name in begun or not requests[name].num_output_tokens for name in self.names]
        self.in_prompt = np.array(is_first, dtype=bool) | (num_tokens > 1 + num_drafts)
        self.verified = np.where(self.in_prompt, 0, num_drafts - num_cut)

    def accepted(self, answer: ModelRunnerOutput) -> np.ndarray:
        """``[rows]``, as in ``VerifiedStep``. vLLM has cut the tokens behind the end of an answer.

        The last token of a row is the target's own, or a draft that ends the answer.
        """
        sampled, row_of = answer.sampled_token_ids, answer.req_id_to_index
        each = [len(sampled[row_of[name]]) if sampled else 0 for name in self.names]
        accepted: np.ndarray = np.clip(np.array(each, dtype=np.int64) - 1, 0, self.verified)
        return accepted


def num_drafts_behind(scheduled: SchedulerOutput) -> int:
    """How many drafts of each request are made behind a step; none if it can use none."""
    is_skipped = getattr(scheduled, "skip_drafts", False)  # from 0.33 on
    return 0 if is_skipped else scheduled.num_spec_tokens_to_schedule


class DraftingScheduler(SessionScheduler):
    """vLLM's; adds the drafter's counts (``metrics``) to its statistics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counts = Counts()  # of what happened after the last statistics were made

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        if isinstance(draft_token_ids, CountedDrafts):
            self._counts.merge(draft_token_ids.counts)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics of the step with our counts in them; None if statistics are off."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            self._send_counts(stats)
        return stats

    def _send_counts(self, stats: SchedulerStats) -> None:
        if self._counts or stats.spec_decoding_stats is not None:
            send_drafting(stats, self._counts.take())


class AsyncDraftingScheduler(DraftingScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler; the policy decides where a step is scheduled.

    It says whether the drafter runs behind the step, and how many of these drafts each request
    verifies in its next one. What has happened is known up to the last step but one.

    Attributes:
        width_policy: does not read how sure the drafter is: that stays on the device.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        num_slots = self.scheduler_config.max_num_seqs
        options = options_of(self.vllm_config).drafter
        self.width_policy = make_policy(
            options, self.num_spec_tokens, num_slots, reads_confidence=False
        )
        self.width_policy.may_skip = may_skip_passes(self.vllm_config)
        self._slots = Slots(num_slots)
        self._drafted = False  # there was a draft pass behind the last step that is accounted for

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """vLLM gives every request behind its prompt places for N drafts; the policy cuts them."""
        super()._update_after_schedule(scheduler_output)
        self._slots.keep([each.request_id for each in self.running])
        begun = [each.req_id for each in scheduler_output.scheduled_new_reqs]
        if begun:
            self.width_policy.forget_requests(self._slots.of(begun))
        most = num_drafts_behind(scheduler_output)
        scheduled = [self.requests[name] for name in scheduler_output.num_scheduled_tokens]
        rows = [each for each in scheduled if most and each.spec_token_ids]
        slots = self._slots.of([each.request_id for each in rows])
        widths = np.zeros(len(rows), dtype=np.int64)
        wants = self.width_policy.wants_drafts(slots) and len(rows) > 0
        if wants:
            widths = self.width_policy.widths(slots, None)
        elif self.width_policy.may_skip:
            scheduler_output.num_spec_tokens_to_schedule = most = 0
        for request, width in zip(rows, widths.tolist(), strict=True):
            request.spec_token_ids = request.spec_token_ids[:width]
            self._counts.add("draft_widths", label=str(min(width, most)))
        if most and scheduled:
            self._counts.add("draft_passes")
            self._counts.add("drafted_tokens", len(scheduled) * most)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Let the policy learn from the step."""
        step = None
        if self.width_policy.reads_outcomes:
            known = {
                name: self.requests[name] for name in self._slots.keys() & self.requests.keys()
            }
            step = StepRows(scheduler_output, known)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if not scheduler_output.num_scheduled_tokens:
            return outputs
        if step is not None:
            slots = self._slots.of(step.names)
            rows = slots, step.in_prompt, step.verified, step.accepted(model_runner_output)
            if len(step.names) < len(scheduler_output.num_scheduled_tokens):
                self.width_policy.note_wait(None)  # rows of ended requests took part of the time
            self.width_policy.observe(VerifiedStep(*rows, self._drafted))
        self._drafted = num_drafts_behind(scheduler_output) > 0
        return outputs

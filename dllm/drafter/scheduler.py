"""vLLM's schedulers of servers that draft: they ask the width policy, and cut drafts to its widths.

    a step is scheduled      the policy says whether drafts are made behind it
    its outcome is known     the policy learns from it
    the drafts are there     the policy says how many of them the next step verifies

Where steps are scheduled ahead (``AsyncDraftingScheduler``), widths are chosen with the schedule:
from what has happened up to the last step but one, and without knowing how sure the drafter is.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from dllm.drafter.metrics import DraftReport, send_drafting
from dllm.drafter.pair import end_ids
from dllm.drafter.prompt_lookup import Lookups
from dllm.drafter.widths.make import make_driver
from dllm.engine.metrics import Counts
from dllm.engine.sessions import SessionScheduler
from dllm.settings.server import options_of


class StepRows:
    """What the scheduler knows of a step, row by row, without requests that are over.

    Made before vLLM accounts for the step, which ends requests. Arrays as in ``VerifiedStep``.
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
        self.num_over = len(counts) - len(self.names)
        num_drafts = np.array([len(drafts.get(name, ())) for name in self.names], dtype=np.int64)
        num_cut = np.array([cut.get(name, 0) for name in self.names], dtype=np.int64)
        num_tokens = np.array([counts[name] for name in self.names], dtype=np.int64)
        is_first = [name in begun or not requests[name].num_output_tokens for name in self.names]
        self.in_prompt = np.array(is_first, dtype=bool) | (num_tokens > 1 + num_drafts)
        self.verified = np.where(self.in_prompt, 0, num_drafts - num_cut)

    def accepted(self, answer: ModelRunnerOutput) -> np.ndarray:
        """``[rows]``. The last token (vLLM cuts there) is the target's own, or ends the answer."""
        sampled, request_of = answer.sampled_token_ids, answer.req_id_to_index
        each = [len(sampled[request_of[name]]) if sampled else 0 for name in self.names]
        accepted: np.ndarray = np.clip(np.array(each, dtype=np.int64) - 1, 0, self.verified)
        return accepted


def num_drafts_behind(scheduled: SchedulerOutput) -> int:
    """How many drafts of each request are made behind a step; none if it can use none."""
    is_skipped = getattr(scheduled, "skip_drafts", False)  # from 0.33 on
    return 0 if is_skipped else scheduled.num_spec_tokens_to_schedule


class DraftingScheduler(SessionScheduler):
    """vLLM's, with the width policy; counts go to the statistics (``metrics``)."""

    reads_confidence = True  # the worker says how sure the drafter is

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counts = Counts()  # of what happened after the last statistics were made
        self.driver = make_driver(self.vllm_config, self._counts, self.reads_confidence)
        self._lookups = make_lookups(self.vllm_config)
        self._can_use: list[str] = []  # requests that can use drafts behind the last step
        self._drafted = False  # there was a draft pass behind the last step that is accounted for

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        begun = [each.req_id for each in scheduler_output.scheduled_new_reqs]
        self.driver.keep([each.request_id for each in self.running], begun)
        self._plan(scheduler_output)

    def _plan(self, scheduled: SchedulerOutput) -> None:
        names = scheduled.num_scheduled_tokens if num_drafts_behind(scheduled) else ()
        self._can_use = [name for name in names if not self.requests[name].is_prefill_chunk]
        if not self.driver.plan(self._can_use) and self.driver.policy.may_skip:
            scheduled.num_spec_tokens_to_schedule = 0

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        # vLLM pads a prompt of one token with places for drafts, and its worker scores these, too.
        for name in [*model_runner_output.prompt_logprobs_dict]:
            if name in self.requests and self.requests[name].num_prompt_tokens == 1:
                del model_runner_output.prompt_logprobs_dict[name]
        step = None
        if self._reads_steps:
            names = self.driver.known(scheduler_output.num_scheduled_tokens)
            known = {name: self.requests[name] for name in names if name in self.requests}
            step = StepRows(scheduler_output, known)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if step is not None:
            self._follow(step, step.accepted(model_runner_output))
        if scheduler_output.num_scheduled_tokens:
            self._drafted = num_drafts_behind(scheduler_output) > 0
        return outputs

    @property
    def _reads_steps(self) -> bool:
        return self.driver.policy.reads_outcomes

    def _follow(self, step: StepRows, accepted: np.ndarray) -> None:
        """``accepted``: ``[rows]``, as in ``VerifiedStep``."""
        if step.num_over:  # their rows took part of the time
            self.driver.policy.note_wait(None)
        elif not step.names:
            return
        rows = step.names, step.in_prompt, step.verified, accepted
        self.driver.observe(*rows, self._drafted)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(self._cut(draft_token_ids))

    def _cut(self, given: DraftTokenIds) -> DraftTokenIds:
        drafts = dict(zip(given.req_ids, given.draft_token_ids, strict=True))
        confidence = None
        if isinstance(given, DraftReport):
            self._counts.merge(given.counts)
            confidence = given.confidence
            if given.is_renewed:
                self.driver.policy.forget_drafter()
        if any(drafts.values()):
            self._counts.add("draft_passes")
            self._counts.add("drafted_tokens", sum(map(len, drafts.values())))
        names = [name for name in self._can_use if name in drafts and self._is_running(name)]
        if confidence is not None:
            request_of = {name: row for row, name in enumerate(drafts)}
            confidence = confidence[[request_of[name] for name in names]]
        chosen = self._chosen({name: drafts[name] for name in names}, confidence)
        self.driver.count(chosen.values())
        drafts |= chosen
        return DraftTokenIds([*drafts], [*drafts.values()])

    def _is_running(self, name: str) -> bool:
        return name in self.requests and not self.requests[name].is_finished()

    def _chosen(
        self, drafts: dict[str, list[int]], confidence: np.ndarray | None
    ) -> dict[str, list[int]]:
        """What each of these requests verifies: of its drafts, or of what is looked up instead."""
        if drafts and self._lookups is not None:
            found = self._lookups.of([self.requests[name] for name in drafts])
            if self.driver.wants_lookup(drafts, found.confidence):
                drafts = dict(zip(drafts, found.tokens.tolist(), strict=True))
                confidence = found.confidence
        if not any(drafts.values()):
            return drafts
        widths = self.driver.widths(drafts, confidence)
        return {
            name: tokens[:width]
            for (name, tokens), width in zip(drafts.items(), widths, strict=True)
        }

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            self._send_counts(stats)
        return stats

    def _send_counts(self, stats: SchedulerStats) -> None:
        if self._counts or stats.spec_decoding_stats is not None:
            send_drafting(stats, self._counts.take())


class AsyncDraftingScheduler(DraftingScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler. Drafts, and how sure the drafter is, stay on the device."""

    reads_confidence = False

    def _plan(self, scheduled: SchedulerOutput) -> None:
        """vLLM gives every request behind its prompt places for N drafts: cut them, too."""
        super()._plan(scheduled)
        most = num_drafts_behind(scheduled)
        widths = [0] * len(self._can_use)
        if most and self._can_use:
            widths = self.driver.widths(self._can_use)
        for name, width in zip(self._can_use, widths, strict=True):
            request = self.requests[name]
            request.spec_token_ids = request.spec_token_ids[:width]
        self.driver.count([self.requests[name].spec_token_ids for name in self._can_use])
        if most and scheduled.num_scheduled_tokens:
            self._counts.add("draft_passes")
            self._counts.add("drafted_tokens", len(scheduled.num_scheduled_tokens) * most)


def make_lookups(vllm_config: VllmConfig) -> Lookups | None:
    if not options_of(vllm_config).drafter.prompt_lookup:
        return None
    return Lookups(vllm_config.num_speculative_tokens, end_ids(vllm_config))

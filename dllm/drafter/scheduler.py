"""vLLM's scheduler, which passes the drafter's counts on."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds

from dllm.drafter.metrics import CountedDrafts, Counts, send_drafting


class DraftingScheduler(Scheduler):
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
        if self._counts:
            send_drafting(stats, self._counts.take())

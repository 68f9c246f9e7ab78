"""vLLM's scheduler, which also passes the drafter's counts on to the metrics."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from dllm.drafter.metrics import CountedDrafts, DraftingCounts


class DraftingScheduler(Scheduler):
    """Schedules exactly as vLLM's; adds the drafter's counts (``metrics``) to its statistics."""

    _counts: DraftingCounts | None = None  # received after the last statistics were made

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the drafts, and add up the counts that come with them."""
        super().update_draft_token_ids(draft_token_ids)
        if isinstance(draft_token_ids, CountedDrafts):
            if self._counts is None:
                self._counts = draft_token_ids.counts
            else:
                self._counts.add(draft_token_ids.counts)

    def make_stats(
        self,
        spec_decoding_stats: Any = None,
        kv_connector_stats: Any = None,
        cudagraph_stats: Any = None,
        perf_stats: Any = None,
        ec_connector_stats: Any = None,
    ) -> Any:
        """vLLM's statistics of the step with our counts in them; None if statistics are off."""
        stats = super().make_stats(
            spec_decoding_stats, kv_connector_stats, cudagraph_stats, perf_stats, ec_connector_stats
        )
        if stats is not None and self._counts is not None:
            self._counts.ride_with(stats)
            self._counts = None
        return stats

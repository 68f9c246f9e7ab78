"""vLLM's scheduler, which verifies fewer drafts while KV pages are short, and passes counts on."""

from functools import cached_property
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from dllm.drafter.metrics import CountedDrafts, Counts, send_drafting


class DraftingScheduler(Scheduler):
    """Schedules as vLLM's; adds the drafter's counts (``metrics``) to its statistics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counts = Counts()  # of what happened after the last statistics were made

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """vLLM's schedule; drafts that only a preemption would make room for are dropped before.

        A draft may save a step. A preempted request computes all of its tokens again.
        """
        num_free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        if num_free < len(self.running) * self._most_pages:
            self._drop_drafts(num_free)
        return super().schedule(throttle_prefills)

    @cached_property
    def _most_pages(self) -> int:
        """The most pages that a request behind its prompt needs for a step."""
        groups = self.kv_cache_config.kv_cache_groups
        num_tokens = 1 + self.num_spec_tokens + self.num_lookahead_tokens
        return sum(1 + -(-num_tokens // group.kv_cache_spec.block_size) for group in groups)

    def _drop_drafts(self, num_free: int) -> None:
        """Drop the drafts of the last requests, until ``num_free`` pages are enough for all."""
        lacking = sum(map(self._pages_to_allocate, self.running)) - num_free
        for request in reversed(self.running):  # vLLM preempts from the end, too
            if lacking <= 0:
                return
            if request.spec_token_ids:
                lacking -= self._pages_to_allocate(request)
                request.spec_token_ids = []
                lacking += self._pages_to_allocate(request)

    def _pages_to_allocate(self, request: Request) -> int:
        """KV pages that a running request needs for its next step, beside those that it has."""
        manager = self.kv_cache_manager
        chunk_end = request.num_computed_tokens + self.max_num_scheduled_tokens
        own = min(request.num_tokens_with_spec, chunk_end, self.max_model_len)
        pages: int = manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=min(own + self.num_lookahead_tokens, self.max_model_len),
            new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=request.num_computed_tokens,
            num_local_computed_tokens=request.num_computed_tokens,
            num_tokens_main_model=own,
        )
        return pages

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the drafts, and add up the counts that come with them."""
        super().update_draft_token_ids(draft_token_ids)
        if isinstance(draft_token_ids, CountedDrafts):
            self._counts.merge(draft_token_ids.counts)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics of the step, with our counts in them; None if statistics are off."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            self._send_counts(stats)
        return stats

    def _send_counts(self, stats: SchedulerStats) -> None:
        """Put into the statistics what was counted after the last ones."""
        if self._counts:
            send_drafting(stats, self._counts.take())

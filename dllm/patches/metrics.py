"""A patch of the front end: Prometheus counts what our scheduler and drafters send it."""

import functools
from typing import Any

from dllm.patches.replace import replaces


@functools.cache
def read_statistics() -> None:
    """Our counts travel in vLLM's SchedulerStats."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

    from dllm.drafter.metrics import record_drafting
    from dllm.engine.metrics import record_counts

    @replaces(StatLoggerManager)
    def record(
        theirs: Any,
        self: Any,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
    ) -> None:
        for logger in self.stat_loggers:
            if isinstance(logger, PrometheusStatLogger) and scheduler_stats is not None:
                labels = [str(value) for value in logger.per_engine_labelvalues[engine_idx or 0]]
                record_drafting(scheduler_stats, labels)
                record_counts(scheduler_stats, labels)
        theirs(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

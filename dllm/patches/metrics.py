"""In the front end Prometheus counts what our scheduler and drafters send it.

Our counts travel in vLLM's SchedulerStats.
"""

from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

from dllm.drafter.metrics import show_workers
from dllm.engine.metrics import record


class CountingLoggers(StatLoggerManager):
    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
    ) -> None:
        for logger in self.stat_loggers:
            if isinstance(logger, PrometheusStatLogger) and scheduler_stats is not None:
                labels = [str(value) for value in logger.per_engine_labelvalues[engine_idx or 0]]
                record(scheduler_stats, labels)
                show_workers(scheduler_stats, labels)
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

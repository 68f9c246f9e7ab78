"""What a server has that runs our worker, whatever it serves: the worker, metrics, one lifetime."""

import functools
from typing import Any

from dllm.patches.contract import CPU_WORKER, GPU_WORKER
from dllm.patches.cpu import set_cpu_worker


def use_our_worker(vllm_config: Any, needs: str, advice: str = "Leave the flag out.") -> None:
    """Choose our worker of this platform for a server of any model, and prepare this front end.

    Args:
        needs: who needs it, as the message begins: "recording needs".

    Raises:
        ValueError: the user chose another worker.
    """
    from vllm.platforms import current_platform

    worker = CPU_WORKER if current_platform.is_cpu() else GPU_WORKER
    parallel = vllm_config.parallel_config
    if parallel.worker_cls not in ("auto", worker):
        raise ValueError(f"--worker-cls {parallel.worker_cls}: {needs} {worker}. {advice}")
    parallel.worker_cls = worker
    set_cpu_worker(vllm_config)
    prepare_front_end()


def prepare_front_end() -> None:
    """Read our metrics in this process, and let those that it is going to start end with it."""
    from dllm.patches.lifetime import end_together

    _read_statistics()
    end_together()


@functools.cache
def _read_statistics() -> None:
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

    from dllm.drafter.metrics import record_drafting
    from dllm.engine.metrics import record_counts

    record = StatLoggerManager.record

    def record_ours(
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
        record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    StatLoggerManager.record = record_ours  # type: ignore[method-assign]

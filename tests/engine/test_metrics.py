"""engine/metrics.py: a count on its way from the scheduler's statistics to Prometheus."""

import prometheus_client
from vllm.v1.metrics.stats import SchedulerStats

from dllm.engine import metrics


def counted(model: str) -> float | None:
    labels = {"model_name": model, "engine": "0"}
    return prometheus_client.REGISTRY.get_sample_value("dllm:commit_passes_total", labels)


def test_commit_passes_reach_prometheus_and_leave_the_statistics() -> None:
    counts = metrics.Counts()
    for carried in (None, {"another": 1}):
        stats = SchedulerStats(ec_connector_stats=carried)
        counts.add("commit_passes", 3)
        metrics.send(stats, counts.take())
        metrics.record(stats, ["of this test", "0"])
        metrics.record(stats, ["of this test", "0"])  # not twice
        assert stats.ec_connector_stats == carried and not counts
    assert counted("of this test") == 6


def test_without_such_passes_nothing_is_counted() -> None:
    metrics.record(SchedulerStats(), ["idle", "0"])
    assert counted("idle") is None

"""engine/metrics.py: a count on its way from the scheduler's statistics to Prometheus."""

import prometheus_client
from vllm.v1.metrics.stats import SchedulerStats

from dllm.engine import metrics
from dllm.engine.channels import put_into


def counted(model: str) -> float | None:
    labels = {"model_name": model, "engine": "0"}
    return prometheus_client.REGISTRY.get_sample_value("dllm:commit_passes_total", labels)


def test_commit_passes_reach_prometheus_and_leave_the_statistics() -> None:
    for carried in (None, {"another": 1}):
        stats = SchedulerStats(ec_connector_stats=carried)
        put_into(stats, metrics.KEY, 3)
        metrics.record_counts(stats, ["of this test", "0"])
        metrics.record_counts(stats, ["of this test", "0"])  # not twice
        assert stats.ec_connector_stats == carried
    assert counted("of this test") == 6


def test_without_such_passes_nothing_is_counted() -> None:
    metrics.record_counts(SchedulerStats(), ["idle", "0"])
    assert counted("idle") is None

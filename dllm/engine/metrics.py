"""Counts of ours in vLLM's statistics, and the counter of diffusion models: ``dllm:commit_passes``.

vLLM's own count denoise steps (``vllm:diffusion_num_denoising_steps``) and the positions of their
canvases. Under asynchronous scheduling a block also takes a pass that only writes its KV
(``engine.async_scheduler``). How the count travels:

    engine core   the scheduler puts it into vLLM's statistics
    front end     adds it to the counter under /metrics
"""

import functools
from collections.abc import Sequence
from typing import Any

import prometheus_client
from vllm.v1.metrics.stats import SchedulerStats

LABELS = ("model_name", "engine")
KEY = "dllm_commit_passes"

# vLLM's statistics have no field for plugins. `ec_connector_stats` is a dictionary that vLLM itself
# uses only where multimodal encoders run on another server.


def put_into(stats: SchedulerStats, key: str, counts: Any) -> None:
    """Engine core: put counts into vLLM's statistics, which go to the front end."""
    stats.ec_connector_stats = {**(stats.ec_connector_stats or {}), key: counts}


def take_out(stats: SchedulerStats, key: str) -> Any:
    """Front end: take them out again; None if there are none."""
    carried = dict(stats.ec_connector_stats or {})
    counts = carried.pop(key, None)
    if counts is not None:
        stats.ec_connector_stats = carried or None
    return counts


def record_commit_passes(stats: SchedulerStats, labels: Sequence[str]) -> None:
    """Front end: move the number of such passes (KEY) from the statistics to the counter.

    Args:
        labels: values of LABELS.
    """
    count = take_out(stats, KEY)
    if count is not None:
        _counter().labels(*labels).inc(count)


@functools.cache
def _counter() -> prometheus_client.Counter:
    """Made once in a process: Prometheus registers a name only once."""
    text = "Passes of a request that only wrote the KV of a block."
    return prometheus_client.Counter("dllm:commit_passes", text, LABELS)

"""Counts of ours in vLLM's statistics (``engine.channels``), and the counters of diffusion models.

``dllm:commit_passes``: vLLM's own count denoise steps (``vllm:diffusion_num_denoising_steps``) and
the positions of their canvases. Under asynchronous scheduling a block also takes a pass that only
writes its KV (``engine.async_scheduler``).

``dllm:thoughts_ended_by_budget``: thoughts that have taken their whole budget, and end there
(``engine.thoughts``).
"""

import functools
from collections.abc import Sequence

import prometheus_client
from vllm.v1.metrics.stats import SchedulerStats

from dllm.engine.channels import take_out

LABELS = ("model_name", "engine")
KEY = "dllm_commit_passes"
KEY_OF_THOUGHTS = "dllm_thoughts_ended_by_budget"
COUNTERS = {  # by key: name and text
    KEY: ("dllm:commit_passes", "Passes of a request that only wrote the KV of a block."),
    KEY_OF_THOUGHTS: (
        "dllm:thoughts_ended_by_budget",
        "Thoughts that took their whole thinking budget, and ended there.",
    ),
}


def record_counts(stats: SchedulerStats, labels: Sequence[str]) -> None:
    """Front end: move the counts from the statistics to their counters under /metrics."""
    for key in COUNTERS:
        count = take_out(stats, key)
        if count is not None:
            _counter(key).labels(*labels).inc(count)


@functools.cache
def _counter(key: str) -> prometheus_client.Counter:
    """Made once in a process: Prometheus registers a name only once."""
    return prometheus_client.Counter(*COUNTERS[key], LABELS)

"""What a worker that drafts tells the scheduler, and which draft workers are asked (a gauge)."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import prometheus_client
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds

from dllm.engine.channels import put_into, take_out
from dllm.engine.metrics import LABELS, Counts, send

WORKERS = "dllm_draft_workers"


@dataclass
class DraftReport(DraftTokenIds):
    """vLLM's message from the worker to the scheduler (drafts of each request), with more in it."""

    counts: Counts  # of the steps after the last report
    confidence: np.ndarray | None = None  # [requests, N], as in WidthPolicy.widths, if asked for
    is_renewed: bool = False  # the drafter has other weights than at the last report


def send_drafting(
    stats: SchedulerStats, counts: Counts, workers: Mapping[str, bool] | None = None
) -> None:
    """Runs in the engine core. ``workers``: for each draft worker, whether it is asked."""
    if stats.spec_decoding_stats is not None:
        for place, count in enumerate(stats.spec_decoding_stats.num_draft_tokens_per_pos):
            counts.add("verified_tokens_per_pos", count, str(place))
    send(stats, counts)
    if workers is not None:
        put_into(stats, WORKERS, workers)


def show_workers(stats: SchedulerStats, labels: Sequence[str]) -> None:
    """Runs in the front end."""
    workers = take_out(stats, WORKERS)
    if workers is None:
        return
    for address, is_up in workers.items():
        _worker_up().labels(*labels, address).set(is_up)
    for address in _shown.get(tuple(labels), set()) - workers.keys():  # no longer listed
        _worker_up().labels(*labels, address).set(0)  # other front ends go on showing it
        _worker_up().remove(*labels, address)
    _shown[tuple(labels)] = set(workers)


_shown: dict[tuple[str, ...], set[str]] = {}  # draft workers of each engine in the gauge


@functools.cache
def _worker_up() -> prometheus_client.Gauge:
    text = "1 if a draft worker is asked, 0 if it is out."
    return prometheus_client.Gauge(
        "dllm:remote_worker_up", text, (*LABELS, "worker"), multiprocess_mode="mostrecent"
    )

"""Prometheus metrics of drafting that vLLM's own (``vllm:spec_decode_*``) do not have: how much was
drafted, how long that took, which widths were chosen, how draft workers answered. A count travels:

    worker        sends its ``Counts`` to the scheduler together with its drafts
    engine core   adds them to those of the scheduler until it makes its statistics, and puts the
                  sum into those
    front end     adds what it gets to the Prometheus counters under /metrics
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import prometheus_client
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds

from dllm.engine.channels import put_into, take_out
from dllm.engine.metrics import LABELS

KEY = "dllm_drafting"

# Counter -> its own label, "" if it has none; what it counts.
COUNTERS = {
    "draft_passes": ("", "Times that the drafter ran, or that draft workers were asked."),
    "drafting_seconds": ("", "Time in the speculator, or waiting for draft workers."),
    "drafted_tokens": ("", "Tokens that the drafter drafted, verified or not."),
    "draft_widths": ("width", "Requests and steps, by drafts that the next step was to verify."),
    "pilot_choices": ("", "Requests whose width a pilot chose."),
    "pilot_seconds": ("", "Time for these choices, the target's logits for them included."),
    "verified_tokens_per_pos": ("position", "Drafts that the target verified, by position."),
    "remote_asks": ("worker", "Asks sent to a draft worker."),
    "remote_replies": ("worker", "Replies of a draft worker, late ones included."),
    "remote_misses": ("worker", "Times that a draft worker did not answer within the deadline."),
    "remote_refused": ("worker", "Messages of a draft worker that are no valid reply."),
    "remote_drafts": ("worker", "Drafts of a draft worker scheduled for verification."),
    "remote_moves": ("", "Sessions that went to another draft worker."),
}


class Counts(dict[tuple[str, str], float]):
    """New counts: (a key of COUNTERS, the value of its own label or "") -> how much."""

    def add(self, name: str, amount: float = 1, label: str = "") -> None:
        self[name, label] = self.get((name, label), 0) + amount

    def merge(self, other: "Counts") -> None:
        for (name, label), amount in other.items():
            self.add(name, amount, label)

    def take(self) -> "Counts":
        taken = Counts(self)
        self.clear()
        return taken


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
    new = [(name, label, amount) for (name, label), amount in counts.items()]
    put_into(stats, KEY, {"counts": new, "workers": workers})


def record_drafting(stats: SchedulerStats, labels: Sequence[str]) -> None:
    """Move the counts from a step's statistics to the metrics. Runs in the front end."""
    sent = take_out(stats, KEY)
    if sent is None:
        return
    new = list(sent["counts"])
    if stats.spec_decoding_stats is not None:
        verified = stats.spec_decoding_stats.num_draft_tokens_per_pos
        new += [("verified_tokens_per_pos", str(at), count) for at, count in enumerate(verified)]
    for name, label, amount in new:
        _counter(name).labels(*labels, *[label] * bool(label)).inc(amount)
    if sent["workers"] is not None:
        _show_workers(tuple(labels), sent["workers"])


@functools.cache
def _counter(name: str) -> prometheus_client.Counter:
    """Made once in a process: Prometheus refuses a name that is registered again."""
    label, text = COUNTERS[name]
    return prometheus_client.Counter(f"dllm:{name}", text, (*LABELS, *[label] * bool(label)))


@functools.cache
def _worker_up() -> prometheus_client.Gauge:
    text = "1 if a draft worker is asked, 0 if it is out."
    return prometheus_client.Gauge(
        "dllm:remote_worker_up", text, (*LABELS, "worker"), multiprocess_mode="mostrecent"
    )


_shown: dict[tuple[str, ...], set[str]] = {}  # draft workers of each engine in the gauge


def _show_workers(labels: tuple[str, ...], workers: Mapping[str, bool]) -> None:
    for address, is_up in workers.items():
        _worker_up().labels(*labels, address).set(is_up)
    for address in _shown.get(labels, set()) - workers.keys():  # discovery lists it no longer
        _worker_up().labels(*labels, address).set(0)  # other front ends go on showing it
        _worker_up().remove(*labels, address)
    _shown[labels] = set(workers)

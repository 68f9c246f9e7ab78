"""Prometheus metrics of draft workers, as one target sees them; beside those of every drafter.

The counts travel as ``drafter.metrics`` describes: within the scheduler's statistics. Those of a
step go to one of the front ends, so they hold what is new, and every front end adds what it gets.
"""

import functools
from collections.abc import Mapping, Sequence

from vllm.v1.metrics.stats import SchedulerStats

from dllm.drafter.metrics import Counts, Metrics, Texts
from dllm.engine.metrics import put_into, take_out
from dllm.remote.drafter import RemoteDrafter

KEY = "dllm_remote"

COUNTERS: Texts = {
    "remote_asks": ("worker", "Asks sent to a draft worker."),
    "remote_replies": ("worker", "Replies of a draft worker, late ones included."),
    "remote_misses": ("worker", "Times that a draft worker did not answer within the deadline."),
    "remote_refused": ("worker", "Messages of a draft worker that are no valid reply."),
    "remote_drafts": ("source", "Drafts scheduled for verification, by who drafted them."),
    "remote_moves": ("reason", "Sessions that went to another draft worker."),
}
GAUGES: Texts = {"remote_worker_up": ("worker", "1 if a draft worker is asked, 0 if it is out.")}


def counts_of(drafter: RemoteDrafter) -> dict[str, dict[str, float]]:
    """All counts of an engine core, since it started."""
    links = drafter.client.links
    return {
        "remote_asks": {link.address: link.num_asks for link in links},
        "remote_replies": {link.address: link.num_replies for link in links},
        "remote_misses": {link.address: link.num_misses for link in links},
        "remote_refused": {link.address: link.num_refused for link in links},
        "remote_worker_up": {link.address: float(not link.is_out) for link in links},
        "remote_drafts": {"worker": drafter.num_remote, "ngram": drafter.num_ngram},
        "remote_moves": {"out": drafter.client.num_moves},
    }


class Changes:
    """What is new in the counts of an engine core since they were last asked for."""

    def __init__(self) -> None:
        self._last: Counts = {}

    def of(self, counts: Counts) -> Counts:
        """The counters' differences; gauges as they are."""
        last, self._last = self._last, counts
        return {
            name: by_label if name in GAUGES else _difference(by_label, last.get(name, {}))
            for name, by_label in counts.items()
        }


def _difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """By label; what is less than before began anew."""
    known = {label: before.get(label, 0) for label in now}
    return {
        label: count - known[label] if count >= known[label] else count
        for label, count in now.items()
    }


def send_remote(stats: SchedulerStats, changes: Counts) -> None:
    """Put them into a step's statistics. Runs in the engine core."""
    put_into(stats, KEY, changes)


@functools.cache
def _metrics() -> Metrics:
    return Metrics(COUNTERS, GAUGES)


def record_remote(stats: SchedulerStats, labels: Sequence[str]) -> None:
    """Move the counts from a step's statistics to the metrics. Runs in the front end.

    Args:
        labels: values of LABELS.
    """
    changes = take_out(stats, KEY)
    if changes is not None:
        _metrics().observe(labels, changes)

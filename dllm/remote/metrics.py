"""Prometheus metrics of draft workers, as one target sees them; beside those of every drafter.

The counts travel as ``drafter.metrics`` describes: within the scheduler's statistics. Those of a
step go to one of the front ends, so they hold what is new, and every front end adds what it gets.
"""

from collections.abc import Mapping, Sequence

import prometheus_client
from vllm.v1.metrics.stats import SchedulerStats

from dllm.engine.metrics import LABELS, put_into, take_out
from dllm.remote.drafter import RemoteDrafter

KEY = "dllm_remote"
Counts = Mapping[str, Mapping[str, float]]  # metric -> value of its own label -> count

COUNTERS = {
    "remote_asks": ("worker", "Asks sent to a draft worker."),
    "remote_replies": ("worker", "Replies of a draft worker, late ones included."),
    "remote_misses": ("worker", "Times that a draft worker did not answer within the deadline."),
    "remote_refused": ("worker", "Messages of a draft worker that are no valid reply."),
    "remote_drafts": ("source", "Drafts scheduled for verification, by who drafted them."),
    "remote_moves": ("reason", "Sessions that went to another draft worker."),
}
GAUGES = {"remote_worker_up": ("worker", "1 if a draft worker is asked, 0 if it is out.")}


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


class RemoteMetrics:
    """The Prometheus metrics. Made once in a process: Prometheus registers a name only once."""

    def __init__(self) -> None:
        self._counters = {
            name: prometheus_client.Counter(f"dllm:{name}", text, (*LABELS, label))
            for name, (label, text) in COUNTERS.items()
        }
        self._gauges = {
            name: prometheus_client.Gauge(
                f"dllm:{name}", text, (*LABELS, label), multiprocess_mode="mostrecent"
            )
            for name, (label, text) in GAUGES.items()
        }
        self._shown: dict[tuple[str, ...], set[str]] = {}

    def observe(self, labels: Sequence[str], changes: Counts) -> None:
        """Take what is new in an engine core; ``labels`` are values of LABELS."""
        for name, by_label in changes.items():
            for own, change in by_label.items():
                if name in self._gauges:
                    self._gauges[name].labels(*labels, own).set(change)
                else:
                    self._counters[name].labels(*labels, own).inc(change)
            shown = self._shown.get((*labels, name), set())
            for own in shown - by_label.keys():  # a worker that discovery lists no longer
                if name in self._gauges:  # of several front ends, one alone removes nothing
                    self._gauges[name].labels(*labels, own).set(0)
                (self._gauges | self._counters)[name].remove(*labels, own)
            self._shown[*labels, name] = set(by_label)


_metrics: RemoteMetrics | None = None  # of this process


def record_remote(stats: SchedulerStats, labels: Sequence[str]) -> None:
    """Move the counts from a step's statistics to the metrics. Runs in the front end.

    Args:
        labels: values of LABELS.
    """
    global _metrics
    changes = take_out(stats, KEY)
    if changes is None:
        return
    if _metrics is None:
        _metrics = RemoteMetrics()
    _metrics.observe(labels, changes)

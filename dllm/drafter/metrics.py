"""Prometheus metrics of drafting that vLLM's own (``vllm:spec_decode_*``) do not have.

vLLM counts the drafts that were verified and accepted. These metrics add how much was drafted, how
long that took, and which widths the policy chose. How a count travels:

    worker        DraftingCounts of a step are sent to the scheduler together with its drafts
    engine core   adds them up until the scheduler makes its statistics, and puts them into those
    front end     ``Metrics`` adds them to the Prometheus counters under /metrics
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import prometheus_client
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds

from dllm.engine.metrics import LABELS, put_into, take_out

KEY = "dllm_drafting"
Counts = Mapping[
    str, Mapping[str, float]
]  # metric -> value of its own label, if any -> what is new
Texts = Mapping[str, tuple[str, str]]  # metric -> its own label, "" if it has none; its description

COUNTERS: Texts = {
    "draft_passes": ("", "Times that the drafter ran."),
    "drafting_seconds": ("", "Time in the speculator, by the worker's clock; seconds."),
    "drafted_tokens": ("", "Tokens drafted, verified or not."),
    "verified_tokens_per_pos": ("position", "Drafts that the target verified, by position."),
}


@dataclass
class DraftingCounts:
    """What a worker drafted since it last reported.

    Attributes:
        passes: how often the drafter ran.
        seconds: time in the speculator, context projection included, by the host's clock.
        widths: ``[N + 1]``, how many rows got width 0, 1, .. N (drafts to be verified).
        drafted: tokens drafted, N for each row of a pass, whether verified or not.
    """

    passes: int
    seconds: float
    widths: list[int]
    drafted: int

    @classmethod
    def none(cls, num_drafts: int) -> "DraftingCounts":
        """All counts at zero."""
        return cls(0, 0.0, [0] * (num_drafts + 1), 0)

    def add(self, other: "DraftingCounts") -> None:
        """Add the other counts to these, in place."""
        self.passes += other.passes
        self.seconds += other.seconds
        self.widths = [a + b for a, b in zip(self.widths, other.widths, strict=True)]
        self.drafted += other.drafted

    def by_metric(self) -> Counts:
        """The same under the names of COUNTERS, and the histogram ``draft_width``."""
        return {
            "draft_passes": {"": self.passes},
            "drafting_seconds": {"": self.seconds},
            "drafted_tokens": {"": self.drafted},
            "draft_width": {str(width): count for width, count in enumerate(self.widths)},
        }


@dataclass
class CountedDrafts(DraftTokenIds):
    """vLLM's message from the worker to the scheduler (drafts of each request), with our counts."""

    counts: DraftingCounts


class Metrics:
    """Some Prometheus metrics. Make them once in a process: a name is registered only once."""

    def __init__(self, counters: Texts, gauges: Texts) -> None:
        self._counters = {
            name: prometheus_client.Counter(f"dllm:{name}", text, (*LABELS, *[own] * bool(own)))
            for name, (own, text) in counters.items()
        }
        self._gauges = {
            name: prometheus_client.Gauge(
                f"dllm:{name}", text, (*LABELS, own), multiprocess_mode="mostrecent"
            )
            for name, (own, text) in gauges.items()
        }
        self._shown: dict[tuple[str, ...], set[str]] = {}

    def observe(self, labels: Sequence[str], counts: Counts) -> None:
        """Take what is new in an engine core; ``labels`` are values of LABELS."""
        for name, by_label in counts.items():
            for own, count in by_label.items():
                values = (*labels, own) if own else tuple(labels)
                if name in self._gauges:
                    self._gauges[name].labels(*values).set(count)
                else:
                    self._counters[name].labels(*values).inc(count)
            shown = self._shown.get((*labels, name), set())
            for own in shown - by_label.keys():  # a worker that discovery lists no longer
                if name in self._gauges:  # of several front ends, one alone removes nothing
                    self._gauges[name].labels(*labels, own).set(0)
                (self._gauges | self._counters)[name].remove(*labels, own)
            self._shown[*labels, name] = set(by_label)


@functools.cache
def _metrics() -> Metrics:
    return Metrics(COUNTERS, {})


@functools.cache
def _widths(num_drafts: int) -> prometheus_client.Histogram:
    text = "Drafts of a request that the policy let the next step verify."
    return prometheus_client.Histogram(
        "dllm:draft_width", text, LABELS, buckets=range(num_drafts + 1)
    )


def send_drafting(stats: SchedulerStats, counts: DraftingCounts) -> None:
    """Put our counts into a step's statistics. Runs in the engine core."""
    put_into(stats, KEY, counts.by_metric())


def record_drafting(stats: SchedulerStats, labels: Sequence[str]) -> None:
    """Move our counts from a step's statistics to the metrics. Runs in the front end.

    Args:
        labels: values of LABELS.
    """
    counts = take_out(stats, KEY)
    if counts is None:
        return
    by_width = counts.pop("draft_width")
    widths = _widths(len(by_width) - 1).labels(*labels)
    for width, count in by_width.items():
        for _ in range(count):
            widths.observe(int(width))
    if stats.spec_decoding_stats is not None:
        verified = stats.spec_decoding_stats.num_draft_tokens_per_pos
        counts["verified_tokens_per_pos"] = {str(place): n for place, n in enumerate(verified)}
    _metrics().observe(labels, counts)

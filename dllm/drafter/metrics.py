"""Prometheus metrics of drafting, beside vLLM's own of what was accepted.

vLLM counts the drafts that were verified and those kept (``vllm:spec_decode_*``). What it cannot
know is ours: how much was drafted, how long that took, and the widths that the policy chose.

    worker        DraftingCounts of a step ride with its drafts, which go to the scheduler
    engine core   added up until the scheduler makes its statistics, then ride with those
    front end     Prometheus, under /metrics
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import prometheus_client
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds

LABELS = ("model_name", "engine")
# `ec_connector_stats` is the field of vLLM's statistics that holds anything; vLLM fills it where
# multimodal encoders run elsewhere. Ours ride in it under this key and are taken out on arrival.
KEY = "dllm_drafting"


@dataclass
class DraftingCounts:
    """What a worker did since the last report.

    Attributes:
        passes: times that the drafter ran.
        seconds: in the speculator, context included, by the host's clock.
        widths: ``[N + 1]``, rows of which 0, 1, .. N drafts are to be verified.
        drafted: tokens drafted, N for each row of a pass, whether verified or not.
    """

    passes: int
    seconds: float
    widths: list[int]
    drafted: int

    @classmethod
    def none(cls, num_drafts: int) -> "DraftingCounts":
        """Nothing yet."""
        return cls(0, 0.0, [0] * (num_drafts + 1), 0)

    def add(self, other: "DraftingCounts") -> None:
        """Count the other's, too."""
        self.passes += other.passes
        self.seconds += other.seconds
        self.widths = [a + b for a, b in zip(self.widths, other.widths, strict=True)]
        self.drafted += other.drafted

    def ride_with(self, stats: SchedulerStats) -> None:
        """Put them where they cross to the front end."""
        stats.ec_connector_stats = {**(stats.ec_connector_stats or {}), KEY: asdict(self)}


@dataclass
class CountedDrafts(DraftTokenIds):
    """Drafts on their way to the scheduler, with what they cost."""

    counts: DraftingCounts


class DraftingMetrics:
    """The counters; made once in a front-end process."""

    def __init__(self, num_drafts: int) -> None:
        def counter(name: str, text: str, *labels: str) -> prometheus_client.Counter:
            return prometheus_client.Counter(f"dllm:{name}", text, (*LABELS, *labels))

        self.num_drafts = num_drafts
        self._passes = counter("draft_passes", "Times that the drafter ran.")
        self._seconds = counter(
            "drafting_seconds", "Time in the speculator, by the worker's clock; seconds."
        )
        self._drafted = counter("drafted_tokens", "Tokens drafted, verified or not.")
        self._verified = counter(
            "verified_tokens_per_pos", "Drafts that the target verified, by position.", "position"
        )
        self._widths = prometheus_client.Histogram(
            "dllm:draft_width",
            "Drafts of a request that the policy let the next step verify.",
            LABELS,
            buckets=range(num_drafts + 1),
        )

    def observe(self, labels: Sequence[str], counts: DraftingCounts) -> None:
        """Add what workers did."""
        self._passes.labels(*labels).inc(counts.passes)
        self._seconds.labels(*labels).inc(counts.seconds)
        self._drafted.labels(*labels).inc(counts.drafted)
        widths = self._widths.labels(*labels)
        for width, count in enumerate(counts.widths):
            for _ in range(count):
                widths.observe(width)

    def observe_verified(self, labels: Sequence[str], verified: Sequence[int]) -> None:
        """Add verified drafts, by position."""
        for position, count in enumerate(verified):
            self._verified.labels(*labels, str(position)).inc(count)


_metrics: DraftingMetrics | None = None  # of this process: names are registered once


def record_drafting(stats: SchedulerStats, labels: Sequence[str]) -> None:
    """Take our counts out of a step's statistics and add them to the metrics. In the front end.

    Args:
        labels: values of LABELS.
    """
    global _metrics
    carried = dict(stats.ec_connector_stats or {})
    given = carried.pop(KEY, None)
    if given is None:
        return
    stats.ec_connector_stats = carried or None
    counts = DraftingCounts(**given)
    if _metrics is None:
        _metrics = DraftingMetrics(len(counts.widths) - 1)
    _metrics.observe(labels, counts)
    if stats.spec_decoding_stats is not None:
        _metrics.observe_verified(labels, stats.spec_decoding_stats.num_draft_tokens_per_pos)

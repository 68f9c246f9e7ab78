"""Prometheus metrics of drafting that vLLM's own (``vllm:spec_decode_*``) do not have.

vLLM counts the drafts that were verified and accepted. These metrics add how much was drafted, how
long that took, and which widths the policy chose. How a count travels:

    worker        DraftingCounts of a step are sent to the scheduler together with its drafts
    engine core   adds them up until the scheduler makes its statistics, and puts them into those
    front end     adds them to the Prometheus counters under /metrics
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import prometheus_client
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds

from dllm.engine.metrics import LABELS, put_into, take_out

KEY = "dllm_drafting"


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


@dataclass
class CountedDrafts(DraftTokenIds):
    """vLLM's message from the worker to the scheduler (drafts of each request), with our counts."""

    counts: DraftingCounts


class DraftingMetrics:
    """The Prometheus counters. Made once in a process: Prometheus registers a name only once."""

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
        """Add a worker's counts; ``labels`` are values of LABELS."""
        self._passes.labels(*labels).inc(counts.passes)
        self._seconds.labels(*labels).inc(counts.seconds)
        self._drafted.labels(*labels).inc(counts.drafted)
        widths = self._widths.labels(*labels)
        for width, count in enumerate(counts.widths):
            for _ in range(count):
                widths.observe(width)

    def observe_verified(self, labels: Sequence[str], verified: Sequence[int]) -> None:
        """Add how many drafts were verified at each position of the draft block."""
        for position, count in enumerate(verified):
            self._verified.labels(*labels, str(position)).inc(count)


def send_drafting(stats: SchedulerStats, counts: DraftingCounts) -> None:
    """Put our counts into a step's statistics. Runs in the engine core."""
    put_into(stats, KEY, asdict(counts))


_metrics: DraftingMetrics | None = None  # of this process


def record_drafting(stats: SchedulerStats, labels: Sequence[str]) -> None:
    """Move our counts from a step's statistics to the metrics. Runs in the front end.

    Args:
        labels: values of LABELS.
    """
    global _metrics
    given = take_out(stats, KEY)
    if given is None:
        return
    counts = DraftingCounts(**given)
    if _metrics is None:
        _metrics = DraftingMetrics(len(counts.widths) - 1)
    _metrics.observe(labels, counts)
    if stats.spec_decoding_stats is not None:
        _metrics.observe_verified(labels, stats.spec_decoding_stats.num_draft_tokens_per_pos)

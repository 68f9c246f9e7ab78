"""Counters of ours under /metrics, beside vLLM's. A count travels:

    worker        sends its ``Counts`` to the scheduler together with its drafts
    engine core   adds them to those of the scheduler until it makes its statistics, and puts the
                  sum into those (``engine.channels``)
    front end     adds what it gets to the Prometheus counters

vLLM's (``vllm:diffusion_*``, ``vllm:spec_decode_*``) count denoise steps, the positions of their
canvases, and accepted drafts.
"""

import functools
from collections.abc import Sequence

import prometheus_client
from vllm.v1.metrics.stats import SchedulerStats

from dllm.engine.channels import put_into, take_out

KEY = "dllm_counts"
LABELS = ("model_name", "engine")

# Counter -> its own label, "" if it has none; what it counts.
COUNTERS = {
    # Of diffusion models. The first under asynchronous scheduling (``engine.async_scheduler``).
    "commit_passes": ("", "Passes of a request that only wrote the KV of a block."),
    "thoughts_ended_by_budget": (
        "",
        "Thoughts that took their whole thinking budget, and ended there.",
    ),
    # Of drafting.
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


def send(stats: SchedulerStats, counts: Counts) -> None:
    """Runs in the engine core."""
    put_into(stats, KEY, [(name, label, amount) for (name, label), amount in counts.items()])


def record(stats: SchedulerStats, labels: Sequence[str]) -> None:
    """Move the counts from a step's statistics to their counters. Runs in the front end."""
    for name, label, amount in take_out(stats, KEY) or ():
        _counter(name).labels(*labels, *[label] * bool(label)).inc(amount)


@functools.cache
def _counter(name: str) -> prometheus_client.Counter:
    """Made once in a process: Prometheus refuses a name that is registered again."""
    label, text = COUNTERS[name]
    return prometheus_client.Counter(f"dllm:{name}", text, (*LABELS, *[label] * bool(label)))

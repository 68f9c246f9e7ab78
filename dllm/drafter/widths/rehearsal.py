"""Measures at server start what steps cost, for the policy that decides by cost (``adaptive``).

Imaginary requests go through the worker: prompts of one token, then steps that verify drafts of
several widths, with and without drafting afterwards. The scheduler's share of a step is not in the
measured times; ``adaptive`` learns it while serving.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput

from dllm.drafter.widths.costs import CostTable
from dllm.drafter.widths.policy import VerifiedStep, WidthPolicy
from dllm.engine.warm_up import MadeUpRequests

REPEATS = 4  # the fastest one counts: other processes on the machine can only make a step slower
GROWTH = 4  # ratio of one measured batch size to the one before


class Rehearsal(WidthPolicy):
    """Stand-in for the server's policy while costs are measured.

    It calls the real policy, so that its computing time is measured too, but ignores what ``limit``
    answers: it drafts only if ``drafts`` is set.
    """

    reads_outcomes = True

    def __init__(self, policy: WidthPolicy) -> None:
        super().__init__(policy.num_drafts)
        self.policy = policy
        self.reads_confidence = policy.reads_confidence
        self.drafts = True

    def observe(self, step: VerifiedStep) -> None:
        """Let the real policy learn from the step."""
        self.policy.observe(step)

    def limit(self, slots: np.ndarray) -> int:
        """N if ``drafts`` is set, else 0."""
        self.policy.limit(slots)
        return self.num_drafts if self.drafts else 0

    def widths(
        self, slots: np.ndarray, confidence: np.ndarray | None, before_end: np.ndarray
    ) -> np.ndarray:
        """The real policy's answer; ``measure_costs`` schedules widths of its own."""
        return self.policy.widths(slots, confidence, before_end)


def measure_costs(
    runner: Any,
    execute_model: Callable[[SchedulerOutput], Any],
    rehearsal: Rehearsal,
    wait: Callable[[], None],
) -> CostTable | None:
    """The table of measured costs; None if the server has no room for a single request.

    Args:
        runner: the worker's Model Runner V2, with its KV cache allocated.
        execute_model: the worker's method of that name.
        rehearsal: the policy that the speculator uses during the measurement.
        wait: returns when the device has finished its work.
    """
    num_drafts = runner.num_speculative_steps
    widths = sorted({0, (num_drafts + 1) // 2, num_drafts})
    cells = [(width, True) for width in widths] + [(0, False)]
    # Tokens of a request: its prompt of one token, and as if every draft were kept.
    length = 1 + sum((width + 1) * (REPEATS + 1) for width, _ in cells)
    largest = min(runner.max_num_reqs, runner.max_num_tokens // (num_drafts + 1))
    measured: list[tuple[int, list[float]]] = []
    for num_rows in batch_sizes(largest):
        steps = _Steps(runner, execute_model, num_rows, wait)
        if length > runner.max_model_len or not steps.arrive(length):
            break
        costs = []
        for width, rehearsal.drafts in cells:
            # The first step of a kind is dropped: it also does work left by the kind before it.
            costs.append(min([steps.take(width) for _ in range(REPEATS + 1)][1:]))
        steps.leave()
        measured.append((num_rows, costs))
    if not measured:
        return None
    table = np.array([costs for _, costs in measured])
    rows = np.array([num_rows for num_rows, _ in measured])
    return CostTable(rows, np.array(widths), table[:, :-1], table[:, -1])


class _Steps:
    """Runs steps of made-up requests on a worker and times them."""

    def __init__(
        self,
        runner: Any,
        execute_model: Callable[[SchedulerOutput], Any],
        num_rows: int,
        wait: Callable[[], None],
    ) -> None:
        self.runner, self.execute_model, self.wait = runner, execute_model, wait
        self.requests = MadeUpRequests(num_rows, SamplingParams(temperature=0))
        self.num_computed = 0  # tokens of each request, as if every draft had been kept

    def arrive(self, length: int) -> bool:
        """Admit the requests, run their prompts; False without room for ``length`` tokens each."""
        pages = self.requests.pages(self.runner, length)
        if pages is None:
            return False
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = self.requests.arriving(pages)
        self._run(output, 0)
        return True

    def take(self, width: int) -> float:
        """Run one step that verifies ``width`` drafts of each request; returns milliseconds."""
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = self.requests.running(self.num_computed)
        if width:
            output.scheduled_spec_decode_tokens = dict.fromkeys(self.requests.req_ids, [0] * width)
        return self._run(output, width)

    def leave(self) -> None:
        """End the requests, which frees their slots."""
        self.execute_model(self.requests.leaving())

    def _run(self, output: SchedulerOutput, width: int) -> float:
        output.num_scheduled_tokens = dict.fromkeys(self.requests.req_ids, width + 1)
        output.total_num_scheduled_tokens = self.requests.num_reqs * (width + 1)
        output.num_spec_tokens_to_schedule = self.runner.num_speculative_steps
        self.num_computed += width + 1
        start = time.perf_counter()
        self.execute_model(output)
        self.runner.sample_tokens(None).get_output()
        self.runner.take_draft_token_ids()
        self.wait()
        return 1e3 * (time.perf_counter() - start)


def batch_sizes(largest: int) -> list[int]:
    """The batch sizes to measure: 1, 4, 16, ... below ``largest``, and ``largest``."""
    sizes = [1]
    while sizes[-1] * GROWTH < largest:
        sizes.append(sizes[-1] * GROWTH)
    return sizes if sizes[-1] == largest else [*sizes, largest]

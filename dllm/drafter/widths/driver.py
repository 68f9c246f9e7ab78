"""The driver of a width policy: the scheduler's, for whatever drafts."""

from collections.abc import Collection, Sequence

import numpy as np

from dllm.drafter.widths.policy import VerifiedStep, WidthPolicy
from dllm.engine.metrics import Counts


class Slots(dict[str, int]):
    """Requests, and the numbers below ``count`` that a policy knows them by."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._free = list(range(count))

    def keep(self, names: Collection[str]) -> None:
        """Give these requests, at most ``count``, a number; others lose theirs if need be."""
        if len(set(names) - self.keys()) > len(self._free):
            for name in self.keys() - set(names):
                self._free.append(self.pop(name))
        for name in names:
            if name not in self:
                self[name] = self._free.pop()

    def of(self, names: Collection[str]) -> np.ndarray:
        """``[rows]``"""
        return np.array([self[name] for name in names], dtype=np.int64)


class WidthDriver:
    """Asks a policy about a server's requests, at most ``num_slots`` in a step; counts widths."""

    def __init__(self, policy: WidthPolicy, num_slots: int, counts: Counts) -> None:
        self.policy, self.counts = policy, counts
        self._slots = Slots(num_slots)

    def keep(self, running: Collection[str], begun: Collection[str] = ()) -> None:
        self._slots.keep(running)
        if begun:
            self.policy.forget_requests(self._slots.of(begun))

    def known(self, names: Collection[str]) -> list[str]:
        """Those of the names that are known: not of requests that were preempted for others."""
        return [name for name in names if name in self._slots]

    def plan(self, names: Collection[str]) -> bool:
        """Whether drafts are made behind a step, for these requests that can use them."""
        return self.policy.wants_drafts(self._slots.of(names)) and len(names) > 0

    def wants_lookup(self, names: Collection[str], confidence: np.ndarray) -> bool:
        return self.policy.wants_lookup(self._slots.of(names), confidence)

    def worth_s(self, names: Collection[str]) -> float:
        return 1e-3 * self.policy.worth_ms(self._slots.of(names))

    def widths(self, names: Collection[str], confidence: np.ndarray | None = None) -> list[int]:
        """``confidence``: as in ``WidthPolicy.widths``; None where nobody knows it."""
        read = confidence if self.policy.reads_confidence else None
        widths: list[int] = self.policy.widths(self._slots.of(names), read).tolist()
        assert all(0 <= width <= self.policy.num_drafts for width in widths), widths
        return widths

    def count(self, drafts: Collection[Sequence[int]]) -> None:
        for each in drafts:
            self.counts.add("draft_widths", label=str(len(each)))

    def observe(
        self,
        names: Sequence[str],
        in_prompt: np.ndarray,
        verified: np.ndarray,
        accepted: np.ndarray,
        drafted: bool,
    ) -> None:
        self.policy.observe(
            VerifiedStep(self._slots.of(names), in_prompt, verified, accepted, drafted)
        )

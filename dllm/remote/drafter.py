"""What a target's engine core does for drafts, step by step: learn, ask, wait, choose widths.

    admit    requests that begin: their prompts are sent while the target reads them itself
    follow   behind a step of the target: learn from it, and ask for what comes next
    take     before the next step is scheduled: the drafts to verify

The width policy is the DFlash drafter's (``drafter.widths``). It alone decides whether drafts are
asked for and how long a step waits for them, within the deadline of the server's options. It learns
from every wait: the time is the cost of drafting, and a draft that did not come is as useless as
one that is rejected.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dllm.drafter.metrics import Counts
from dllm.drafter.widths.policy import VerifiedStep, WidthPolicy
from dllm.remote.client import Client, Wish


class RemoteDrafter:
    """Drafts for one engine core.

    Args:
        policy: does not read the drafter's confidence, because none comes with these drafts.
        num_slots: requests that run at once.
        deadline_s: how long a step waits at most.
        counts: what is drafted is added to it, as for a DFlash drafter; ``drafting_seconds`` is the
            time waited, ``draft_passes`` are steps that asked.
    """

    def __init__(
        self,
        client: Client,
        policy: WidthPolicy,
        num_slots: int,
        deadline_s: float,
        counts: Counts,
    ) -> None:
        assert not policy.reads_confidence
        self.client, self.policy, self.counts = client, policy, counts
        self._deadline_s = deadline_s
        self._free = list(range(num_slots))
        self._slots: dict[str, int] = {}
        self._wishes: dict[str, Wish] = {}  # of all requests of the last step
        self._short: set[str] = set()  # got fewer drafts than the policy would have verified
        self._wants_drafts = True  # what the policy said behind it
        self._wait_s = deadline_s

    def admit(self, texts: Mapping[str, Sequence[int]]) -> None:
        """Send prompts that the target begins to read, so that the first drafts are not late.

        The target's first token is its own: one more draft is asked for.
        """
        if texts and self._wants_drafts:
            wishes = {name: Wish(tokens, self.policy.most + 1) for name, tokens in texts.items()}
            self.client.ask(wishes, self._deadline_s)

    def slots(self, names: Sequence[str]) -> np.ndarray:
        """``[rows]``: the numbers, below ``num_slots``, that the policy knows these requests by."""
        if len(set(names) - self._slots.keys()) > len(self._free):
            for name in self._slots.keys() - set(names):
                self._free.append(self._slots.pop(name))
        for name in names:
            if name not in self._slots:
                self._slots[name] = self._free.pop()
        return np.array([self._slots[name] for name in names], dtype=np.int64)

    def follow(self, step: VerifiedStep, wishes: dict[str, Wish]) -> None:
        """Learn from a step, and ask for drafts of the next one if the policy wants any.

        Args:
            step: its rows are the requests of ``wishes``.
            wishes: the drafts that may be of use in the next step; 0 for a request without one.
        """
        self._wishes = wishes
        if self.policy.reads_outcomes:
            # One more draft counts as rejected where fewer came in time than the policy would have
            # verified, or it would go on to expect what a slow worker cannot deliver.
            if self._short:
                short = np.array([name in self._short for name in wishes], dtype=np.int64)
                step = replace(step, verified=step.verified + short)
            self.policy.observe(step)
        self._wants_drafts = self.policy.wants_drafts(step.slots)
        asking: dict[str, Wish] = {}
        if self._wants_drafts:
            worth_s = 1e-3 * self.policy.worth_ms(step.slots)
            self._wait_s = max(0.0, min(self._deadline_s, worth_s))
            most = self.policy.most
            asking = {
                name: Wish(tokens, min(want, most))
                for name, (tokens, want) in wishes.items()
                if want
            }
        self.client.ask(asking, self._wait_s)
        if asking:
            self.counts.add("draft_passes")

    def take(self) -> tuple[list[str], list[list[int]]]:
        """The drafts to verify of each request of the last step; waits for them if need be."""
        wishes, self._wishes, self._short = self._wishes, {}, set()
        useful = {name: wish for name, wish in wishes.items() if wish.want}
        drafts: dict[str, list[int]] = {}
        if self._wants_drafts:
            drafts = self._collect(wishes, useful) if useful else {}
            if not drafts:
                self.policy.note_wait(None)
        for name in useful:
            self.counts.add("draft_widths", label=str(len(drafts.get(name, ()))))
        return list(wishes), [drafts.get(name, []) for name in wishes]

    def _collect(self, rows: Collection[str], wishes: Mapping[str, Wish]) -> dict[str, list[int]]:
        """The drafts that are there in time, cut to the widths that the policy chooses.

        Args:
            rows: all requests of the step.

        Returns:
            By request, for all of ``wishes``; nothing if nobody is there who drafts.
        """
        waited_s = self.client.collect(wishes, self._wait_s)
        self.counts.add("drafting_seconds", waited_s)
        sessions = {name: self.client.sessions[name] for name in wishes}
        drafts = {name: sessions[name].usable(wish) for name, wish in wishes.items()}
        self.counts.add("drafted_tokens", sum(map(len, drafts.values())))
        is_expected = {name: drafts[name] or sessions[name].is_asked for name in wishes}
        if not any(is_expected.values()):
            return {}
        self.policy.note_wait(waited_s)
        slots = np.array([self._slots[name] for name in rows])
        widths = dict(zip(rows, self.policy.widths(slots, None).tolist(), strict=True))
        for name, wish in wishes.items():
            if is_expected[name] and len(drafts[name]) < min(widths[name], wish.want):
                self._short.add(name)
            drafts[name] = drafts[name][: widths[name]]
            worker = sessions[name].link
            if drafts[name] and worker is not None:
                worker.count("drafts", len(drafts[name]))
        return drafts

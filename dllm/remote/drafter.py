"""What a target's engine core does for drafts, step by step: learn, ask, wait, choose widths.

    admit    requests that begin: their prompts are sent while the target reads them itself
    follow   behind a step of the target: learn from it, and ask for what comes next
    take     before the next step is scheduled: the drafts to verify

The width policy is the DFlash drafter's (``drafter.widths``). It alone decides whether drafts are
asked for and how long a step waits for them, within the deadline of the server's options. It learns
from every wait: the time is the cost of drafting, and a draft that did not come is as useless as
one that is rejected.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dllm.drafter.metrics import DraftingCounts
from dllm.drafter.widths.policy import VerifiedStep, WidthPolicy
from dllm.remote.client import Client
from dllm.remote.ngram import Ngrams

# The policy learns by the drafter's probability how far a draft can be trusted. These drafts come
# without any; their source takes its place.
REMOTE_CONFIDENCE, NGRAM_CONFIDENCE = 0.9, 0.0


@dataclass(frozen=True)
class StepRow:
    """What a step of the target did for one request, and where the request stands.

    Attributes:
        tokens: all of the request's, those of this step included.
        in_prompt: the step read tokens of the prompt.
        num_sampled: tokens that it emitted.
        num_verified: drafts that it verified.
        limit: drafts that may be of use in the next step; 0 if there is none.
    """

    name: str
    tokens: Sequence[int]
    in_prompt: bool
    num_sampled: int
    num_verified: int
    limit: int


class RemoteDrafter:
    """Drafts for one engine core.

    Args:
        ngrams: drafts for requests without a draft of a worker; None if nothing does.
        num_drafts: N, the most drafts of a request.
        num_slots: requests that run at once.
        deadline_s: how long a step waits at most.

    Attributes:
        counts: what was drafted since they were last reset, as for a DFlash drafter. ``seconds`` is
            the time waited, ``passes`` are steps that asked.
        num_remote, num_ngram: drafts to be verified, by source, since the start.
    """

    def __init__(
        self,
        client: Client,
        ngrams: Ngrams | None,
        policy: WidthPolicy,
        num_drafts: int,
        num_slots: int,
        deadline_s: float,
    ) -> None:
        self.client, self.policy = client, policy
        self.num_remote = self.num_ngram = 0
        self.counts = DraftingCounts.none(num_drafts)
        self._ngrams = ngrams
        self._num_drafts, self._deadline_s = num_drafts, deadline_s
        self._free = list(range(num_slots))
        self._slots: dict[str, int] = {}
        self._rows: list[StepRow] = []  # of the last step
        self._short: set[str] = set()  # got fewer drafts than the policy would have verified
        self._wants_drafts = True  # what the policy said behind it
        self._wait_s = deadline_s

    def admit(self, begun: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Send prompts that the target begins to read, so that the first drafts are not late.

        The target's first token is its own: one more draft is asked for.
        """
        texts = dict(begun)
        if texts and self._wants_drafts:
            wants = dict.fromkeys(texts, self.policy.most + 1)
            self.client.ask(texts, wants, self._deadline_s)

    def end(self, names: Iterable[str]) -> None:
        """These requests are over."""
        names = list(names)
        self.client.end(names)
        for name in names:
            if self._ngrams is not None:
                self._ngrams.end(name)

    def follow(self, rows: list[StepRow]) -> None:
        """Learn from a step, and ask for drafts of the next one if the policy wants any."""
        self._rows = rows
        slots = self._slots_of(rows)
        if self.policy.reads_outcomes:
            self.policy.observe(_outcome(rows, slots, self._short))
        self._wants_drafts = self.policy.wants_drafts(slots)
        worth_s = 1e-3 * self.policy.worth_ms(slots)
        self._wait_s = max(0.0, min(self._deadline_s, worth_s))
        asking = [row for row in rows if row.limit] if self._wants_drafts else []
        texts = {row.name: row.tokens for row in asking}
        wants = {row.name: min(row.limit, self.policy.most) for row in asking}
        self.client.ask(texts, wants, self._wait_s)
        self.counts.passes += bool(asking)

    def take(self) -> tuple[list[str], list[list[int]]]:
        """The drafts to verify of each request of the last step; waits for them if need be."""
        rows, self._rows = self._rows, []
        self._short = set()
        drafts: list[list[int]] = [[] for _ in rows]
        texts = {row.name: row.tokens for row in rows if row.limit} if self._wants_drafts else {}
        if texts:
            waited_s = self.client.collect(texts, self._wait_s)
            self.counts.seconds += waited_s
            self.policy.note_wait(waited_s)
            drafts = self._widened(rows)
        elif self._wants_drafts:
            self.policy.leave_untimed()
        for row, kept in zip(rows, drafts, strict=True):
            if row.limit:
                self.counts.widths[len(kept)] += 1
        return [row.name for row in rows], drafts

    def _widened(self, rows: list[StepRow]) -> list[list[int]]:
        """The drafts that there are, cut to the widths that the policy chooses."""
        drafts, is_ngram = [], []
        for row in rows:
            tokens = self.client.drafts(row.name, row.tokens, row.limit)
            is_ngram.append(bool(not tokens and row.limit and self._ngrams is not None))
            if is_ngram[-1] and self._ngrams is not None:
                tokens = self._ngrams.drafts(row.name, row.tokens, row.limit)
            drafts.append(tokens)
        self.counts.drafted += sum(map(len, drafts))
        was_asked = [bool(row.limit) and self.client.was_asked(row.name) for row in rows]
        if not (any(drafts) or any(was_asked)):
            self.policy.leave_untimed()  # nobody is there who drafts
            return drafts
        sources = np.where(is_ngram, NGRAM_CONFIDENCE, REMOTE_CONFIDENCE)
        confidence = np.repeat(sources[:, None], self._num_drafts, axis=1)
        slots = np.array([self._slots[row.name] for row in rows])
        widths = self.policy.widths(slots, confidence if self.policy.reads_confidence else None)
        kept = []
        for row, tokens, ngram, asked, width in zip(
            rows, drafts, is_ngram, was_asked, widths.tolist(), strict=True
        ):
            kept.append(tokens[:width])
            self.num_remote += len(kept[-1]) * (not ngram)
            self.num_ngram += len(kept[-1]) * ngram
            if (tokens or asked) and len(tokens) < min(width, row.limit):
                self._short.add(row.name)
        return kept

    def _slots_of(self, rows: list[StepRow]) -> np.ndarray:
        """``[rows]``: the number that the policy knows each request by, below ``num_slots``."""
        names = {row.name for row in rows}
        if len(names - set(self._slots)) > len(self._free):
            for name in set(self._slots) - names:
                self._free.append(self._slots.pop(name))
        for row in rows:
            if row.name not in self._slots:
                self._slots[row.name] = self._free.pop()
        return np.array([self._slots[row.name] for row in rows], dtype=np.int64)


def _outcome(rows: list[StepRow], slots: np.ndarray, short: set[str]) -> VerifiedStep:
    """What the policy is told of a step.

    One more draft counts as rejected where fewer came in time than the policy would have verified.
    Otherwise it would go on to expect what a slow worker cannot deliver.
    """
    verified = np.array([row.num_verified for row in rows], dtype=np.int64)
    sampled = np.array([row.num_sampled for row in rows], dtype=np.int64)
    in_prompt = np.array([row.in_prompt for row in rows], dtype=bool)
    # Tokens behind the end of an answer are cut: a draft that ends it counts as rejected.
    accepted = np.where(verified > 0, np.clip(sampled - 1, 0, verified), 0)
    verified += np.array([row.name in short for row in rows], dtype=np.int64)
    return VerifiedStep(slots, in_prompt, sampled > 0, verified, accepted)

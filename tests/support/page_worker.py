"""A worker without a model, whose KV pages remember what was written into them.

It takes the scheduler's real messages, and computes as the real worker does (``engine.pending``):
what runs where follows from its own state (the device's), and never from what the scheduler
believes to be computed. A token's KV is "causal", with the tokens up to the end of its block, or of
a canvas. Every read is checked: what is in front of a row must be causal KV of exactly its
request's tokens. What a canvas turns into depends on its request, its start and the tokens in front
of it.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

VOCABULARY = 50
CAUSAL, CANVAS, NOISE = "causal", "canvas", "noise"
Entry = tuple[str, Any]  # what one position of a page holds


class Text(NamedTuple):
    """What a request's canvases turn into.

    Attributes:
        seed: of the request.
        most_steps: of a canvas.
        trims: some blocks are emitted without their last tokens, as in front of a bad word.
    """

    seed: int
    most_steps: int
    trims: bool

    def block(self, tokens: tuple[int, ...], width: int) -> tuple[int, list[int]]:
        """The denoise steps of the canvas behind ``tokens``, and the block that it emits."""
        draw = random.Random(repr((self.seed, tokens, width)))
        steps = draw.randint(1, self.most_steps)
        length = draw.randint(1, width) if self.trims and draw.random() < 0.3 else width
        return steps, [draw.randrange(VOCABULARY) for _ in range(length)]


@dataclass
class Slot:
    """The device's state of one request."""

    text: Text
    tokens: list[int]
    computed: int
    tables: list[list[int]]
    steps_done: int = 0
    pending: int = 0  # tokens of the emitted block that wait for their causal pass


@dataclass
class PageWorker:
    """Runs engine steps in the order in which they are launched.

    Attributes:
        windows: for each KV cache group, how many keys a row sees; None: all.
        page_size: tokens of a page.
        block_size: of the model; 1 means that a token sees those up to it.
        taken: how often each kind of row was seen.
        denoised: the requests of which the last engine step denoised a canvas.
    """

    windows: list[int | None]
    page_size: int
    block_size: int = 1
    texts: dict[str, Text] = field(default_factory=dict)
    taken: Counter[str] = field(default_factory=Counter)
    pages: dict[tuple[int, int], Entry] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    denoised: frozenset[str] = frozenset()

    def run(self, message: SchedulerOutput) -> ModelRunnerOutput:
        """One pass: all rows write their KV, then all read."""
        self._update(message)
        req_ids = list(message.num_scheduled_tokens)
        canvases = {r: len(message.scheduled_spec_decode_tokens.get(r, ())) for r in req_ids}
        heads = {r: message.num_scheduled_tokens[r] - canvases[r] for r in req_ids}
        ends = {r: self.slots[r].computed + heads[r] for r in req_ids}
        commits = {r for r in req_ids if canvases[r] and ends[r] < len(self.slots[r].tokens)}
        self.denoised = frozenset(r for r in req_ids if canvases[r] and r not in commits)
        for req_id in req_ids:
            self._write(req_id, heads[req_id], canvases[req_id], req_id in commits)
        for req_id in req_ids:
            self._read(self.slots[req_id])
        emitted = [
            self._sample(self.slots[r], heads[r], canvases[r], r in commits) for r in req_ids
        ]
        index = {req_id: row for row, req_id in enumerate(req_ids)}
        return ModelRunnerOutput(req_ids, index, sampled_token_ids=emitted)

    def drafts(self, message: SchedulerOutput, canvas_length: int) -> DraftTokenIds:
        """The canvases of an engine step's requests, for a synchronous scheduler."""
        req_ids = list(message.num_scheduled_tokens)
        return DraftTokenIds(req_ids, [[0] * canvas_length for _ in req_ids])

    def _update(self, message: SchedulerOutput) -> None:
        preempted = message.preempted_req_ids or set()
        for req_id in message.finished_req_ids | preempted:
            slot = self.slots.pop(req_id, None)
            is_between = slot is not None and slot.pending > 0 and req_id in preempted
            self.taken["preempted between emission and commit"] += is_between
        for new in message.scheduled_new_reqs:
            assert new.prefill_token_ids is not None
            prompt_len = len(new.prompt_token_ids or ())
            self.taken["emitted block found in the cache"] += new.num_computed_tokens > prompt_len
            tables = [list(table) for table in new.block_ids]
            self.slots[new.req_id] = Slot(
                self.texts[new.req_id], list(new.prefill_token_ids), new.num_computed_tokens, tables
            )
        cached = message.scheduled_cached_reqs
        for req_id, pages in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for table, added in zip(self.slots[req_id].tables, pages or (), strict=False):
                table.extend(added)

    def _write(self, req_id: str, head: int, canvas: int, commits: bool) -> None:
        slot = self.slots[req_id]
        start, behind = slot.computed, slot.computed + head
        known = len(slot.tokens) if commits else behind
        assert start % self.block_size == 0, "a row starts with a block"
        assert known <= len(slot.tokens), "a head holds tokens that exist"
        assert commits or not canvas or behind == len(slot.tokens), "a canvas follows all tokens"
        assert not commits or behind + slot.pending == len(slot.tokens), "the last block is pending"
        for place in range(start, behind + canvas):
            end = self.end_of_block(place)
            entry: Entry = (CANVAS, (req_id, behind))
            if end <= known:
                entry = (CAUSAL, tuple(slot.tokens[:end]))
            elif commits:
                entry = (NOISE, None)  # behind a block that was emitted without its last tokens
            for group in range(len(self.windows)):
                self.pages[self._address(slot, group, place)] = entry

    def _read(self, slot: Slot) -> None:
        """Check the keys in front of a request's rows; those of the rows were just written."""
        for group, window in enumerate(self.windows):
            low = 0 if window is None else max(slot.computed - window + 1, 0)
            for place in range(low, slot.computed):
                found = self.pages.get(self._address(slot, group, place))
                tokens = tuple(slot.tokens[: self.end_of_block(place)])
                assert found == (CAUSAL, tokens), (group, place, found)

    def end_of_block(self, place: int) -> int:
        """Where the block of a place ends."""
        return (place // self.block_size + 1) * self.block_size

    def _address(self, slot: Slot, group: int, place: int) -> tuple[int, int]:
        page = slot.tables[group][place // self.page_size]
        assert page != 0, "the page of a visible key was freed"
        return page, place % self.page_size

    def _sample(self, slot: Slot, head: int, canvas: int, commits: bool) -> list[int]:
        """Advance the state of a row; returns what it emits."""
        if commits:
            self.taken["deferred commit"] += 1
            self.taken["trimmed commit"] += slot.pending < canvas
            self.taken["block with its tail"] += head > 0
            slot.computed = len(slot.tokens) - len(slot.tokens) % self.block_size
            slot.pending = 0
            return []
        if head and slot.pending:
            self.taken["block before a canvas" if canvas else "block alone"] += 1
        end = slot.computed + head
        slot.computed = end - end % self.block_size
        if head:
            slot.pending = 0
        if not canvas:
            return []
        slot.steps_done += 1
        steps, block = slot.text.block(tuple(slot.tokens), canvas)
        if slot.steps_done < steps:
            return []
        slot.steps_done = 0
        slot.tokens += block
        slot.pending = len(block)
        return list(block)

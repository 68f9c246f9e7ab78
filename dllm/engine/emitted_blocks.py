"""The engine core reads what canvases with a grammar emit once more, through the request's table.

A block that is no text of the grammar ends its request with an error, and no other one.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from dllm.grammar.automaton import DEAD, START
from dllm.grammar.constraint import Constraint, Thoughts
from dllm.grammar.device import CHUNK, LABEL_CHUNK, NOTHING, Sizes
from dllm.grammar.table import (
    MOST_CELLS,
    MOST_CLASSES,
    MOST_EDGES,
    MOST_LABELS,
    MOST_MEMBERS,
    MOST_STATES,
    Table,
)
from dllm.settings.request import grammar_of

SEARCHED = 2048  # states of the table of one request, beside one of the largest


class EmittedText(StructuredOutputGrammar):
    """What a request has emitted so far; vLLM asks this in the place of a matcher of its own."""

    def __init__(self, serialized: bytes, stops: Collection[int]) -> None:
        constraint = Constraint.from_bytes(serialized)
        self._table, self._stops = constraint.table, frozenset(stops)
        self._state, self._has_ended = START, False
        # What the worker's table takes, and by what it knows equal ones.
        self.sizes = Sizes.of(self._table)
        if constraint.thoughts is not None:
            self.sizes = with_thoughts(self.sizes, self._table, constraint.thoughts)
        self.key = serialized, self._stops

    @classmethod
    def of_request(cls, params: SamplingParams) -> "EmittedText":
        serialized = grammar_of(params)
        assert serialized is not None, "an admitted request has the table of its grammar"
        return cls(serialized, params.all_stop_token_ids)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """What stands behind the end of a text is not read."""
        for token in tokens:
            if self._has_ended:
                break
            if token in self._stops and self._table.accepts[self._state]:
                self._has_ended = True
            else:
                self._state = self._table.read(self._state, [token])
            if self._state == DEAD:
                return False
        return True

    def is_terminated(self) -> bool:
        return self._has_ended

    def reset(self) -> None:
        self._state, self._has_ended = START, False

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Not asked: canvases are no texts."""
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> None:
        """Not asked: what is emitted stays."""
        raise NotImplementedError

    def fill_bitmask(self, bitmask: object, batch_index: int) -> None:
        """Not asked: the worker masks canvases itself."""
        raise NotImplementedError


def capacity_for(num_requests: int, vocab_size: int) -> Sizes:
    """One table of the largest size, also with thoughts, and for each request one that few exceed.

    Some 400 MB for 64 requests and 262,144 tokens.
    """
    chunks = vocab_size // CHUNK
    label_chunks = MOST_MEMBERS // LABEL_CHUNK + MOST_LABELS
    parts = MOST_CELLS, MOST_STATES, MOST_EDGES, chunks + MOST_CLASSES, label_chunks
    largest = Sizes(0, *parts)
    most = Sizes(num_requests, *(2 * size for size in largest[1:]))
    for _ in range(num_requests):
        most = most.plus(Sizes(0, 1 << 18, 1 << 10, 1 << 14, chunks + 512, 1 << 10))
    return most


def most_searched(num_requests: int) -> int:
    """States of the tables of all requests that run, equal ones counted for each: the search keeps
    8 bytes of each in front of each place of a canvas.
    """
    return MOST_STATES + 1 + num_requests * SEARCHED


def with_thoughts(sizes: Sizes, table: Table, thoughts: Thoughts) -> Sizes:
    """At most: a state in front of the start, and classes of single tokens, which every label may
    get.
    """
    more = 3 + len(thoughts.forbidden)
    classes = table.num_classes + more
    chunks = len(table.class_of) // CHUNK + more
    num_labels = len(table.edges.bounds) - 1
    label_chunks = num_labels * (more // LABEL_CHUNK + 1) + classes // LABEL_CHUNK + 2
    return sizes.plus(Sizes(0, more * sizes.states + classes, 1, 2, chunks, label_chunks))


class GrammarCapacity:
    """Which requests with a grammar may run; equal tables count once."""

    def __init__(self, capacity: Sizes, num_states: int) -> None:
        self._capacity, self._num_states = capacity, num_states  # of `most_searched`
        self._used, self._searched = NOTHING, 0
        self._let_in: dict[str, EmittedText] = {}
        self._count: Counter[Any] = Counter()  # of those, by equal tables

    def admits(self, request: Request) -> bool:
        """Let a request in if there is room; it waits otherwise, until others end.

        One whose table alone is larger than the room ends with an error.
        """
        asked = request.structured_output_request
        text = asked.grammar if asked is not None else None
        if not isinstance(text, EmittedText) or request.request_id in self._let_in:
            return True
        assert asked is not None
        if not text.sizes.fits(self._capacity):
            asked.grammar = ValueError("the table of the grammar is too large")  # type: ignore[assignment]
            return True
        needed = self._used if self._count[text.key] else self._used.plus(text.sizes)
        searched = self._searched + text.sizes.states
        if not needed.fits(self._capacity) or searched > self._num_states:
            return False
        self._used, self._searched = needed, searched
        self._count[text.key] += 1
        self._let_in[request.request_id] = text
        return True

    def release(self, request: Request) -> None:
        """Take the room back of a request that has ended."""
        text = self._let_in.pop(request.request_id, None)
        if text is None:
            return
        self._searched -= text.sizes.states
        self._count[text.key] -= 1
        if not self._count[text.key]:
            del self._count[text.key]
            self._used = self._used.minus(text.sizes)

"""A grammar as a finite automaton over classes of tokens, in a few arrays.

Tokens that every state treats alike form a class: a few hundred classes are left of a vocabulary of
hundreds of thousands. A table holds all states that tokens lead to, up to a limit. What lies beyond
is cut off: the texts that remain are still texts of the grammar, less deeply nested ones.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dllm.grammar.automaton import DEAD, START, Automaton, Unsupported

NEVER = 1 << 30  # tokens to the end of the text from a state that has none
MOST_BYTE_STATES = 1 << 14
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio, odd


@dataclass(frozen=True)
class Vocabulary:
    """What each token stands for.

    Attributes:
        words: the bytes of every token id; empty for special tokens, which are never in a text.
        stops: ids that end a text.
    """

    words: Sequence[bytes]
    stops: tuple[int, ...]

    @cached_property
    def is_text(self) -> np.ndarray:
        """``[V]`` bool: tokens that may be in a text."""
        found = np.array([bool(word) for word in self.words])
        found[list(self.stops)] = False
        return found


@dataclass(frozen=True)
class Table:
    """States are numbered from 0, the start; S of them, K classes, E edges.

    Attributes:
        class_of: ``[V]`` int32, the class of each token; -1 for those that are in no text.
        next: ``[S, K]`` int32, the state behind a token of each class; DEAD if it is not allowed.
        accepts: ``[S]`` bool, the text may end here.
        left: ``[S]`` int32, fewest tokens to a state that accepts; NEVER if there is none.
        is_cut: states were left out.
    """

    class_of: np.ndarray
    next: np.ndarray
    accepts: np.ndarray
    left: np.ndarray
    is_cut: bool

    @property
    def num_classes(self) -> int:
        """K."""
        return self.next.shape[1]

    def read(self, state: int, tokens: Sequence[int]) -> int:
        """The state behind some tokens, DEAD if they are not allowed."""
        for token in tokens:
            kind = int(self.class_of[token])
            if state == DEAD or kind < 0:
                return DEAD
            state = int(self.next[state, kind])
        return state

    @cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(from, class, to), ``[E]`` each, sorted by where they lead."""
        source, kind = np.nonzero(self.next != DEAD)
        target = self.next[source, kind]
        order = np.argsort(target, kind="stable")
        return source[order], kind[order], target[order]

    @cached_property
    def members(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, starts): the tokens of each class side by side, and where each class begins."""
        order = np.argsort(self.class_of, kind="stable")
        order = order[np.searchsorted(self.class_of[order], 0) :]
        return order, np.searchsorted(self.class_of[order], np.arange(self.num_classes))


def build(
    automaton: Automaton,
    vocabulary: Vocabulary,
    most_states: int = 4096,
    seconds: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> Table:
    """Explore an automaton by tokens.

    Raises:
        Unsupported: it took longer than ``seconds``, or no text of kept states ends.
    """
    deadline = clock() + seconds

    def check_time() -> None:
        if clock() > deadline:
            raise Unsupported(
                f"The grammar took more than {seconds:g} s to compile. Make it smaller."
            )

    rows, is_cut = _explore_bytes(automaton, check_time)
    walk, string_of = _spellings(rows, vocabulary)
    # Breadth first over tokens; states of the table in the order in which they are found.
    order, numbers = [START], {START: 0}
    signature = np.zeros(walk.num_strings, dtype=np.uint64)
    for state in order:
        check_time()
        reached = walk.from_state(state)
        with np.errstate(over="ignore"):
            signature = (signature ^ (reached + 2).astype(np.uint64)) * HASH_FACTOR
            signature ^= signature >> np.uint64(29)
        for found in np.unique(reached).tolist():
            if found != DEAD and found not in numbers:
                if len(order) == most_states:
                    is_cut = True
                    continue
                numbers[found] = len(order)
                order.append(found)
    _, first, class_of_string = np.unique(signature, return_index=True, return_inverse=True)
    number_of = np.full(len(rows) + 1, DEAD, dtype=np.int32)  # the last one is for DEAD
    number_of[order] = np.arange(len(order))
    following = np.stack([number_of[walk.from_state(state)[first]] for state in order])
    class_of = np.where(string_of >= 0, class_of_string[string_of], -1).astype(np.int32)
    accepts = np.array([automaton.accepts(state) for state in order])
    left = _tokens_left(following, accepts)
    if left[0] == NEVER:
        raise Unsupported("No text of the grammar is within the limit of states. Make it smaller.")
    return Table(class_of, following, accepts, left, is_cut)


def _explore_bytes(automaton: Automaton, check_time: Callable[[], None]) -> tuple[np.ndarray, bool]:
    """(rows ``[states, 256]``, whether states were cut off), nearest states first."""
    state = START
    while state < min(len(automaton), MOST_BYTE_STATES):
        automaton.row(state)
        state += 1
        if state % 64 == 0:
            check_time()
    rows = automaton.rows[:state].copy()
    is_beyond = rows >= state
    rows[is_beyond] = DEAD
    return rows, bool(is_beyond.any())


class _Spellings:
    """Different strings of byte classes, as a tree; walked by all strings at once.

    Args:
        strings: each of them once.
        rows: ``[states, byte classes]``, the state behind each.
    """

    def __init__(self, strings: Sequence[bytes], rows: np.ndarray) -> None:
        self.num_strings = len(strings)
        nodes: dict[bytes, int] = {b"": 0}
        levels: list[list[tuple[int, int, int]]] = []  # (node, parent, byte class), by length
        for string in strings:
            for length in range(len(string), 0, -1):
                prefix = string[:length]
                if prefix in nodes:
                    break
                nodes[prefix] = len(nodes)
        for prefix, node in nodes.items():
            if prefix:
                while len(levels) < len(prefix):
                    levels.append([])
                levels[len(prefix) - 1].append((node, nodes[prefix[:-1]], prefix[-1]))
        self._levels = [np.array(level, dtype=np.int64).T for level in levels]
        self._end = np.array([nodes[string] for string in strings], dtype=np.int64)
        self._num_nodes = len(nodes)
        # A last row and column for DEAD, so that -1 as an index leads to DEAD again.
        self._rows = np.vstack([rows, np.full((1, rows.shape[1]), DEAD, dtype=rows.dtype)])

    def from_state(self, state: int) -> np.ndarray:
        """``[strings]`` int: the state behind each string."""
        at = np.full(self._num_nodes, DEAD, dtype=np.int32)
        at[0] = state
        for node, parent, kind in self._levels:
            before = at[parent]
            alive = np.flatnonzero(before != DEAD)
            if not len(alive):
                break
            at[node[alive]] = self._rows[before[alive], kind[alive]]
        reached: np.ndarray = at[self._end]
        return reached


def _spellings(rows: np.ndarray, vocabulary: Vocabulary) -> tuple[_Spellings, np.ndarray]:
    """Tokens spelled in classes of bytes that all states treat alike.

    Returns:
        The different spellings, and the number of each token's, ``[V]``; -1 for tokens in no text.
    """
    columns, byte_class = np.unique(rows, axis=1, return_inverse=True)
    translation = bytes(byte_class.reshape(-1).astype(np.uint8).tolist())
    numbers: dict[bytes, int] = {}
    string_of = np.full(len(vocabulary.words), -1, dtype=np.int64)
    for token in np.flatnonzero(vocabulary.is_text).tolist():
        spelling = vocabulary.words[token].translate(translation)
        string_of[token] = numbers.setdefault(spelling, len(numbers))
    return _Spellings(list(numbers), columns), string_of


def _tokens_left(following: np.ndarray, accepts: np.ndarray) -> np.ndarray:
    """``[S]``: fewest tokens to a state that accepts, by relaxation."""
    left = np.where(accepts, 0, NEVER).astype(np.int64)
    while True:
        behind = np.append(left, NEVER)[following].min(axis=1, initial=NEVER)  # DEAD is the last
        better = np.minimum(left, behind + 1)
        if (better == left).all():
            return np.minimum(left, NEVER).astype(np.int32)
        left = better

"""A grammar as a finite automaton over classes of tokens, in a few arrays.

Tokens that every state treats alike form a class: a few hundred classes are left of a vocabulary of
hundreds of thousands. A table holds all states that tokens lead to. Where recursion has no end of
them it holds those of so many levels (`reach`): its texts are still texts of the grammar.

What a token does is a map from each state to the one behind it. The map of a word is that of the
word without its last byte, and then that byte's. Few of the maps are different, so each is computed
once for all words that share it, along the tree of the beginnings of all words.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dllm.grammar.automaton import DEAD, START
from dllm.grammar.counts import Counts, Moves, most_exact, told_apart
from dllm.grammar.reach import NEVER, ByteTable, distances
from dllm.grammar.refusals import Unsupported
from dllm.grammar.vocabulary import Trie, Vocabulary, pack, unpack

MOST_STATES = (1 << 15) - 1
# Entries of all maps together, int16 each.
MOST_MAP_ENTRIES = 1 << 25
AT_ONCE = 16  # maps between whose states pairs are looked up
MOST_EDGES = 1 << 18  # every denoise step follows all of them, at each position of a canvas
MOST_LABELS = 1 << 12
MOST_MEMBERS = 1 << 18  # classes of all labels together
MOST_CELLS = 1 << 24  # states times classes
MOST_CLASSES = 1 << 12


class Edges(NamedTuple):
    """Which states lead to which: E pairs, sorted by the second state and then by the first.

    The label of a pair is the set of classes that lead along it. L labels are different.
    """

    source: np.ndarray  # [E] int64
    label: np.ndarray  # [E] int64
    target: np.ndarray  # [E] int64
    members: np.ndarray  # [M] int64, the classes of each label side by side, ascending
    bounds: np.ndarray  # [L + 1] int64, where each label begins, and the last one ends

    def classes(self, label: int) -> np.ndarray:
        """The classes of a label."""
        return self.members[self.bounds[label] : self.bounds[label + 1]]


@dataclass(frozen=True)
class Table:
    """States are numbered from 0, the start; S of them, K classes.

    Attributes:
        class_of: ``[V]`` int32, the class of each token; -1 for those that are in no text.
        next: ``[S, K]`` int32, the state behind a token of each class; DEAD if it is not allowed.
        accepts: ``[S]`` bool, the text may end here.
        left: ``[S]`` int32, fewest tokens to a state that accepts.
    """

    class_of: np.ndarray
    next: np.ndarray
    accepts: np.ndarray
    left: np.ndarray

    @classmethod
    def of_any_text(cls, vocab_size: int) -> "Table":
        """A table with one state, in which every token is allowed and every text may end."""
        class_of, following = np.zeros(vocab_size, np.int32), np.full((1, 1), START, np.int32)
        return cls.counted(class_of, following, np.ones(1, dtype=bool))

    @classmethod
    def counted(cls, class_of: np.ndarray, following: np.ndarray, accepts: np.ndarray) -> "Table":
        """A table without the classes that have no token, whose ``left`` is counted."""
        is_text = class_of >= 0
        used, numbers = np.unique(class_of[is_text], return_inverse=True)
        class_of = np.full_like(class_of, -1)
        class_of[is_text] = numbers
        found = cls(class_of, following[:, used], accepts, np.zeros(len(accepts), np.int32))
        return replace(found, left=distances(found.edges.source, found.edges.target, accepts))

    @property
    def num_classes(self) -> int:
        return self.next.shape[1]

    def read(self, state: int, tokens: Sequence[int]) -> int:
        """The state behind some tokens, DEAD if they are not allowed."""
        for token in tokens:
            kind = int(self.class_of[token])
            if state == DEAD or kind < 0:
                return DEAD
            state = int(self.next[state, kind])
        return state

    def without(self, tokens: Collection[int]) -> "Table":
        """The table of the texts that have none of these tokens."""
        removed = [token for token in tokens if self.class_of[token] >= 0]
        if not removed:
            return self
        class_of = self.class_of.copy()
        class_of[removed] = -1
        found = Table.counted(class_of, self.next, self.accepts)
        if found.left[START] == NEVER:
            raise Unsupported(
                "The grammar has no text without the tokens that end the request (stop_token_ids) "
                "and special tokens. Leave some of the stop_token_ids out."
            )
        return found

    def to_bytes(self) -> bytes:
        """Bytes for another process; `from_bytes` reads them."""
        small = [part.astype(np.int16) for part in (self.class_of, self.next)]
        return pack([*small, self.accepts, self.left])

    @classmethod
    def from_bytes(cls, packed: bytes) -> "Table":
        class_of, following, accepts, left = unpack(packed)
        return cls(class_of.astype(np.int32), following.astype(np.int32), accepts, left)

    @cached_property
    def edges(self) -> Edges:
        source, kind = np.nonzero(self.next != DEAD)
        target = self.next[source, kind].astype(np.int16)  # which numpy sorts in linear time
        order = np.argsort(target, kind="stable")
        source, kind, target = source[order], kind[order], target[order].astype(np.int64)
        is_first = (np.diff(source, prepend=-1) != 0) | (np.diff(target, prepend=-1) != 0)
        first = np.flatnonzero(is_first)
        numbers: dict[bytes, int] = {}
        label = np.array(
            [
                numbers.setdefault(kind[low:high].tobytes(), len(numbers))
                for low, high in itertools.pairwise([*first.tolist(), len(kind)])
            ],
            dtype=np.int64,
        )
        members = np.frombuffer(b"".join(numbers), dtype=kind.dtype)
        bounds = np.cumsum([0, *(len(one) // kind.itemsize for one in numbers)])
        return Edges(source[first], label, target[first], members, bounds)

    @cached_property
    def members(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, starts): the tokens of each class side by side, and where each class begins."""
        order = np.argsort(self.class_of, kind="stable")
        order = order[np.searchsorted(self.class_of[order], 0) :]
        return order, np.searchsorted(self.class_of[order], np.arange(self.num_classes))


def by_tokens(
    states: ByteTable,
    vocabulary: Vocabulary,
    marks: Sequence[int] = (),
    most_states: int = MOST_STATES,
) -> Table:
    """The table over tokens of one over bytes.

    Args:
        marks: tokens that no others spell where the grammar has their word and nothing else.

    Raises:
        Unsupported: no text can be spelled, or the words do too many different things.
    """
    marks = [token for token in marks if vocabulary.is_text[token]]
    others, of_marks = _of_marks(states, [vocabulary.words[token] for token in marks])
    moves = Moves(others)
    maps, map_of = _maps(moves, others.class_of, vocabulary.trie)
    map_of[marks] = np.arange(len(maps), len(maps) + len(marks))
    maps += [
        _move(states, vocabulary.words[token], is_there)
        for token, is_there in zip(marks, of_marks, strict=True)
    ]
    map_of[~vocabulary.is_text] = NOWHERE
    used, kind_of = np.unique(map_of, return_inverse=True)
    counts = most_exact(states, most_states) if moves.has_circles else None
    may_end = states.accepts if counts is None else np.repeat(states.accepts, counts.size)
    kinds, source, target = _of_kinds([maps[each] for each in used], counts, len(may_end))
    del maps
    # Only states that tokens lead to, and from which tokens lead to an end.
    is_start = np.arange(len(may_end)) == START
    is_kept = distances(target, source, is_start) < NEVER
    is_kept &= distances(source, target, may_end) < NEVER
    if not is_kept[START]:
        raise Unsupported("No text of the grammar can be spelled by the tokens. Make it wider.")
    renumbered, accepts = (np.cumsum(is_kept) - 1).astype(np.int16), may_end[is_kept]
    columns: dict[bytes, int] = {b"": -1}  # DEAD everywhere
    kept: list[np.ndarray] = []
    class_of_kind = np.empty(len(used), dtype=np.int32)
    for one, pairs in enumerate(kinds):
        column = renumbered[pairs[:, is_kept[pairs].all(axis=0)]]
        class_of_kind[one] = known = columns.setdefault(column.tobytes(), len(kept))
        if known == len(kept):
            kept.append(column)
    _check("kinds of tokens", len(kept), MOST_CLASSES)
    _check("states times kinds of tokens", len(accepts) * len(kept), MOST_CELLS)
    following: np.ndarray = np.full((len(accepts), len(kept)), DEAD, dtype=np.int32)
    for one, (before, behind) in enumerate(kept):
        following[before, one] = behind
    leads = is_kept[source] & is_kept[target]
    source, target = (renumbered[at[leads]].astype(np.int64) for at in (source, target))
    left = distances(source, target, accepts)
    table = Table(class_of_kind[kind_of], following, accepts, left)
    edges = table.edges
    _check("pairs of states, one behind the other", len(edges.source), MOST_EDGES)
    _check("sets of tokens that lead from state to state", len(edges.bounds) - 1, MOST_LABELS)
    _check("kinds of tokens in such sets", len(edges.members), MOST_MEMBERS)
    return table


def _check(what: str, number: int, most: int) -> None:
    if number > most:
        raise Unsupported(
            f"The grammar has {number:,} {what}; allowed: {most:,}. Make it smaller: fewer "
            "choices and patterns."
        )


def _of_marks(states: ByteTable, words: Sequence[bytes]) -> tuple[ByteTable, list[np.ndarray]]:
    """(the states for all tokens but marks; ``[S]`` bool, where each mark may stand).

    A mark stands where nothing leads but the bytes in front of its last one: there no other tokens
    spell it. In free text, which may end behind it, it is text. It is in no string of JSON.
    """
    rows, found = states.rows.copy(), []
    sizes = np.bincount(states.class_of)
    steps = np.append(states.rows, np.full((1, rows.shape[1]), DEAD), axis=0)  # also from DEAD
    may_end = np.append(states.accepts, False)
    for word in words:
        at = np.arange(len(rows), dtype=np.int16)
        is_inside = np.full(len(rows), len(word) > 1)  # behind the bytes so far, and no others
        for byte in word[:-1]:
            kind = states.class_of[byte]
            is_other = np.ones(rows.shape, dtype=bool)
            is_other[is_inside, kind] = sizes[kind] > 1
            reached = np.zeros(len(rows) + 1, dtype=bool)  # the last one is for DEAD
            reached[states.rows[is_inside, kind]] = True
            reached[states.rows[is_other]] = False
            at, is_inside = steps[at, kind], reached[:-1]
        last = states.class_of[word[-1]]
        is_inside &= sizes[last] == 1
        rows[is_inside, last] = DEAD
        behind = steps[at, last]
        found.append(np.append(is_inside, False)[at] | may_end[behind])
    return replace(states, rows=rows), found


def _move(states: ByteTable, word: bytes, is_there: np.ndarray) -> np.ndarray:
    """What a word does (`Moves`) to the states that ``is_there``, ``[S]`` bool, has."""
    moves = Moves(states)
    found = moves.identity[:, is_there]
    for byte in word:
        found = moves.behind(found, int(states.class_of[byte]))
    return found


def _of_kinds(
    maps: list[np.ndarray], counts: Counts | None, num_states: int
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """(for each map ``[2, N]`` int16, states and those behind them; all these pairs, each once)."""
    found, pairs = [], []
    for first in range(0, len(maps), AT_ONCE):
        some = maps[first : first + AT_ONCE]
        kind = np.repeat(np.arange(len(some)), [one.shape[1] for one in some])
        moves = np.insert(np.concatenate(some, axis=1).astype(np.int64), 1, kind, axis=0)
        source, kind, target = moves[:3] if counts is None else told_apart(moves, counts)
        pairs.append(np.unique(source * num_states + target))
        both = np.stack([source, target]).astype(np.int16)
        found += np.split(both, np.searchsorted(kind, np.arange(1, len(some))), axis=1)
    return found, *np.divmod(np.unique(np.concatenate(pairs)), num_states)


IDENTITY, NOWHERE = 0, 1  # the first maps: of the empty word, and of a word that is never allowed


def _maps(moves: Moves, class_of: np.ndarray, trie: Trie) -> tuple[list[np.ndarray], np.ndarray]:
    """(different maps (`Moves`); ``[V]``, the map of each word)."""
    num_kinds, num_states = moves.by_kind.shape
    maps = [moves.identity, moves.identity[:, :0]]
    numbers = {each.tobytes(): number for number, each in enumerate(maps)}
    behind: dict[int, int] = {}  # map * num_kinds + kind of byte -> map
    map_of = np.full(trie.num_nodes, NOWHERE, dtype=np.int32)
    map_of[0] = IDENTITY
    num_entries = 0
    first = 1
    for parent, byte in trie.levels:
        before = map_of[parent]
        alive = np.flatnonzero(before != NOWHERE)
        pair, which = np.unique(
            before[alive].astype(np.int64) * num_kinds + class_of[byte[alive]], return_inverse=True
        )
        found = np.empty(len(pair), dtype=np.int32)
        for index, key in enumerate(pair.tolist()):
            if key not in behind:
                one = moves.behind(maps[key // num_kinds], key % num_kinds)
                spelled = one.tobytes()
                if spelled not in numbers:
                    num_entries += one.size
                    if num_entries > MOST_MAP_ENTRIES:
                        raise Unsupported(
                            f"The grammar has {num_states} states, between which tokens "
                            f"lead in more than {len(maps)} different ways. Make it smaller: "
                            "shorter texts and lists."
                        )
                    numbers[spelled] = len(maps)
                    maps.append(one)
                behind[key] = numbers[spelled]
            found[index] = behind[key]
        map_of[first + alive] = found[which]
        first += len(parent)
    return maps, map_of[trie.end]

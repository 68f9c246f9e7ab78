"""Long strings: their characters are counted by tokens, not by bytes.

A state for each byte of each of 300 characters would be 2,400 states. So where a character is
repeated many times the automaton goes round in a circle, and the states of that circle are told
apart behind the tokens, by the number of characters that were read: exactly if that fits into the
limit on states. Otherwise numbers are rounded up behind each token, so that a string may have to
end before it has all the characters that it might have; it never has more.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dllm.grammar.automaton import DEAD, Automaton
from dllm.grammar.reach import ByteTable, nearest
from dllm.grammar.rules import Unsupported

# How many numbers are told apart in a string: all of them, or so many.
NUMBERS = (1 << 20, 2048, 1024, 512, 256, 128, 64, 32, 16)
ENOUGH = 64  # of them, for which levels of recursion are given up
SHARES = (2, 4, 8)  # of the states, for what is not counted
INSIDE = 8  # times fewer inside of a character, where few tokens end
STAYS = -1  # in the place of a number: the circle was not left


@dataclass(frozen=True)
class Counts:
    """Numbers that are told apart, for each of the S states.

    Attributes:
        most: ``[S]`` int64, characters that the circle of a state may have; 0 without a circle.
        step: ``[S]`` int64, numbers are multiples of it, and ``most``.
        size: ``[S]`` int64, how many they are.
    """

    most: np.ndarray
    step: np.ndarray
    size: np.ndarray

    @classmethod
    def of(cls, states: ByteTable, numbers: int) -> "Counts":
        """Counts with at most so many numbers for each state."""
        most = np.append(states.most, 0)[states.circle]
        told = np.where(states.is_head, numbers, np.maximum(numbers // INSIDE, 4))
        step = np.maximum(-(-most // told), 1)
        return cls(most, step, -(-most // step) + 1)


def nearest_counted(automaton: Automaton, most_states: int) -> ByteTable:
    """As `nearest`; where recursion would leave no states for counts, of fewer levels."""
    states = nearest(automaton, most_states)
    for share in SHARES:
        if Counts.of(states, ENOUGH).size.sum() <= most_states:
            break
        try:
            states = nearest(automaton, most_states // share)
        except Unsupported:  # it has so many states without recursion
            break
    return states


def with_counts(states: ByteTable, most_states: int) -> Iterator[Counts]:
    """The counts that fit into so many states, from the most exact ones on."""
    for numbers in NUMBERS:
        counts = Counts.of(states, numbers)
        if counts.size.sum() <= most_states:
            yield counts


class Moves:
    """What words do to states: arrays ``[S]`` of states, or ``[3, S]`` where there are circles.

    Rows of the latter: the state behind the word; the characters of the first circle behind which
    it was left (STAYS if it was not); those of the circle in which the word ends.
    """

    def __init__(self, states: ByteTable) -> None:
        num_states, num_kinds = states.rows.shape
        # A last row for DEAD, so that -1 as an index leads to DEAD again.
        self.by_kind = np.full((num_kinds, num_states + 1), DEAD, dtype=np.int16)
        self.by_kind[:, :-1] = states.rows.T
        self.has_circles = len(states.most) > 0
        circle = np.append(states.circle, -1)
        same = (circle[self.by_kind] == circle) & (circle >= 0)
        self._stays = same
        self._adds = (same & np.append(states.is_head, False)[self.by_kind]).astype(np.int16)
        self._leaves = ~same & (circle >= 0) & (self.by_kind != DEAD)
        self._most = np.append(states.most, 0)[circle]
        self.nowhere = np.full(num_states, DEAD, dtype=np.int16)
        self.identity = np.arange(num_states, dtype=np.int16)
        if self.has_circles:
            zero = np.zeros_like(self.identity)
            self.nowhere = np.stack([self.nowhere, zero, zero])
            first = np.where(states.circle >= 0, STAYS, 0).astype(np.int16)
            self.identity = np.stack([self.identity, first, zero])

    def behind(self, move: np.ndarray, kind: int) -> np.ndarray:
        """What a word does, and then a byte of a kind."""
        if not self.has_circles:
            found: np.ndarray = self.by_kind[kind][move]
            return found
        at, left, count = move
        leaves = self._leaves[kind][at]
        is_first = left == STAYS
        is_over = leaves & ~is_first & (count > self._most[at])
        target = np.where(is_over, DEAD, self.by_kind[kind][at])
        left = np.where(leaves & is_first, count, left)
        count = np.where(self._stays[kind][at], count + self._adds[kind][at], 0)
        is_dead = target == DEAD
        return np.stack([target, np.where(is_dead, 0, left), np.where(is_dead, 0, count)]).astype(
            np.int16
        )


def told_apart(moves: np.ndarray, counts: Counts, accepts: np.ndarray) -> tuple[np.ndarray, ...]:
    """(``[T, N]`` int16, the states behind N moves; ``[T]``, which accept) of T states with counts.

    Args:
        moves: ``[3, S, N]`` (`Moves`).
    """
    first = np.cumsum(counts.size) - counts.size
    rows = []
    for state, (target, left, count) in enumerate(zip(*moves, strict=True)):
        read = np.minimum(np.arange(counts.size[state]) * counts.step[state], counts.most[state])
        read = read[:, None]
        stays = left == STAYS
        number = np.where(stays, read + count, count)
        is_allowed = (target != DEAD) & (number <= counts.most[target])
        is_allowed &= stays | (read + left <= counts.most[state]) | (counts.most[state] == 0)
        rows.append(np.where(is_allowed, first[target] - (-number // counts.step[target]), DEAD))
    return np.concatenate(rows).astype(np.int16), np.repeat(accepts, counts.size)

"""Long strings: their characters are counted by tokens, not by bytes.

A state for each byte of each of 300 characters would be 2,400 states. So where a character is
repeated many times the automaton goes round in a circle, and the states of that circle are told
apart behind the tokens, by the number of characters that were read: exactly if that fits into the
limit on states. Otherwise numbers are rounded up behind each token, so that a string may have to
end before it has all the characters that it might have; it never has more.
"""

from dataclasses import dataclass

import numpy as np

from dllm.grammar.automaton import DEAD, Automaton
from dllm.grammar.reach import ByteTable, TooManyStates, nearest
from dllm.grammar.refusals import Unsupported

# How many numbers are told apart in a string: all of them, or so many.
NUMBERS = (1 << 20, 2048, 1024, 512, 256, 128, 64, 32, 16)
ENOUGH = 64  # of them, for which levels of recursion are given up
SHARES = (2, 4, 8)  # of the states, for what is not counted
COUNTED = 4096  # states with numbers, unless even the fewest numbers take more
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
    few = min(most_states, COUNTED)
    for share in SHARES:
        if not len(states.most) or Counts.of(states, ENOUGH).size.sum() <= few:
            break
        try:
            states = nearest(automaton, few // share)
        except Unsupported:  # it has so many states without recursion
            break
    return states


def most_exact(states: ByteTable, most_states: int) -> Counts:
    """The most exact counts that fit into COUNTED states, or else into so many."""
    for limit in (min(most_states, COUNTED), most_states):
        for numbers in NUMBERS:
            counts = Counts.of(states, numbers)
            if counts.size.sum() <= limit:
                return counts
    raise TooManyStates(most_states)


class Moves:
    """What words do to states: arrays ``[2, N]`` of N states and those behind the word.

    Where there are circles, ``[4, N]``: also the characters of the first circle behind which it was
    left (STAYS if it was not), and those of the circle in which the word ends.
    """

    def __init__(self, states: ByteTable) -> None:
        self.by_kind = np.ascontiguousarray(states.rows.T)
        self.has_circles = len(states.most) > 0
        numbers = np.arange(len(states.rows), dtype=np.int16)
        self.identity = np.stack([numbers, numbers])
        if self.has_circles:
            circle = states.circle
            self._stays = (circle[self.by_kind] == circle) & (circle >= 0)
            self._adds = (self._stays & states.is_head[self.by_kind]).astype(np.int16)
            self._leaves = ~self._stays & (circle >= 0)
            self._most = np.append(states.most, 0)[circle]
            first = np.where(circle >= 0, STAYS, 0).astype(np.int16)
            self.identity = np.stack([numbers, numbers, first, np.zeros_like(first)])

    def behind(self, move: np.ndarray, kind: int) -> np.ndarray:
        """What a word does, and then a byte of a kind."""
        source, at = move[:2]
        target = self.by_kind[kind][at]
        is_there = target != DEAD
        if not self.has_circles:
            return np.stack([source[is_there], target[is_there]])
        left, count = move[2:]
        leaves, is_first = self._leaves[kind][at], left == STAYS
        is_there &= ~leaves | is_first | (count <= self._most[at])
        left = np.where(leaves & is_first, count, left)
        count = np.where(self._stays[kind][at], count + self._adds[kind][at], 0).astype(np.int16)
        return np.stack([source, target, left, count])[:, is_there]


def told_apart(moves: np.ndarray, counts: Counts) -> np.ndarray:
    """``[3, M]``: states with counts, the kinds of moves, and the states behind these.

    Args:
        moves: ``[5, N]``: a state, a kind, and what it does there (`Moves`).
    """
    size, first = counts.size[moves[0]], np.cumsum(counts.size) - counts.size
    each = np.repeat(np.arange(len(size)), size)
    which = np.arange(len(each)) - np.repeat(np.cumsum(size) - size, size)
    source, kind, target, left, count = moves[:, each]
    read, most = which * counts.step[source], counts.most[source]
    read = np.minimum(read, most)
    stays = left == STAYS
    number = np.where(stays, read + count, count)
    is_allowed = number <= counts.most[target]
    is_allowed &= stays | (read + left <= most) | (most == 0)
    behind = first[target] - (-number // counts.step[target])
    return np.stack([first[source] + which, kind, behind])[:, is_allowed]

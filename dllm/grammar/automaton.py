"""A grammar as an automaton over bytes, whose states are numbers.

xgrammar's own matcher does not tell whether two texts allow the same continuations; dynamic
programming over a canvas needs just that.

Here a state is a set of (state of a rule, stack of the rules that it was called from). Stacks and
sets are numbered, so that equal continuations have equal numbers. A rule may call itself, so there
may be no end of states; they are made when they are asked for.
"""

from array import array
from collections.abc import Iterable, Sequence

import networkx
import numpy as np

from dllm.grammar.classes import side_by_side
from dllm.grammar.pattern_edges import EPSILON
from dllm.grammar.refusals import Unsupported
from dllm.grammar.rules import REPEAT, RULE, Rules

START, DEAD = 0, -1
MOST_ITEMS = 200_000  # in one state, before it is called unbounded

# What a rule returns to: an edge's target and the stack below, and for a repetition also which one
# it is and how often the rule has been read.
Frame = tuple[int, int] | tuple[int, int, int, int]
Item = tuple[int, int]  # state of a rule, stack
END: Item = (-1, 0)  # the whole text may end


class Automaton:
    """The states that were asked for so far; the arguments are those of ``Rules``."""

    def __init__(self, serialized: str, is_merged: bool = True) -> None:
        self.is_merged = is_merged
        rules = Rules(serialized, is_merged)
        self._edges, self._repeats = rules.edges, rules.repeats
        self._rule_starts, self._rule_ends = rules.starts, rules.ends
        self._recursive_returns, self._firsts = rules.recursive_returns, rules.firsts
        # By a repetition and what follows it, the state of a rule that leads nowhere else.
        self._repeating = {
            (edges[0][1], edges[0][2]): at
            for at, edges in enumerate(rules.edges)
            if len(edges) == 1 and edges[0][0] == REPEAT and at not in rules.ends
        }
        # Stack 0 is empty.
        self._frames: list[Frame] = [(0, 0)]
        self._frame_numbers: dict[Frame, int] = {}
        self._stack_levels = [0]  # recursive calls on each stack
        self._states: list[frozenset[Item]] = []
        self._numbers: dict[frozenset[Item], int] = {}
        # Ranges of bytes, those of a state side by side: their first bytes, the states behind them.
        self._first, self._behind = array("B"), array("i")
        self._ranges: dict[int, tuple[int, int]] = {}  # of a state that was asked for
        self._levels: list[int] = []
        self._number(self._closure([(rules.starts[rules.root], 0)]))  # START

    def __len__(self) -> int:
        return len(self._states)

    def accepts(self, state: int) -> bool:
        return END in self._states[state]

    def level(self, state: int) -> int:
        """How many recursive calls are open: in JSON, objects and lists inside each other."""
        return self._levels[state]

    def targets(self, state: int) -> list[int]:
        """The states behind one byte."""
        return sorted({*self._behind[slice(*self._range(state))]} - {DEAD})

    def rows(self, states: Sequence[int], numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(``[S, P]``: what ``numbers`` has for the state behind each part of the bytes).

        Also ``[256]``, the part of each byte: all of these states treat its bytes alike.

        Args:
            numbers: of DEAD, and then of each state.
        """
        ranges, _ = side_by_side(*np.array([self._range(state) for state in states]).T)
        first = np.frombuffer(self._first, dtype=np.uint8)[ranges]
        cuts, place = np.unique(first, return_inverse=True)
        widths = np.diff(place, append=0) % len(cuts)
        widths[widths == 0] = len(cuts)
        behind = np.frombuffer(self._behind, dtype=np.int32)[ranges]
        rows = np.repeat(numbers[behind + 1], widths).reshape(-1, len(cuts))
        return rows, np.searchsorted(cuts, np.arange(256), side="right") - 1

    def circles(self, states: Sequence[int]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Where rounds of long repetitions are counted (`counts`).

        Circles with a common state are one, with the smallest of their limits.

        Returns:
            ``[S]`` the circle of each state, -1 without one; ``[S]`` whether a round begins there;
            the limit on rounds of each circle.
        """
        joined = networkx.Graph()
        found, limits = [], {}
        is_head = np.zeros(len(states), dtype=bool)
        for place, state in enumerate(states):
            frames = []
            for at, stack in self._states[state]:
                frame = self._frames[stack]
                if len(frame) == 4 and frame[2] in self._firsts:
                    _, fewest, most = self._repeats[frame[2]]
                    if frame[3] > fewest:
                        frames.append(stack)
                        limits[stack] = most - fewest
                        is_head[place] |= at in self._firsts[frame[2]]
            if frames:
                networkx.add_path(joined, frames)
            found.append(frames[0] if frames else -1)
        circles = sorted(map(sorted, networkx.connected_components(joined)))
        number = {frame: which for which, circle in enumerate(circles) for frame in circle}
        circle = np.array([number.get(frame, -1) for frame in found], dtype=np.int64)
        return circle, is_head, [min(limits[frame] for frame in frames) for frames in circles]

    def _range(self, state: int) -> tuple[int, int]:
        """Where the ranges of bytes that all edges of a state treat alike stand."""
        if state not in self._ranges:
            moves = [
                (low, high, (target, stack))
                for at, stack in self._states[state]
                if at >= 0
                for low, high, target in self._edges[at]
                if low >= 0
            ]
            cuts = {0} | {low for low, _, _ in moves} | {high + 1 for _, high, _ in moves}
            known: dict[frozenset[Item], int] = {frozenset(): DEAD}
            start = len(self._first)
            for first in sorted(cuts - {256}):
                items = frozenset(item for low, high, item in moves if low <= first <= high)
                if items not in known:
                    known[items] = self._number(self._closure(items))
                self._first.append(first)
                self._behind.append(known[items])
            self._ranges[state] = start, len(self._first)
        return self._ranges[state]

    def _number(self, state: frozenset[Item]) -> int:
        if state not in self._numbers:
            self._numbers[state] = len(self._states)
            self._states.append(state)
            self._levels.append(max((self._stack_levels[stack] for _, stack in state), default=0))
        return self._numbers[state]

    def _closure(self, items: Iterable[Item]) -> frozenset[Item]:
        """All items that are reached without reading a byte: those that read one next, and END."""
        todo = list(items)
        seen, kept = set(todo), set()
        while todo:
            if len(seen) > MOST_ITEMS:
                raise Unsupported(
                    f"The grammar goes on in more than {MOST_ITEMS:,} ways without a character. It "
                    "is left-recursive (a rule calls itself before it reads anything): write the "
                    "recursion behind a symbol. Or its repetitions are nested: make them fewer."
                )
            at, stack = todo.pop()
            reached: list[Item] = []
            if at in self._rule_ends:
                if stack == 0:
                    kept.add(END)
                else:
                    frame = self._frames[stack]
                    reached += [frame] if len(frame) == 2 else self._repeat(*frame)
            for low, high, target in self._edges[at]:
                if low >= 0:
                    kept.add((at, stack))
                elif low == EPSILON:
                    reached.append((target, stack))
                elif low == RULE:
                    reached.append((self._rule_starts[high], self._returning(target, stack)))
                else:
                    reached += self._repeat(target, stack, high, 0)
            todo += [item for item in reached if item not in seen]
            seen.update(reached)
        return frozenset(kept)

    def _returning(self, target: int, stack: int) -> int:
        # The last thing that a rule does: it returns to where its caller returns.
        is_last = target in self._rule_ends and not self._edges[target]
        return stack if is_last else self._push((target, stack))

    def _repeat(self, target: int, stack: int, name: int, count: int) -> list[Item]:
        """Behind ``count`` repetitions: once more, and (if they are enough) on to ``target``."""
        rule, fewest, most = self._repeats[name]
        reached = [(target, stack)] if count >= fewest else []
        if most == -1 or count < most:
            if most == -1:  # enough is enough: what follows is what follows the first round
                count = min(count + 1, fewest)
            else:
                count = 1 + (min(count, fewest) if name in self._firsts else count)
            again = self._repeating.get((name, target)) if count == 0 else None
            frame = (target, stack, name, count) if again is None else (again, stack)
            reached.append((self._rule_starts[rule], self._push(frame)))
        return reached

    def _push(self, frame: Frame) -> int:
        if frame not in self._frame_numbers:
            target, stack = frame[:2]
            self._frame_numbers[frame] = len(self._frames)
            self._frames.append(frame)
            name = frame[2] if len(frame) == 4 else None
            is_deeper = (target, name) in self._recursive_returns
            self._stack_levels.append(self._stack_levels[stack] + is_deeper)
        return self._frame_numbers[frame]

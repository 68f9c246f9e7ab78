"""A grammar as an automaton over bytes, whose states are numbers.

xgrammar compiles JSON schemas, regular expressions, EBNF and structural tags to one form: a finite
automaton for each rule, whose edges are byte ranges, references to other rules, and repetitions of
a rule. ``CompiledGrammar.serialize_json()`` shows it. xgrammar's own matcher does not tell whether
two texts allow the same continuations; dynamic programming over a canvas needs just that.

Here a state is a set of (state of a rule, stack of the rules that it was called from). Stacks and
sets are numbered, so that equal continuations have equal numbers. A rule may call itself, so there
may be no end of states; they are made when they are asked for.
"""

import itertools
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

START, DEAD = 0, -1
# Kinds of edges in the serialized automaton: in the place of the lowest byte of a range.
EPSILON, RULE, REPEAT, TOKEN, NOT_TOKEN = -1, -2, -4, -5, -6
NO_END = 1 << 29  # bytes to the end of a rule that has none
MOST_ITEMS = 200_000  # in one state, before it is called unbounded
SURROGATE_LEAD, LAST_BEFORE_SURROGATES = 0xED, 0x9F
CONTROL = 32  # bytes below are control characters
JSON_SPACES = (9, 10, 13)


class Unsupported(ValueError):
    """A grammar that is refused; the message says why, and what to do."""


class Repeat(NamedTuple):
    """A rule that is repeated; ``most`` is -1 without a limit."""

    rule: int
    fewest: int
    most: int


# What a rule returns to: an edge's target and the stack below, and for a repetition also which one
# it is and how often the rule has been read.
Frame = tuple[int, int] | tuple[int, int, int, int]
Item = tuple[int, int]  # state of a rule, stack
END: Item = (-1, 0)  # the whole text may end


class Automaton:
    """The states that were asked for so far.

    Args:
        serialized: of xgrammar's ``CompiledGrammar.serialize_json()``.
        is_json: strings must not hold raw control characters; xgrammar 0.2.8 lets them into strings
            whose length is bounded.
        most_states: more are refused.

    Raises:
        Unsupported: no finite text, left recursion, too many states, or tokens in the grammar.
    """

    def __init__(self, serialized: str, is_json: bool = False, most_states: int = 1 << 16) -> None:
        grammar = json.loads(serialized)["grammar"]
        fsm = grammar["complete_fsm"]
        data, bounds = fsm["edges"]["data_"], fsm["edges"]["indptr_"]
        if any(edge[0] in (TOKEN, NOT_TOKEN) for edge in data):
            raise Unsupported("The grammar names tokens; allowed: text only.")
        self.most_states = most_states
        self._edges = [data[low:high] for low, high in itertools.pairwise(bounds)]
        if is_json:
            self._edges = [_without_controls(edges) for edges in self._edges]
        _remove_surrogates(self._edges)
        extra = fsm["edge_aux_data"]
        self._repeats = {
            edge[1]: Repeat(*extra[edge[1] : edge[1] + 3]) for edge in data if edge[0] == REPEAT
        }
        self._rule_starts = [rule[0][1] for rule in grammar["per_rule_fsms"]]
        self._rule_ends = {end for rule in grammar["per_rule_fsms"] for end in rule[0][2]}
        self._bytes_to_end = self._shortest_ends()
        # Stack 0 is empty.
        self._frames: list[Frame] = [(0, 0)]
        self._frame_numbers: dict[Frame, int] = {}
        self._stack_bytes = [0]  # fewest bytes until each stack is empty
        self._states: list[frozenset[Item]] = []
        self._numbers: dict[frozenset[Item], int] = {}
        # [states or more, 256]: the state behind each byte, once `row` has made it.
        self.rows = np.zeros((0, 256), dtype=np.int32)
        self._has_row: list[bool] = []
        root = self._rule_starts[grammar["root_rule_id"]]
        if self._number(self._closure([(root, 0)])) != START:
            raise Unsupported("The grammar allows no finite text. Give another one.")

    def __len__(self) -> int:
        """States so far."""
        return len(self._states)

    def accepts(self, state: int) -> bool:
        """Whether the text may end in this state."""
        return END in self._states[state]

    def row(self, state: int) -> np.ndarray:
        """``[256]`` int32: the state behind each byte, DEAD where it is not allowed."""
        if not self._has_row[state]:
            self._make_row(state)
        row: np.ndarray = self.rows[state]
        return row

    def read(self, state: int, text: bytes) -> int:
        """The state behind a text, DEAD if it is not allowed."""
        for byte in text:
            if state == DEAD:
                return DEAD
            state = int(self.row(state)[byte])
        return state

    def _make_row(self, state: int) -> None:
        """One closure for each range of bytes that all edges treat alike."""
        moves = [
            (low, high, (target, stack))
            for at, stack in self._states[state]
            if at >= 0
            for low, high, target in self._edges[at]
            if low >= 0
        ]
        cuts = sorted({0, 256} | {low for low, _, _ in moves} | {high + 1 for _, high, _ in moves})
        known: dict[frozenset[Item], int] = {frozenset(): DEAD}
        found = np.empty(256, dtype=np.int32)
        for first, end in itertools.pairwise(cuts):
            items = frozenset(item for low, high, item in moves if low <= first <= high)
            if items not in known:
                known[items] = self._number(self._closure(items))
            found[first:end] = known[items]
        self.rows[state] = found
        self._has_row[state] = True

    def _number(self, state: frozenset[Item]) -> int:
        """The number of a state; DEAD if no text ends behind it."""
        if state in self._numbers:
            return self._numbers[state]
        to_end = (
            0 if at == -1 else self._bytes_to_end[at] + self._stack_bytes[stack]
            for at, stack in state
        )
        if min(to_end, default=NO_END) >= NO_END:
            return DEAD
        number = len(self._states)
        if number >= self.most_states:
            raise Unsupported(
                f"The grammar needs more than {self.most_states} states. Make it smaller: fewer "
                "optional parts, shorter lists, less nesting."
            )
        self._states.append(state)
        self._numbers[state] = number
        self._has_row.append(False)
        if number == len(self.rows):
            self.rows = np.resize(self.rows, (max(1024, 2 * number), 256))
        return number

    def _closure(self, items: Iterable[Item]) -> frozenset[Item]:
        """What is reached without reading a byte: items that read one, and END."""
        todo = list(items)
        seen, kept = set(todo), set()
        while todo:
            if len(seen) > MOST_ITEMS:
                raise Unsupported(
                    "The grammar is left-recursive: a rule calls itself before it reads anything. "
                    "Write the recursion behind a symbol."
                )
            at, stack = todo.pop()
            reached: list[Item] = []
            if at in self._rule_ends:
                if stack == 0:
                    kept.add(END)
                else:
                    reached += self._return_to(self._frames[stack])
            for low, high, target in self._edges[at]:
                if low >= 0:
                    kept.add((at, stack))
                elif low == EPSILON:
                    reached.append((target, stack))
                elif low == RULE:
                    reached.append((self._rule_starts[high], self._call(target, stack)))
                else:
                    reached += self._repeat(target, stack, high, 0)
            todo += [item for item in reached if item not in seen]
            seen.update(reached)
        return frozenset(kept)

    def _call(self, target: int, stack: int) -> int:
        """The stack inside a rule that returns to ``target``."""
        # The last thing that a rule does: it returns to where its caller returns.
        is_last = target in self._rule_ends and not self._edges[target]
        return stack if is_last else self._push((target, stack))

    def _return_to(self, frame: Frame) -> list[Item]:
        return [frame] if len(frame) == 2 else self._repeat(*frame)

    def _repeat(self, target: int, stack: int, name: int, count: int) -> list[Item]:
        """Behind ``count`` repetitions: once more, and (if they are enough) on to ``target``."""
        rule, fewest, most = self._repeats[name]
        reached = [(target, stack)] if count >= fewest else []
        if most == -1:
            count = min(count, fewest)  # without a limit, more than enough is enough
        if most == -1 or count < most:
            inside = self._push((target, stack, name, count + 1))
            reached.append((self._rule_starts[rule], inside))
        return reached

    def _push(self, frame: Frame) -> int:
        """The number of a stack with this frame on top."""
        if frame not in self._frame_numbers:
            target, stack = frame[:2]
            to_end = self._bytes_to_end[target] + self._stack_bytes[stack]
            if len(frame) == 4:
                rule, fewest, _ = self._repeats[frame[2]]
                missing = max(fewest - frame[3], 0)
                to_end += missing * self._bytes_to_end[self._rule_starts[rule]]
            self._frame_numbers[frame] = len(self._frames)
            self._frames.append(frame)
            self._stack_bytes.append(min(to_end, NO_END))
        return self._frame_numbers[frame]

    def _shortest_ends(self) -> list[int]:
        """For each state of a rule the fewest bytes to the end of the rule, by relaxation."""
        to_end = [0 if at in self._rule_ends else NO_END for at in range(len(self._edges))]
        changes = True
        while changes:
            changes = False
            for at, edges in enumerate(self._edges):
                for low, high, target in edges:
                    through = min(self._edge_bytes(low, high, to_end) + to_end[target], NO_END)
                    if through < to_end[at]:
                        to_end[at], changes = through, True
        return to_end

    def _edge_bytes(self, low: int, high: int, to_end: list[int]) -> int:
        """Fewest bytes that an edge reads."""
        if low >= 0:
            return 1
        if low == EPSILON:
            return 0
        if low == RULE:
            return to_end[self._rule_starts[high]]
        rule, fewest, _ = self._repeats[high]
        return fewest * to_end[self._rule_starts[rule]] if fewest else 0


def _remove_surrogates(edges: list[list[Any]]) -> None:
    """Forbid the bytes ED A0 .. ED BF, in place.

    UTF-8 has no characters there. xgrammar 0.2.8 lets them into ranges that reach across the gap.
    """
    narrowed: dict[int, int] = {}  # state behind a lead byte -> its copy for ED
    for state in list(edges):
        for edge in list(state):
            low, high, target = edge
            if not 0 <= low <= SURROGATE_LEAD <= high:
                continue
            if target not in narrowed:
                narrowed[target] = len(edges)
                behind = [[a, min(b, LAST_BEFORE_SURROGATES), to] for a, b, to in edges[target]]
                edges.append([each for each in behind if each[0] <= each[1]])
            state.remove(edge)
            parts = [[low, SURROGATE_LEAD - 1, target], [SURROGATE_LEAD + 1, high, target]]
            parts.append([SURROGATE_LEAD, SURROGATE_LEAD, narrowed[target]])
            state += [part for part in parts if part[0] <= part[1]]


def _without_controls(edges: list[Any]) -> list[Any]:
    """The edges without raw control characters, except for single spaces between JSON's tokens."""
    kept = []
    for low, high, target in edges:
        is_space = (low == high and low in JSON_SPACES) or (low, high) == (9, 10)
        if low < 0 or low >= CONTROL or is_space:
            kept.append([low, high, target])
        elif high >= CONTROL:
            kept.append([CONTROL, high, target])
    return kept

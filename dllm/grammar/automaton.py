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
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

START, DEAD = 0, -1
# Kinds of edges in the serialized automaton: in the place of the lowest byte of a range.
EPSILON, RULE, REPEAT, TOKEN, NOT_TOKEN = -1, -2, -4, -5, -6
WHOLE = '"complete_fsm":'
NO_END = 1 << 29  # bytes to the end of a rule that has none
MOST_ITEMS = 200_000  # in one state, before it is called unbounded
SURROGATE_LEAD, LAST_BEFORE_SURROGATES = 0xED, 0x9F
MOST_FORCED_CALLS = 16
MERGING_ROUNDS = 4  # each finds what the one before made equal
CONTROL = 32  # bytes below are control characters
JSON_SPACES = (9, 10, 13)
IN_STRINGS = {(0, 9), (11, 12)}  # what xgrammar lets into strings of a bounded length, by mistake


class Unsupported(ValueError):
    """A grammar that is refused; the message says why, and what to do."""


class TooSlow(Unsupported):
    """A grammar that took too long. It may not when the machine is less busy."""


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
        is_tag: likewise in the JSON of a structural tag, but not in the text around it.

    Raises:
        Unsupported: no finite text, left recursion, too many states, or tokens in the grammar.
    """

    def __init__(
        self,
        serialized: str,
        is_json: bool = False,
        most_states: int = 1 << 16,
        is_tag: bool = False,
    ) -> None:
        grammar, fsm = _parse(serialized)
        data, bounds = fsm["edges"]["data_"], fsm["edges"]["indptr_"]
        if any(edge[0] in (TOKEN, NOT_TOKEN) for edge in data):
            raise Unsupported("The grammar names tokens; allowed: text only.")
        self.most_states = most_states
        self._edges = [data[low:high] for low, high in itertools.pairwise(bounds)]
        if is_json:
            self._edges = [_without_controls(edges) for edges in self._edges]
        elif is_tag:
            self._edges = [
                _without_controls(edges) if _are_in_string(edges) else edges
                for edges in self._edges
            ]
        _remove_surrogates(self._edges)
        extra = fsm["edge_aux_data"]
        self._repeats = {
            edge[1]: Repeat(*extra[edge[1] : edge[1] + 3]) for edge in data if edge[0] == REPEAT
        }
        self._rule_starts = [rule[0][1] for rule in grammar["per_rule_fsms"]]
        self._rule_ends = {end for rule in grammar["per_rule_fsms"] for end in rule[0][2]}
        self._merge_equal()
        for _ in range(MERGING_ROUNDS):
            self._merge_equal()
        self._bytes_to_end = self._shortest_ends()
        self._recursive_returns = self._returns_of_recursion()
        # Stack 0 is empty.
        self._frames: list[Frame] = [(0, 0)]
        self._frame_numbers: dict[Frame, int] = {}
        self._stack_bytes = [0]  # fewest bytes until each stack is empty
        self._stack_levels = [0]  # recursive calls on each stack
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

    def level(self, state: int) -> int:
        """How many recursive calls are open: in JSON, objects and lists inside each other."""
        return max(self._stack_levels[stack] for _, stack in self._states[state])

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
        # Where nothing can follow but a call, the stack is that inside of the call, so that stacks
        # of equal continuations are more often equal. Left recursion would never end.
        for _ in range(MOST_FORCED_CALLS):
            edges = self._edges[target]
            if target in self._rule_ends or len(edges) != 1 or edges[0][0] != RULE:
                break
            _, rule, behind = edges[0]
            target, stack = self._rule_starts[rule], self._returning(behind, stack)
        return self._returning(target, stack)

    def _returning(self, target: int, stack: int) -> int:
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
            is_deeper = target in self._recursive_returns
            self._stack_levels.append(self._stack_levels[stack] + is_deeper)
        return self._frame_numbers[frame]

    def _merge_equal(self) -> None:
        """Let edges lead to, and call, one of those states of rules that have equal edges.

        Fewer stacks are different then: what follows the first item of a list is what follows the
        others. States on circles may be equal and not be found; that costs states, nothing else.
        """
        number = list(range(len(self._edges)))
        known: dict[tuple[bool, tuple[tuple[int, int, int], ...]], int] = {}
        for at in reversed(number):  # what an edge leads to mostly comes later
            edges = sorted({(low, high, number[target]) for low, high, target in self._edges[at]})
            number[at] = known.setdefault((at in self._rule_ends, tuple(edges)), at)
        self._rule_starts = [number[start] for start in self._rule_starts]
        first: dict[int, int] = {}
        rules = [first.setdefault(start, rule) for rule, start in enumerate(self._rule_starts)]
        named: dict[Repeat, int] = {}
        names = {}
        for name, repeat in self._repeats.items():
            self._repeats[name] = repeat._replace(rule=rules[repeat.rule])
            names[name] = named.setdefault(self._repeats[name], name)
        called: dict[int, dict[int, int]] = {RULE: dict(enumerate(rules)), REPEAT: names}
        for edges in self._edges:
            edges[:] = [
                [low, called[low][high] if low in called else high, number[target]]
                for low, high, target in edges
            ]

    def _shortest_ends(self) -> list[int]:
        """For each state of a rule the fewest bytes to the end of the rule, by relaxation."""
        to_end = [0 if at in self._rule_ends else NO_END for at in range(len(self._edges))]
        users: list[list[int]] = [[] for _ in self._edges]  # states whose edges need a state
        for at, edges in enumerate(self._edges):
            for low, high, target in edges:
                users[target].append(at)
                if (rule := self._called(low, high)) is not None:
                    users[self._rule_starts[rule]].append(at)
        # A rule may be met with edges that need nothing: repeated at least 0 times.
        todo = deque(range(len(self._edges)))
        is_waiting = [True] * len(self._edges)
        while todo:
            at = todo.popleft()
            is_waiting[at] = False
            through = min(
                (
                    self._edge_bytes(low, high, to_end) + to_end[to]
                    for low, high, to in self._edges[at]
                ),
                default=NO_END,
            )
            if through < to_end[at]:
                to_end[at] = through
                for user in users[at]:
                    if not is_waiting[user]:
                        is_waiting[user] = True
                        todo.append(user)
        return to_end

    def _called(self, low: int, high: int) -> int | None:
        """The rule that an edge calls, if it calls one."""
        return high if low == RULE else self._repeats[high].rule if low == REPEAT else None

    def _returns_of_recursion(self) -> set[int]:
        """States behind calls of a rule that may lead to a call of the calling rule again."""
        calls: list[set[int]] = [set() for _ in self._rule_starts]
        returns: list[tuple[int, int, int]] = []  # (calling rule, called rule, state behind)
        for rule, start in enumerate(self._rule_starts):
            todo, seen = [start], {start}
            while todo:
                for low, high, target in self._edges[todo.pop()]:
                    if (called := self._called(low, high)) is not None:
                        calls[rule].add(called)
                        returns.append((rule, called, target))
                    if target not in seen:
                        seen.add(target)
                        todo.append(target)
        group = _circles(calls)
        return {behind for rule, called, behind in returns if group[rule] == group[called]}

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


def _parse(serialized: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the grammar, the automaton of all its rules)."""
    # xgrammar repeats the automaton for every rule. It is parsed once only: 4 MB for 60 properties.
    first = serialized.index(WHOLE) + len(WHOLE)
    fsm, end = json.JSONDecoder().raw_decode(serialized, first)
    return json.loads(serialized.replace(serialized[first:end], "null"))["grammar"], fsm


def _circles(calls: list[set[int]]) -> list[int]:
    """Numbers that two rules share if each leads to the other: strongly connected components.

    Kosaraju's algorithm; a rule that calls itself shares its number with itself.
    """
    callers: list[list[int]] = [[] for _ in calls]
    for rule, called in enumerate(calls):
        for each in called:
            callers[each].append(rule)
    finished: list[int] = []
    seen = [False] * len(calls)
    for root in range(len(calls)):
        path = [] if seen[root] else [(root, iter(calls[root]))]
        seen[root] = True
        while path:
            rule, rest = path[-1]
            following = next((each for each in rest if not seen[each]), None)
            if following is None:
                finished.append(rule)
                path.pop()
            else:
                seen[following] = True
                path.append((following, iter(calls[following])))
    group = [-1] * len(calls)
    for root in reversed(finished):
        todo = [root] if group[root] < 0 else []
        while todo:
            rule = todo.pop()
            group[rule] = root
            todo += [each for each in callers[rule] if group[each] < 0]
    return group


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


def _are_in_string(edges: list[Any]) -> bool:
    """Whether the edges are those of a JSON string of bounded length."""
    return {(low, high) for low, high, _ in edges} >= IN_STRINGS


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

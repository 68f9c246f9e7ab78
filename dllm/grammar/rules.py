"""The rules of a grammar as xgrammar compiles them: a finite automaton over bytes for each.

xgrammar compiles JSON schemas, regular expressions, EBNF and structural tags to one form, whose
edges are byte ranges, references to other rules, and repetitions of a rule.
``CompiledGrammar.serialize_json()`` shows it.
"""

import itertools
import json
from collections import deque
from typing import Any, NamedTuple

import networkx

from dllm.grammar.expressions import EPSILON, REPEAT, RULE, Expressions

# Kinds of edges in the serialized automaton. They stand where other edges have the lowest byte of
# a range.
TOKEN, NOT_TOKEN = -5, -6
WHOLE = '"complete_fsm":'
MERGING_ROUNDS = 5  # each finds what the one before made equal
NO_END = 1 << 29  # bytes to the end of a rule that has none
SURROGATE_LEAD, LAST_BEFORE_SURROGATES = 0xED, 0x9F
MOST_UNROLLED = 16  # characters that have states of their own
CONTROL = 32  # bytes below are control characters
JSON_SPACES = (9, 10, 13)
IN_STRINGS = {(0, 9), (11, 12)}  # what xgrammar lets into strings of a bounded length, by mistake


class Repeat(NamedTuple):
    """A rule that is repeated; ``most`` is -1 without a limit."""

    rule: int
    fewest: int
    most: int


class Unsupported(ValueError):
    """A grammar that is refused; the message says why, and what to do."""


class TooSlow(Unsupported):
    """A grammar that took too long. It may not when the machine is less busy."""


class Rules:
    """All rules; their states are numbered together.

    Args:
        serialized: of xgrammar's ``CompiledGrammar.serialize_json()``.
        kind: of the grammar (``compile.Kind``). Strings in "json", and in the JSON of a
            "structural_tag", must not hold raw control characters; xgrammar 0.2.8 lets them into
            strings whose length is bounded.
        is_merged: states with equal edges are one, so that an automaton has fewer; takes up to 1 s.

    Attributes:
        edges: of each state, [low, high, target]: a range of bytes; or, with one of the kinds above
            as low, high is the rule (RULE) or the name of the repetition (REPEAT).
        starts: the first state of each rule.
        ends: states in which a rule may end.
        bytes_to_end: for each state the fewest bytes to the end of its rule; at least NO_END if
            there is no way.
        firsts: of repetitions whose rounds are counted behind tokens (`counts`), by their names,
            the states at the beginning of a round.
        recursive_returns: what follows a recursive call, where the called rule may call the calling
            one again, directly or through others: ``(state, None)``; behind a repetition its name,
            too, because rules that are no part of a recursion end in the same states.

    Raises:
        Unsupported: the grammar has edges for tokens, which are no bytes.
    """

    def __init__(self, serialized: str, kind: str, is_merged: bool = False) -> None:
        self.root: int
        if kind == "json":
            self._from_expressions(serialized)
        else:
            self._from_compiled(serialized, kind == "structural_tag")
        for _ in range(MERGING_ROUNDS if is_merged else 0):
            self._merge_equal()
        self.root = self.starts[self.root]
        self.bytes_to_end = self._shortest_ends()
        self.recursive_returns = self._returns_of_recursion()
        self.firsts = {name: self._first(name) for name in self.repeats if self._is_long(name)}

    def _is_long(self, name: int) -> bool:
        """Whether a repetition is counted behind tokens (`counts`): a character, many times."""
        rule, fewest, most = self.repeats[name]
        inside = self._inside(self.starts[rule])
        is_simple = all(low >= EPSILON for at in inside for low, _, _ in self.edges[at])
        return most - fewest > MOST_UNROLLED and is_simple

    def _first(self, name: int) -> set[int]:
        return self._inside(self.starts[self.repeats[name].rule], EPSILON)

    def _inside(self, start: int, most: int = 255) -> set[int]:
        """The states behind edges from ``start`` whose lowest byte is at most ``most``."""
        todo, seen = [start], {start}
        while todo:
            for low, _, target in self.edges[todo.pop()]:
                if low <= most and target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    def _from_expressions(self, serialized: str) -> None:
        found = Expressions(serialized)
        self.edges: list[list[Any]] = found.edges
        self.starts, self.ends = found.starts, found.ends
        self.repeats = {name: Repeat(*repeat) for name, repeat in found.repeats.items()}
        self.root = found.root

    def _from_compiled(self, serialized: str, is_tag: bool) -> None:
        grammar, fsm = _parse(serialized)
        data, bounds = fsm["edges"]["data_"], fsm["edges"]["indptr_"]
        if any(edge[0] in (TOKEN, NOT_TOKEN) for edge in data):
            raise Unsupported("The grammar names tokens; allowed: text only.")
        self.edges = [data[low:high] for low, high in itertools.pairwise(bounds)]
        if is_tag:
            self.edges = [
                _without_controls(edges) if _are_in_string(edges) else edges for edges in self.edges
            ]
        _remove_surrogates(self.edges)
        extra = fsm["edge_aux_data"]
        self.repeats = {
            edge[1]: Repeat(*extra[edge[1] : edge[1] + 3]) for edge in data if edge[0] == REPEAT
        }
        self.starts = [rule[0][1] for rule in grammar["per_rule_fsms"]]
        self.ends = {end for rule in grammar["per_rule_fsms"] for end in rule[0][2]}
        self.root = grammar["root_rule_id"]

    def _merge_equal(self) -> None:
        """Let edges lead to, and call, one of those states of rules that have equal edges.

        Fewer stacks are different then: what follows the first item of a list is what follows the
        others. States on circles may be equal and not be found; that costs states, nothing else.
        """
        number = list(range(len(self.edges)))
        known: dict[tuple[bool, tuple[tuple[int, int, int], ...]], int] = {}
        for at in reversed(number):  # what an edge leads to mostly comes later
            leads = sorted({(low, high, number[target]) for low, high, target in self.edges[at]})
            number[at] = known.setdefault((at in self.ends, tuple(leads)), at)
        self.starts = [number[start] for start in self.starts]
        first: dict[int, int] = {}
        rules = [first.setdefault(start, rule) for rule, start in enumerate(self.starts)]
        named: dict[Repeat, int] = {}
        names = {}
        for name, repeat in self.repeats.items():
            self.repeats[name] = repeat._replace(rule=rules[repeat.rule])
            names[name] = named.setdefault(self.repeats[name], name)
        called: dict[int, dict[int, int]] = {RULE: dict(enumerate(rules)), REPEAT: names}
        for edges in self.edges:
            edges[:] = [
                [low, called[low][high] if low in called else high, number[target]]
                for low, high, target in edges
            ]

    def _shortest_ends(self) -> list[int]:
        """For each state of a rule the fewest bytes to the end of the rule, by relaxation."""
        to_end = [0 if at in self.ends else NO_END for at in range(len(self.edges))]
        users: list[list[int]] = [[] for _ in self.edges]  # states whose edges need a state
        for at, edges in enumerate(self.edges):
            for low, high, target in edges:
                users[target].append(at)
                if (rule := self._called(low, high)) is not None:
                    users[self.starts[rule]].append(at)
        # A rule may be met with edges that need nothing: repeated at least 0 times.
        todo = deque(range(len(self.edges)))
        is_waiting = [True] * len(self.edges)
        while todo:
            at = todo.popleft()
            is_waiting[at] = False
            through = min(
                (
                    self._edge_bytes(low, high, to_end) + to_end[to]
                    for low, high, to in self.edges[at]
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
        return high if low == RULE else self.repeats[high].rule if low == REPEAT else None

    def _returns_of_recursion(self) -> set[tuple[int, int | None]]:
        """See ``recursive_returns``."""
        calls: list[set[int]] = [set() for _ in self.starts]
        returns: list[tuple[int, int, tuple[int, int | None]]] = []  # (calling, called, behind)
        for rule, start in enumerate(self.starts):
            todo, seen = [start], {start}
            while todo:
                for low, high, target in self.edges[todo.pop()]:
                    if (called := self._called(low, high)) is not None:
                        calls[rule].add(called)
                        name = high if low == REPEAT else None
                        returns.append((rule, called, (target, name)))
                    if target not in seen:
                        seen.add(target)
                        todo.append(target)
        graph = networkx.DiGraph(dict(enumerate(calls)))
        circles = networkx.strongly_connected_components(graph)
        circle_of = {rule: number for number, circle in enumerate(circles) for rule in circle}
        return {behind for rule, called, behind in returns if circle_of[rule] == circle_of[called]}

    def _edge_bytes(self, low: int, high: int, to_end: list[int]) -> int:
        if low >= 0:
            return 1
        if low == EPSILON:
            return 0
        if low == RULE:
            return to_end[self.starts[high]]
        rule, fewest, _ = self.repeats[high]
        return fewest * to_end[self.starts[rule]] if fewest else 0


def _parse(serialized: str) -> tuple[dict[str, Any], dict[str, Any]]:
    # xgrammar repeats the automaton for every rule. It is parsed once only: 4 MB for 60 properties.
    first = serialized.index(WHOLE) + len(WHOLE)
    fsm, end = json.JSONDecoder().raw_decode(serialized, first)
    return json.loads(serialized.replace(serialized[first:end], "null"))["grammar"], fsm


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

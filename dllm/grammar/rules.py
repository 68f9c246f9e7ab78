"""The rules of a grammar as xgrammar writes them: a finite automaton over bytes for each.

xgrammar writes JSON schemas, regular expressions, EBNF and structural tags in one form
(`expressions`), whose edges are byte ranges, references to other rules, and repetitions of a rule.
"""

from collections import deque

import networkx

from dllm.grammar.expressions import EPSILON, REPEAT, RULE, Expressions

NO_END = 1 << 29  # bytes to the end of a rule that has none
MOST_UNROLLED = 16  # characters that have states of their own


class Rules:
    """All rules; their states are numbered together.

    Args:
        serialized, kind: arguments of ``Expressions``.

    Attributes:
        edges: of each state, [low, high, target]: a range of bytes; or, with one of the kinds above
            as low, high is the rule (RULE) or the name of the repetition (REPEAT).
        repeats: by its name, the rule, and how often it is repeated: fewest, most (-1: no limit).
        starts: the first state of each rule.
        ends: states in which a rule may end.
        bytes_to_end: for each state the fewest bytes to the end of its rule; at least NO_END if
            there is no way.
        firsts: of repetitions whose rounds are counted behind tokens (`counts`), by their names,
            the states at the beginning of a round.
        recursive_returns: what follows a recursive call, where the called rule may call the calling
            one again, directly or through others: ``(state, None)``; behind a repetition its name,
            too, because rules that are no part of a recursion end in the same states.
    """

    def __init__(self, serialized: str, kind: str) -> None:
        found = Expressions(serialized, kind)
        self.edges, self.starts, self.ends = found.edges, found.starts, found.ends
        self.repeats = found.repeats
        self.root = self.starts[found.root]
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
        return self._inside(self.starts[self.repeats[name][0]], EPSILON)

    def _inside(self, start: int, most: int = 255) -> set[int]:
        """The states behind edges from ``start`` whose lowest byte is at most ``most``."""
        todo, seen = [start], {start}
        while todo:
            for low, _, target in self.edges[todo.pop()]:
                if low <= most and target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

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
        return high if low == RULE else self.repeats[high][0] if low == REPEAT else None

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

"""What is asked of all rules: which calls are recursive, which repetitions are long."""

import networkx

from dllm.grammar.expressions import REPEAT, RULE, Expressions
from dllm.grammar.pattern_edges import EPSILON

MOST_UNROLLED = 16  # characters that have states of their own


class Rules(Expressions):
    """All rules; their states are numbered together.

    Attributes:
        edges: of each state, [low, high, target]: a range of bytes; or, with one of the kinds above
            as low, high is the rule (RULE) or the name of the repetition (REPEAT).
        repeats: by its name, the rule, and how often it is repeated: fewest, most (-1: no limit).
        starts: the first state of each rule.
        ends: states in which a rule may end.
        root: the rule of whole texts.
        firsts: of repetitions whose rounds are counted behind tokens (`counts`), by their names,
            the states at the beginning of a round.
        recursive_returns: what follows a recursive call, where the called rule may call the calling
            one again, directly or through others: ``(state, None)``; behind a repetition its name,
            too, because rules that are no part of a recursion end in the same states.
    """

    def __init__(self, serialized: str) -> None:
        super().__init__(serialized)
        self.recursive_returns = self._returns_of_recursion()
        self.firsts = {
            name: self._inside(self.starts[rule], EPSILON)
            for name, (rule, fewest, most) in self.repeats.items()
            if most - fewest > MOST_UNROLLED and self._is_simple(rule)
        }

    def _is_simple(self, rule: int) -> bool:
        """Whether a rule reads bytes alone."""
        inside = self._inside(self.starts[rule])
        return all(low >= EPSILON for at in inside for low, _, _ in self.edges[at])

    def _inside(self, start: int, most: int = 255) -> set[int]:
        """The states behind edges from ``start`` whose lowest byte is at most ``most``."""
        todo, seen = [start], {start}
        while todo:
            behind = {to for low, _, to in self.edges[todo.pop()] if low <= most} - seen
            todo += behind
            seen |= behind
        return seen

    def _returns_of_recursion(self) -> set[tuple[int, int | None]]:
        """See ``recursive_returns``."""
        returns: list[tuple[int, int, tuple[int, int | None]]] = []  # (calling, called, behind)
        for rule, start in enumerate(self.starts):
            for at in self._inside(start):
                for low, high, target in self.edges[at]:
                    if low == RULE:
                        returns.append((rule, high, (target, None)))
                    elif low == REPEAT:
                        returns.append((rule, self.repeats[high][0], (target, high)))
        graph = networkx.DiGraph([(calling, called) for calling, called, _ in returns])
        circles = networkx.strongly_connected_components(graph)
        circle_of = {rule: number for number, circle in enumerate(circles) for rule in circle}
        return {behind for rule, called, behind in returns if circle_of[rule] == circle_of[called]}

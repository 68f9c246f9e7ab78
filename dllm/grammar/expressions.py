"""The grammar that xgrammar writes for a JSON schema, read before xgrammar compiles it.

Compiled, each rule repeats the whole grammar: that takes memory by the square of its length.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from dllm.grammar.characters import BY_BYTES, Ranges, both, others, utf8

# Kinds of edges that read no byte, in the place of the lowest byte; kinds of expressions (0.2.8).
EPSILON, RULE, REPEAT = -1, -2, -4
TEXT, CLASS, STAR, EMPTY, CALL, SEQUENCE, CHOICES, REPEATED, PATTERN = 0, 1, 2, 3, 4, 5, 6, 8, 12
CONTROLS = (0, 31)  # are in no text of JSON, but for spaces between its tokens
# One character of a string of bounded length. xgrammar writes none of JSON's escapes there; those
# of one character are added. Of \uXXXX two may stand for one.
IN_STRING = [1, 34, 34, 92, 92, 13, 13, 10, 10]
ESCAPED = b'"\\/bfnrt'

Build = Callable[[int, int], None]  # adds the edges that lead from a state to another one


class Expressions:
    """Attributes are those of ``Rules``; a repetition is (rule, fewest, most)."""

    def __init__(self, serialized: str) -> None:
        grammar = json.loads(serialized)
        data, firsts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]
        ends = [*firsts[1:], len(data)]
        self._expressions = [
            (data[at], data[at + 2 : end]) for at, end in zip(firsts, ends, strict=True)
        ]
        self.edges: list[list[list[int]]] = []
        self.repeats: dict[int, tuple[int, int, int]] = {}
        self.starts = [self._state() for _ in grammar["rules"]]
        self.ends: set[int] = set()
        self._tails: dict[tuple[int, int, int], int] = {}  # states inside of characters
        for start, (_, body, *_) in zip(list(self.starts), grammar["rules"], strict=True):
            self._build_rule(start, _partial(self._add, body))
        self.root = grammar["root_rule_id"]

    def _state(self) -> int:
        self.edges.append([])
        return len(self.edges) - 1

    def _build_rule(self, start: int, build: Build) -> None:
        end = self._state()
        self.ends.add(end)
        build(start, end)

    def _one_by_one(self, builds: Sequence[Build], at: int, to: int) -> None:
        for build in builds[:-1]:
            behind = self._state()
            build(at, behind)
            at = behind
        if builds:
            builds[-1](at, to)
        else:
            self.edges[at].append([EPSILON, 0, to])

    def _loop(self, build: Build, at: int, to: int) -> None:
        inside = self._state()
        self.edges[at].append([EPSILON, 0, inside])
        build(inside, inside)
        self.edges[inside].append([EPSILON, 0, to])

    def _repeat(self, rule: int, fewest: int, most: int, at: int, to: int) -> None:
        name = len(self.repeats)
        self.repeats[name] = (rule, fewest, most)
        self.edges[at].append([REPEAT, name, to])

    def _bytes(self, low: int, high: int, at: int, to: int) -> None:
        self.edges[at].append([low, high, to])

    def _add(self, number: int, at: int, to: int) -> None:
        """The edges of an expression."""
        kind, parts = self._expressions[number]
        if kind == TEXT:
            self._one_by_one(
                [_partial(self._bytes, byte, byte) for byte in _unsigned(parts)], at, to
            )
        elif kind in (CLASS, STAR):
            ranges = _pairs(parts[1:])
            if parts[0]:
                ranges = others([CONTROLS, *ranges])
            build = _partial(self._characters, ranges)
            if kind == STAR:
                return self._loop(build, at, to)
            build(at, to)
            if parts == IN_STRING:
                escape = self._state()
                self._bytes(92, 92, at, escape)
                for byte in ESCAPED:
                    self._bytes(byte, byte, escape, to)
        elif kind == EMPTY:
            self._one_by_one([], at, to)
        elif kind == CALL:
            self.edges[at].append([RULE, parts[0], to])
        elif kind == SEQUENCE:
            self._one_by_one([_partial(self._add, part) for part in parts], at, to)
        elif kind == CHOICES:
            for part in parts:
                self._add(part, at, to)
        elif kind == REPEATED:
            self._repeat(parts[0], parts[1], parts[2], at, to)
        elif kind == PATTERN:
            self._sequence(_parser.parse(bytes(_unsigned(parts[1:])).decode()), at, to)
        else:
            raise ValueError(f"xgrammar's expression of kind {kind}")
        return None

    def _characters(self, ranges: Ranges, at: int, to: int) -> None:
        for low, high in both(sorted(ranges), BY_BYTES):
            for first, *rest in utf8(low, high):
                target = to
                for low_byte, high_byte in reversed(rest):
                    key = (low_byte, high_byte, target)
                    if key not in self._tails:
                        self._tails[key] = self._state()
                        self._bytes(*key[:2], self._tails[key], target)
                    target = self._tails[key]
                self._bytes(*first, at, target)

    def _sequence(self, items: Iterable[Any], at: int, to: int) -> None:
        self._one_by_one([_partial(self._item, item) for item in items], at, to)

    def _item(self, item: tuple[Any, Any], at: int, to: int) -> None:
        """The edges of an item of Python's parser of patterns, as `patterns` writes them."""
        kind, value = item
        if kind is op.AT:  # at both ends
            self._one_by_one([], at, to)
        elif kind is op.LITERAL:
            self._characters([(value, value)], at, to)
        elif kind is op.NOT_LITERAL:
            self._characters(others([(value, value)]), at, to)
        elif kind is op.IN:
            ranges = [
                one if name is op.RANGE else (one, one)
                for name, one in value
                if name is not op.NEGATE
            ]
            is_other = value[0][0] is op.NEGATE
            self._characters(others(ranges) if is_other else ranges, at, to)
        elif kind is op.BRANCH:
            for one in value[1]:
                self._sequence(one, at, to)
        elif kind is op.SUBPATTERN:
            self._sequence(value[3], at, to)
        elif kind is op.MAX_REPEAT:
            fewest, most, items = value
            if (fewest, most) == (0, op.MAXREPEAT):
                return self._loop(_partial(self._sequence, items), at, to)
            rule, start = len(self.starts), self._state()
            self.starts.append(start)
            self._build_rule(start, _partial(self._sequence, items))
            self._repeat(rule, fewest, -1 if most is op.MAXREPEAT else int(most), at, to)
        else:
            raise ValueError(f"{kind} in a pattern")
        return None


def _unsigned(characters: Iterable[int]) -> list[int]:
    """Bytes, which xgrammar writes as C's signed ones."""
    return [byte & 255 for byte in characters]


def _pairs(numbers: Sequence[int]) -> Ranges:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _partial(function: Callable[..., None], *given: Any) -> Build:
    return lambda at, to: function(*given, at, to)

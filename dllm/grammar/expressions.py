"""The grammars that xgrammar writes, read before it compiles them.

Compiled, each rule repeats the whole grammar: that takes memory by the square of its length.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from dllm.grammar.characters import BY_BYTES, Ranges, both, others, utf8
from dllm.grammar.patterns import rewritten
from dllm.grammar.refusals import Unsupported

# Kinds of edges that read no byte, in the place of the lowest byte; kinds of expressions (0.2.8).
EPSILON, RULE, REPEAT = -1, -2, -4
TEXT, CLASS, STAR, EMPTY, CALL, SEQUENCE, CHOICES, DISPATCH, REPEATED, PATTERN = *range(9), 12
FORM = "v16"  # of what xgrammar writes
CONTROLS = (0, 31)  # are in no text of JSON, but for spaces between its tokens
# One character of a string of bounded length. xgrammar writes none of JSON's escapes there; those
# of one character are added. Of \uXXXX two may stand for one.
IN_STRING = [1, 34, 34, 92, 92, 13, 13, 10, 10]
CODE = re.compile(r"\\u\{([0-9a-f]+)\}")  # of a character, as `patterns` writes it
ESCAPED = b'"\\/bfnrt'

Build = Callable[[int, int], None]  # adds the edges that lead from a state to another one


class Expressions:
    """Attributes are those of ``Rules``.

    Args:
        serialized: of xgrammar's ``Grammar.serialize_json()``.
        kind: of the grammar (``compile.Kind``). Patterns in "json", and in the schemas of a
            "structural_tag", are those of `patterns`.

    Raises:
        Unsupported: the grammar has tokens, which are no bytes, or is of another xgrammar.
    """

    def __init__(self, serialized: str, kind: str) -> None:
        grammar = json.loads(serialized)
        if grammar["__VERSION__"] != FORM:
            raise Unsupported(
                f"xgrammar's grammars have the form {grammar['__VERSION__']}; read are those of "
                f"{FORM}. Install the xgrammar that this version is tested with."
            )
        self._is_rewritten = kind in ("json", "structural_tag")
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
        self._texts: dict[str, Texts] = {}  # of patterns
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
                [_partial(self._bytes, *2 * [byte]) for byte in self._text(number)], at, to
            )
        elif kind in (CLASS, STAR):
            ranges = _pairs(parts[1:])
            if parts[0]:
                ranges = others([CONTROLS, *ranges] if parts == IN_STRING else ranges)
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
        elif kind == DISPATCH:
            self._dispatch(parts, at, to)
        elif kind == PATTERN:
            text = bytes(_unsigned(parts[1:])).decode()
            text = text if self._is_rewritten else rewritten(text)
            text = CODE.sub(lambda code: f"\\U{code[1]:0>8}", text)
            self._pattern(_parser.parse(text), at, to)
        else:
            raise Unsupported("The grammar names tokens; allowed: text only.")
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

    def _dispatch(self, parts: Sequence[int], at: int, to: int) -> None:
        """Any text in which rules follow their triggers, and some texts are not (Aho 1975).

        Its states are beginnings of these texts: the longest one that the text ends with.
        """
        *tags, is_loop, excluded = parts
        words = dict(zip(map(self._text, tags[::2]), tags[1::2], strict=True))
        never = [*map(self._text, self._expressions[excluded][1])]
        begun = {
            word[:size]: self._state() for word in (*words, *never) for size in range(len(word))
        }
        begun.setdefault(b"", self._state())
        self.edges[at].append([EPSILON, 0, begun[b""]])
        letters = {byte for word in (*words, *never) for byte in word}
        cuts = sorted({0, 256, *letters, *(byte + 1 for byte in letters)})
        for before, state in begun.items():
            self.edges[state].append([EPSILON, 0, to])
            for low, high in itertools.pairwise(cuts):
                text = before + bytes([low])
                if any(map(text.endswith, never)):
                    continue
                rule = next((rule for word, rule in words.items() if text.endswith(word)), None)
                target = next(
                    begun[text[cut:]] for cut in range(len(text) + 1) if text[cut:] in begun
                )
                if rule is not None:
                    target = self._state()
                    self.edges[target].append([RULE, rule, begun[b""] if is_loop else to])
                self._bytes(low, high - 1, state, target)

    def _text(self, number: int) -> bytes:
        return bytes(_unsigned(self._expressions[number][1]))

    def _pattern(self, tree: Sequence[Any], at: int, to: int) -> None:
        """The edges of a pattern, of which what is repeated no time holds as well (`patterns`).

        That is first the length, and then maybe other patterns of the same texts; what is repeated
        no time in such a one is a pattern of other texts.
        """
        items = [item for item in tree if not _held(item)]
        held = [_held(item) for item in tree if _held(item)]
        if not held:
            return self._sequence(items, at, to)
        if (key := repr(tree)) not in self._texts:
            ((_, (fewest, most, _)),) = held[0]
            lengths = int(fewest), -1 if most is op.MAXREPEAT else int(most)
            self._texts[key] = Texts([Written(one) for one in (items, *held[1:])], lengths)
        texts = self._texts[key]
        states = [self._state() for _ in texts.edges]
        self.edges[at].append([EPSILON, 0, states[0]])
        for state, edges in zip(states, texts.edges, strict=True):
            self.edges[state] += [[low, high, states[target]] for low, high, target in edges]
        for end in texts.ends:
            self.edges[states[end]].append([EPSILON, 0, to])
        return None

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
            self._repeated(items, fewest, -1 if most is op.MAXREPEAT else int(most), at, to)
        else:
            raise ValueError(f"{kind} in a pattern")
        return None

    def _repeated(self, items: Any, fewest: int, most: int, at: int, to: int) -> None:
        rule, start = len(self.starts), self._state()
        self.starts.append(start)
        self._build_rule(start, _partial(self._sequence, items))
        self._repeat(rule, fewest, most, at, to)


class Written(Expressions):
    """The edges of one pattern, with repetitions written out: from ``start`` to ``end``.

    ``is_absent``: other texts are meant.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        self.edges, self._tails = [], {}
        self.is_absent = bool(absent := _held(items[0]) if len(items) == 1 else [])
        items = absent or items
        self.start, self.end = self._state(), self._state()
        self._sequence(items, self.start, self.end)
        self._closures: dict[frozenset[int], frozenset[int]] = {}

    def _repeated(self, items: Any, fewest: int, most: int, at: int, to: int) -> None:
        for number in range(max(fewest, most)):
            behind = self._state()
            if number >= fewest:
                self.edges[at].append([EPSILON, 0, to])
            self._sequence(items, at, behind)
            at = behind
        if most == -1:
            return self._loop(_partial(self._sequence, items), at, to)
        self.edges[at].append([EPSILON, 0, to])
        return None

    def may_go_on(self, states: frozenset[int]) -> bool:
        return self.is_absent or bool(states)

    def may_end(self, states: frozenset[int]) -> bool:
        return self.is_absent != (self.end in states)

    def closure(self, states: frozenset[int]) -> frozenset[int]:
        """The states that are reached without a byte."""
        if states not in self._closures:
            todo, seen = list(states), set(states)
            while todo:
                new = {to for low, _, to in self.edges[todo.pop()] if low == EPSILON} - seen
                todo += new
                seen |= new
            self._closures[states] = frozenset(seen)
        return self._closures[states]


# Inside of a character: behind a backslash, and before so many hexadecimal digits.
PLAIN, ESCAPE, LAST_DIGIT = 0, 5, 1
CUTS = (0, 0x5C, 0x5D, 0x75, 0x76, 0x80, 0xC0, 256)


class Texts:
    """The texts that are of all of some patterns, and of a bounded length.

    Attributes:
        edges: of each state (low, high, target); 0 is the start.
        ends: states in which a text may end.
    """

    def __init__(self, patterns: list[Written], lengths: tuple[int, int]) -> None:
        self._patterns, (self._fewest, self._most) = patterns, lengths
        self._following: dict[Any, list[tuple[int, int, Any, bool]]] = {}
        sets = tuple(one.closure(frozenset([one.start])) for one in patterns)
        numbers: dict[Any, int] = {((sets, PLAIN), 0): 0}
        self.edges: list[list[tuple[int, int, int]]] = []
        self.ends: list[int] = []
        todo = [*numbers]
        for state, length in todo:  # which grows
            edges = []
            for low, high, target, is_new in self._behind(state):
                read = length + is_new
                if read > self._most >= 0:
                    continue
                key = target, read if self._most >= 0 else min(read, self._fewest)
                if key not in numbers:
                    numbers[key] = len(numbers)
                    todo.append(key)
                edges.append((low, high, numbers[key]))
            if length >= self._fewest and all(map(Written.may_end, self._patterns, state[0])):
                self.ends.append(len(self.edges))
            self.edges.append(edges)

    def _behind(self, state: Any) -> list[tuple[int, int, Any, bool]]:
        """(low, high, state behind these bytes, whether they begin a character)."""
        if state not in self._following:
            sets, mode = state
            moves = [
                [edge for at in some for edge in one.edges[at] if edge[0] >= 0]
                for one, some in zip(self._patterns, sets, strict=True)
            ]
            cuts = {cut for some in moves for low, high, _ in some for cut in (low, high + 1)}
            found = []
            for low, end in itertools.pairwise(sorted({*cuts, *CUTS})):
                behind = tuple(
                    one.closure(frozenset(to for a, b, to in some if a <= low <= b))
                    for one, some in zip(self._patterns, moves, strict=True)
                )
                if all(map(Written.may_go_on, self._patterns, behind)):
                    is_new = mode == PLAIN and not 0x80 <= low < 0xC0
                    found.append((low, end - 1, (behind, _mode(mode, low)), is_new))
            self._following[state] = found
        return self._following[state]


def _mode(mode: int, byte: int) -> int:
    if mode == PLAIN:
        return ESCAPE if byte == 0x5C else PLAIN
    if mode == ESCAPE:
        return ESCAPE - 1 if byte == 0x75 else PLAIN
    return PLAIN if mode == LAST_DIGIT else mode - 1


def _held(item: tuple[Any, Any]) -> list[Any]:
    """What is repeated no time, else nothing."""
    kind, value = item
    return list(value[2]) if kind is op.MAX_REPEAT and value[1] == 0 else []


def _unsigned(characters: Iterable[int]) -> list[int]:
    """Bytes, which xgrammar writes as C's signed ones."""
    return [byte & 255 for byte in characters]


def _pairs(numbers: Sequence[int]) -> Ranges:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _partial(function: Callable[..., None], *given: Any) -> Build:
    return lambda at, to: function(*given, at, to)

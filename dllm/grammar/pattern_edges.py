"""Automata over bytes of the texts that patterns allow."""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from re import _constants as op  # type: ignore[attr-defined]
from typing import Any

from dllm.grammar.characters import BY_BYTES, Ranges, both, utf8
from dllm.grammar.patterns import (
    ALPHABETS,
    ANYTHING,
    BEGINNING,
    CHARACTERS,
    END,
    IN_JSON,
    REPEATS,
    Alphabet,
    Clause,
    Held,
    characters_of,
    looks_ahead,
    parsed,
    refusal,
)
from dllm.grammar.refusals import Unsupported

EPSILON = -1  # of an edge that reads no byte, in the place of the lowest byte
INSIDE, WHOLE, OPEN = range(3)  # beside stands more of a pattern; nothing; any text
GROUPS = (op.BRANCH, op.SUBPATTERN)
MOST_COMPARED = 512  # states; with more of them patterns may have a text in common
MOST_WRITTEN = 2048  # repetitions
SHORT_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}

Build = Callable[[int, int], None]  # adds the edges that lead from a state to another one


def later(function: Callable[..., None], *given: Any) -> Build:
    return lambda at, to: function(*given, at, to)


class Edges:
    """States and their edges: [lowest byte, highest byte, state behind]."""

    def __init__(self) -> None:
        self.edges: list[list[list[int]]] = []
        self._tails: dict[tuple[int, int, int], int] = {}  # states inside of characters

    def state(self) -> int:
        self.edges.append([])
        return len(self.edges) - 1

    def inside(self, starts: Iterable[int], most: int = EPSILON) -> set[int]:
        """The states behind edges from some states whose lowest byte is at most ``most``."""
        todo, seen = list(starts), set(starts)
        while todo:
            behind = {to for low, _, to in self.edges[todo.pop()] if low <= most} - seen
            todo += behind
            seen |= behind
        return seen

    def one_by_one(self, builds: Sequence[Build], at: int, to: int) -> None:
        for build in builds[:-1]:
            behind = self.state()
            build(at, behind)
            at = behind
        if builds:
            builds[-1](at, to)
        else:
            self.edges[at].append([EPSILON, 0, to])

    def loop(self, build: Build, at: int, to: int) -> None:
        inside = self.state()
        self.edges[at].append([EPSILON, 0, inside])
        build(inside, inside)
        self.edges[inside].append([EPSILON, 0, to])

    def repeat(self, build: Build, fewest: int, most: int, at: int, to: int) -> None:
        """Written out; ``most`` is -1 for any number."""
        if max(fewest, most) > MOST_WRITTEN:
            raise Unsupported(f"A pattern beside others repeats more than {MOST_WRITTEN} times.")
        for number in range(max(fewest, most)):
            behind = self.state()
            if number >= fewest:
                self.edges[at].append([EPSILON, 0, to])
            build(at, behind)
            at = behind
        if most == -1:
            self.loop(build, at, to)
        else:
            self.edges[at].append([EPSILON, 0, to])

    def text(self, word: bytes, at: int, to: int) -> None:
        self.one_by_one([later(self._byte, byte) for byte in word], at, to)

    def _byte(self, byte: int, at: int, to: int) -> None:
        self.edges[at].append([byte, byte, to])

    def characters(self, ranges: Ranges, at: int, to: int) -> None:
        for low, high in both(ranges, BY_BYTES):
            for first, *rest in utf8(low, high):
                target = to
                for low_byte, high_byte in reversed(rest):
                    key = (low_byte, high_byte, target)
                    if key not in self._tails:
                        self._tails[key] = self.state()
                        self.edges[self._tails[key]].append([*key])
                    target = self._tails[key]
                self.edges[at].append([*first, target])

    def tree(self, tree: Any, part: Clause, alphabet: Alphabet, at: int, to: int) -> None:
        """The edges of a pattern's tree (`patterns.parsed`), in the spelling of an alphabet.

        Raises:
            Unsupported: it looks around, refers back, or has flags or anchors inside.
        """
        self._pattern, self._alphabet = part.pattern, alphabet
        beside = WHOLE if part.is_whole else OPEN
        self._sequence(tree, beside, beside, at, to)

    def _sequence(self, tree: Any, before: int, behind: int, at: int, to: int) -> None:
        items = list(tree)
        while before and items[:1] == [BEGINNING]:
            items, before = items[1:], WHOLE
        rest = items[items.index(END) + 1 :] if behind and END in items else []
        if all(kind in REPEATS and value[0] == 0 for kind, value in rest if kind is not op.AT):
            items = items[: len(items) - len(rest)]
        while behind and items[-1:] == [END]:
            items, behind = items[:-1], WHOLE
        if before == OPEN and not (items and items[0][0] in GROUPS):
            items = [*parsed(ANYTHING), *items]
        if behind == OPEN and not (items and items[-1][0] in GROUPS):
            items = [*items, *parsed(ANYTHING)]
        inside = [INSIDE] * (len(items) - 1)
        sides = zip(items, [before, *inside], [*inside, behind], strict=False)
        self.one_by_one([later(self._item, *one) for one in sides], at, to)

    def _item(self, item: tuple[Any, Any], before: int, behind: int, at: int, to: int) -> None:
        kind, value = item
        if kind is op.BRANCH:
            for one in value[1]:
                self._sequence(one, before, behind, at, to)
        elif kind is op.SUBPATTERN and not value[1] and not value[2]:
            self._sequence(value[3], before, behind, at, to)
        elif kind in REPEATS:
            fewest, most, inner = value
            build = later(self._sequence, inner, INSIDE, INSIDE)
            if most == 0:
                self.one_by_one([], at, to)
            elif (fewest, most) == (0, op.MAXREPEAT):
                self.loop(build, at, to)
            else:
                self.repeat(build, fewest, -1 if most is op.MAXREPEAT else int(most), at, to)
        elif kind in CHARACTERS:
            self._spelled(*characters_of(kind, value), at, to)
        else:
            why = "looks around, refers back, or has anchors or flags inside"
            raise refusal(self._pattern, why)

    def _spelled(self, ranges: Ranges, is_named: bool, at: int, to: int) -> None:
        """One character, also by JSON's escapes.

        ``is_named``: the pattern names the characters. Of all others in a negated class, only those
        with a short escape are written: a number has four digits, which makes more states.
        """
        self.characters(both(ranges, self._alphabet.plain), at, to)
        if not self._alphabet.is_json:
            return
        escaped = [c for c in (*range(32), 34, 92) if any(low <= c <= high for low, high in ranges)]
        spelled = [
            SHORT_ESCAPES.get(c, f"u{c:04x}") for c in escaped if is_named or c in SHORT_ESCAPES
        ]
        if spelled:
            escape = self.state()
            self._byte(92, at, escape)
            for one in spelled:
                self.text(one.encode(), escape, to)


class Written(Edges):
    """The edges of a part, with repetitions written out; ``ends``: whether each is to be met."""

    def __init__(self, part: Clause, alphabet: Alphabet) -> None:
        super().__init__()
        self.is_absent = not part.is_there
        self.start = self.state()
        self.ends: dict[int, bool] = {}
        for tree, is_there in looks_ahead(part):
            one = part._replace(is_whole=part.is_whole and not self.ends)  # ahead of more
            self.ends[end := self.state()] = is_there
            self.tree(tree, one, alphabet, self.start, end)
        self._closures: dict[frozenset[int], frozenset[int]] = {}

    def may_end(self, states: frozenset[int]) -> bool:
        is_held = all((end in states) == is_there for end, is_there in self.ends.items())
        return self.is_absent != is_held

    def closure(self, states: frozenset[int]) -> frozenset[int]:
        """The states that are reached without a byte."""
        if states not in self._closures:
            self._closures[states] = frozenset(self.inside(states))
        return self._closures[states]


# Inside of a character: behind a backslash, and before so many hexadecimal digits.
PLAIN, ESCAPE, LAST_DIGIT = 0, 5, 1
CUTS = (0, 0x5C, 0x5D, 0x75, 0x76, 0x80, 0xC0, 256)


class Texts:
    """The texts that are held to several parts, or to a length; one is enough in ``most_states``.

    Attributes:
        edges: of each state (low, high, target); 0 is the start.
        ends: states in which a text may end.
    """

    def __init__(self, asked: Held, most_states: float = math.inf) -> None:
        self._is_json = asked.alphabet.is_json
        self._parts = [Written(part, asked.alphabet) for part in asked.parts]
        following = functools.cache(self._behind)
        sets = tuple(one.closure(frozenset([one.start])) for one in self._parts)
        numbers: dict[Any, int] = {((sets, PLAIN), 0): 0}
        self.edges: list[list[tuple[int, int, int]]] = []
        self.ends: list[int] = []
        todo = [*numbers]
        for state, length in todo:  # which grows
            if self.ends and most_states < math.inf:  # there is one
                break
            if len(todo) > most_states:
                raise refusal(asked.parts[-1].pattern, "has too many states")
            edges = []
            for low, high, target, is_new in following(state):
                read = length + is_new
                if read > asked.most:
                    continue
                key = target, read if asked.most < math.inf else min(read, asked.fewest)
                if key not in numbers:
                    numbers[key] = len(numbers)
                    todo.append(key)
                edges.append((low, high, numbers[key]))
            if length >= asked.fewest and all(map(Written.may_end, self._parts, state[0])):
                self.ends.append(len(self.edges))
            self.edges.append(edges)

    def _behind(self, state: Any) -> list[tuple[int, int, Any, bool]]:
        """(low, high, state behind these bytes, whether they begin a character)."""
        sets, mode = state
        moves = [
            [edge for at in some for edge in one.edges[at] if edge[0] >= 0]
            for one, some in zip(self._parts, sets, strict=True)
        ]
        cuts = {cut for some in moves for low, high, _ in some for cut in (low, high + 1)}
        found = []
        for low, end in itertools.pairwise(sorted({*cuts, *CUTS})):
            behind = tuple(
                one.closure(frozenset(to for a, b, to in some if a <= low <= b))
                for one, some in zip(self._parts, moves, strict=True)
            )
            if all(one.is_absent or some for one, some in zip(self._parts, behind, strict=True)):
                is_new = mode == PLAIN and not 0x80 <= low < 0xC0
                inside = _mode(mode, low) if self._is_json else PLAIN
                found.append((low, end - 1, (behind, inside), is_new))
        return found


def _mode(mode: int, byte: int) -> int:
    if mode == PLAIN:
        return ESCAPE if byte == 0x5C else PLAIN
    if mode == ESCAPE:
        return ESCAPE - 1 if byte == 0x75 else PLAIN
    return PLAIN if mode == LAST_DIGIT else mode - 1


def held(
    parts: Sequence[Clause], alphabet: Alphabet = IN_JSON, fewest: float = 0, most: float = math.inf
) -> str | None:
    """The spelling of texts that are held to all parts; None if there are none."""
    if not all(part.is_there for part in parts):  # is known of texts in their only spelling
        parts = [Clause(ANYTHING), *parts]
    number = ALPHABETS.index(alphabet)
    if have_none(tuple(parts), fewest, most, number):
        return None
    if len(parts) == 1 and parts[0].is_whole:
        low, high = parsed(parts[0].pattern).getwidth()
        fewest, most = (0, math.inf) if fewest <= low and high <= most else (fewest, most)
    spelled = json.dumps([number, list(parts), fewest, most])
    return f"^held{spelled.encode().hex()}$"


@functools.lru_cache(1024)
def have_none(
    parts: tuple[Clause, ...], fewest: float = 0, most: float = math.inf, alphabet: int = 0
) -> bool:
    """Whether it is sure that no text of an alphabet (of ``ALPHABETS``) is held to all parts."""
    asked = Held(ALPHABETS[alphabet], parts, fewest, most)
    try:
        return not Texts(asked, MOST_COMPARED).ends
    except Unsupported:  # it looks around, or has too many states
        return False

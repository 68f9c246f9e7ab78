"""Regular expressions of schemas and requests, rewritten so that nothing can misread them.

They are JavaScript's, as JSON Schema asks: ``\\d`` and ``\\w`` are ASCII. Python's parser reads
them, and what is no regular language is refused. Written again they have classes of characters,
groups and repetitions alone.
"""

import functools
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import regex

from dllm.grammar.characters import BY_BYTES, Ranges, both, others
from dllm.grammar.refusals import Unsupported

DIGITS: Ranges = [(48, 57)]
WORDS: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
SPACES: Ranges = [
    *((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
SHORT_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
LENGTH = "!"  # stands for any character where a length is written
BEGINNING, END = (op.AT, op.AT_BEGINNING), (op.AT, op.AT_END)
CARET = r"\^"
SECONDS = 0.1  # to find a pattern in a text
# What JavaScript and Python read differently, in classes and outside of them.
ESCAPES = r"\\c(?P<control>[A-Za-z])|\\u\{(?P<code>[0-9a-fA-F]{1,6})\}|(?P<unclear>\\[aAZpP])|\\."
IN_CLASS = re.compile(ESCAPES, flags=re.DOTALL)
DIFFERENT = re.compile(
    rf"{ESCAPES}|(?P<any>\[\^\])|(?P<none>\[\])|(?P<inside>\[(?:\\.|[^\]\\])*\])"
    r"|(?P<name>\(\?<(?![=!]))|(?P<count>\{,)",
    flags=re.DOTALL,
)


class Alphabet(NamedTuple):
    """Where a text stands: which characters it may have as they are.

    Attributes:
        plain: characters that stand for themselves.
        is_json: quotes, backslashes and control characters are written as JSON's escapes.
        has_anchors: ``^`` and ``$`` are kept; otherwise the whole text is meant.
    """

    plain: Ranges
    is_json: bool = False
    has_anchors: bool = False


TEXT = Alphabet(BY_BYTES)
IN_JSON = Alphabet(
    [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F), *BY_BYTES[1:]],  # inside of a string's quotes
    is_json=True,
)
IN_GEMMA = Alphabet([(0, 0x3B), (0x3D, 0x7F), *BY_BYTES[1:]])  # its strings end with ``<|"|>``
SEARCH = Alphabet(BY_BYTES, has_anchors=True)


def rewritten(pattern: str, alphabet: Alphabet = TEXT) -> str:
    """A regular expression of the same texts, as far as the alphabet has them; without anchors.

    A pattern without anchors is one of whole texts, too: answers are some of those that match.

    Raises:
        Unsupported: it looks around, refers back, has flags or anchors inside, or no text is left.
    """
    return _written(pattern, parsed(pattern), alphabet)


def _written(pattern: str, tree: Any, alphabet: Alphabet) -> str:
    text = _Writer(pattern, alphabet).sequence(tree, True, True)
    if text is None:
        raise _refusal(pattern, "has no text that can be written here")
    return text


def in_string(
    patterns: str | Sequence[tuple[str, bool]],
    alphabet: Alphabet = IN_JSON,
    fewest: float = 0,
    most: float = math.inf,
    whole: str | None = None,
    is_anywhere: bool = False,
) -> str | None:
    """Rewrite (``rewritten``) ``pattern`` of strings, or a name in ``patternProperties``.

    Args:
        patterns: and whether they are found in the text, or not. A single one is of whole texts,
            unless ``is_anywhere``; several are found anywhere.
        fewest, most: characters of the texts.
        whole: a pattern that the whole text has as well.

    Returns:
        None if it is not known how to keep to all of them.
    """
    given = ((patterns, True),) if isinstance(patterns, str) else patterns
    if given[1:] or is_anywhere or whole is not None or not all(is_there for _, is_there in given):
        return _several(given, alphabet, fewest, most, whole)
    ((pattern, _),) = given
    tree: Any = parsed(pattern)
    low, high = tree.getwidth()
    if high < fewest or low > most:
        return None
    if low < fewest or high > most:
        found = _with_lengths(tree, fewest, most)
        if found is None:
            return _together([_written(pattern, tree, alphabet)], [], alphabet, fewest, most)
        tree = found
    return _whole(_written(pattern, tree, alphabet), alphabet)


def _several(
    patterns: Sequence[tuple[str, bool]],
    alphabet: Alphabet,
    fewest: float,
    most: float,
    whole: str | None,
) -> str | None:
    """One pattern of the texts in which some are found, and others are not."""
    found = [rewritten(whole, alphabet)] if whole is not None else []
    absent: list[str] = []
    for pattern, is_there in patterns:
        tree = parsed(pattern)
        if not is_there and _has_anchors_inside(tree):
            return None
        text = _found_anywhere(_written(pattern, tree, alphabet), tree, alphabet)
        (found if is_there else absent).append(text)
    if absent:  # is known of texts in their only spelling
        found.insert(0, rewritten("[^]*", alphabet))
    return _together(found, absent, alphabet, fewest, most)


def _together(
    found: list[str], absent: list[str], alphabet: Alphabet, fewest: float, most: float
) -> str | None:
    """A pattern of what all written ones have, and no absent one; `expressions` reads it."""
    if len(found) == 1 and not absent and (fewest, most) == (0, math.inf):
        return _whole(found[0], alphabet)
    if not alphabet.is_json:
        return None
    length = f"{LENGTH}{{{int(fewest)},{'' if most == math.inf else int(most)}}}"
    held = [length, *found[1:], *(f"(?:{one}){{0}}" for one in absent)]
    return _whole(found[0] + "".join(f"(?:{one}){{0}}" for one in held), alphabet)


def _whole(text: str, alphabet: Alphabet) -> str:
    """A pattern of whole texts; of JSON's in ASCII, which xgrammar hands on as it is."""
    is_plain = not alphabet.is_json
    return "".join(c if is_plain or c < "\x7f" else f"\\u{{{ord(c):x}}}" for c in f"^(?:{text})$")


def _has_anchors_inside(tree: Any) -> bool:
    items = list(tree)
    inner = items[items[:1] == [BEGINNING] : len(items) - (items[-1:] == [END])]
    return "AT_" in repr(inner)


def _found_anywhere(text: str, tree: Any, alphabet: Alphabet) -> str:
    """A written pattern with any text around it where it has no anchors."""
    if _has_anchors_inside(tree):  # of whole texts
        return text
    anything = rewritten("[^]*", alphabet)
    before, behind = (anything * (end not in list(tree)) for end in (BEGINNING, END))
    return f"{before}(?:{text}){behind}"


def _with_lengths(tree: Any, fewest: float, most: float) -> list[Any] | None:
    """The tree with other counts of its only repetition of one character; None for other trees."""

    def width(*items: Any) -> tuple[int, int]:
        low, high = _parser.SubPattern(tree.state, list(items)).getwidth()
        return low, high

    items = [item for item in tree if item not in (BEGINNING, END)]
    places = [place for place, item in enumerate(items) if len(set(width(item))) == 2]
    if len(places) != 1 or items[places[0]][0] not in (op.MAX_REPEAT, op.MIN_REPEAT):
        return None
    kind, (low, high, inner) = items[places[0]]
    if inner.getwidth() != (1, 1):
        return None
    beside = sum(width(item)[0] for place, item in enumerate(items) if place != places[0])
    low = max(low, int(fewest) - beside)
    high = min(most - beside, math.inf if high is op.MAXREPEAT else high)
    if low > high:
        return None
    items[places[0]] = (kind, (low, op.MAXREPEAT if high == math.inf else int(high), inner))
    return items


def is_found(pattern: str, text: str) -> bool:
    """Whether a pattern matches somewhere in a text.

    Raises:
        Unsupported: as ``rewritten``, or it takes too long.
    """
    searched = _searched(pattern)
    try:
        return searched is not None and searched.search(text, timeout=SECONDS) is not None
    except TimeoutError:
        raise _refusal(pattern, f"takes more than {SECONDS:g} s to be found in a text") from None


@functools.lru_cache(256)
def _searched(pattern: str) -> Any:
    """A pattern that can be searched for; None if it has no text."""
    written = _Writer(pattern, SEARCH).sequence(parsed(pattern), True, True)
    return None if written is None else regex.compile(written)


def exactly(texts: Iterable[str]) -> str:
    """A pattern of some texts."""
    return f"^(?:{'|'.join(map(re.escape, texts))})$"


def parsed(pattern: str) -> Any:
    """Python's tree of a pattern in JavaScript's syntax.

    Raises:
        Unsupported: it is no pattern, or has flags.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = _parser.parse(DIFFERENT.sub(_in_python, pattern))
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise _refusal(pattern, f"cannot be read ({error})") from None
    if tree.state.flags & ~re.UNICODE:
        raise _refusal(pattern, "has flags")
    return tree


def _in_python(found: re.Match[str]) -> str:
    kind = found.lastgroup
    if kind == "control":
        return f"\\x{ord(found['control'].upper()) - 64:02x}"
    if kind == "code":
        return f"\\U{int(found['code'], 16):08x}"
    if kind in ("unclear", "count"):
        raise re.error(f"{found[0]!r} is not known")
    if kind == "inside":
        return IN_CLASS.sub(_in_python, found[0])
    return {"any": r"[\s\S]", "none": r"[^\s\S]", "name": "(?P<"}.get(kind or "", found[0])


class _Writer:
    """Writes a tree; None is a part that has no text in the alphabet.

    ``first`` and ``last``: nothing stands before, or behind, in the whole pattern.
    """

    def __init__(self, pattern: str, alphabet: Alphabet) -> None:
        self._pattern, self._alphabet = pattern, alphabet

    def sequence(self, items: Sequence[Any], first: bool, last: bool) -> str | None:
        items, before, behind = list(items), "", ""
        while first and items and items[0] == BEGINNING:
            items, before = items[1:], r"\A" * self._alphabet.has_anchors
        while last and items and items[-1] == END:
            items, behind = items[:-1], r"\Z" * self._alphabet.has_anchors
        written = [
            self._item(item, first and place == 0, last and place == len(items) - 1)
            for place, item in enumerate(items)
        ]
        if None in written:
            return None
        return before + "".join(filter(None, written)) + behind

    def _item(self, item: tuple[Any, Any], first: bool, last: bool) -> str | None:
        kind, value = item
        if kind is op.LITERAL:
            return self._characters([(value, value)], is_named=True)
        if kind is op.NOT_LITERAL:
            return self._characters(others([(value, value)]), is_named=False)
        if kind is op.ANY:
            return self._characters(others(LINE_ENDS), is_named=False)
        if kind is op.IN:
            return self._class(value)
        if kind is op.BRANCH:
            each = [self.sequence(one, first, last) for one in value[1]]
            left = [one for one in each if one is not None]
            return f"(?:{'|'.join(left)})" if left else None
        if kind is op.SUBPATTERN and not value[1] and not value[2]:
            inner = self.sequence(value[3], first, last)
            return None if inner is None else f"(?:{inner})"
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeat(*value)
        raise _refusal(self._pattern, "looks around, refers back, or has anchors or flags inside")

    def _class(self, parts: Sequence[Any]) -> str | None:
        ranges: Ranges = []
        for kind, value in parts:
            if kind is op.CATEGORY:
                ranges += CATEGORIES[value]
            elif kind is not op.NEGATE:
                ranges.append((value, value) if kind is op.LITERAL else value)
        is_negated = parts[0][0] is op.NEGATE
        return self._characters(others(ranges) if is_negated else ranges, not is_negated)

    def _repeat(self, fewest: int, most: Any, items: Sequence[Any]) -> str | None:
        inner = "" if most == 0 else self.sequence(items, False, False)
        if not inner:
            return "" if inner == "" or fewest == 0 else None
        end = "" if most is op.MAXREPEAT else most
        times = {(0, ""): "*", (1, ""): "+", (0, 1): "?"}.get((fewest, end))
        return f"(?:{inner}){times or f'{{{fewest},{end}}}'}"

    def _characters(self, ranges: Ranges, is_named: bool) -> str | None:
        """A class, and JSON's escapes of what is not plain.

        ``is_named``: the pattern names the characters. Of all others in a negated class, only those
        with a short escape are written: a number has four digits, which makes more states.
        """
        parts = [_class_of(both(ranges, self._alphabet.plain))]
        if self._alphabet.is_json:
            escaped = [c for c in (*range(32), 34, 92) if any(a <= c <= b for a, b in ranges)]
            short = [(ord(SHORT_ESCAPES[c]),) * 2 for c in escaped if c in SHORT_ESCAPES]
            parts += [rf"\\{_class_of(short)}"] * bool(short)
            if is_named:
                parts += [rf"\\u{c:04x}" for c in escaped if c not in SHORT_ESCAPES]
        parts = [part for part in parts if part]
        return (parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})") if parts else None


def _class_of(ranges: Iterable[tuple[int, int]]) -> str:
    """A class in the syntax that xgrammar and Python share; empty for no characters.

    xgrammar takes an escaped "^" in front for one that is not.
    """
    parts = [_shown(a) if a == b else f"{_shown(a)}-{_shown(b)}" for a, b in ranges]
    if parts and parts[0].startswith(CARET):
        (low, high), *more = ranges
        behind = [(low + 1, high)] if low < high else []
        rest = _class_of([*behind, *more])
        return f"{rest[:-1]}{CARET}]" if rest else CARET
    return f"[{''.join(parts)}]" if parts else ""


def _shown(code: int) -> str:
    if code < 32 or code == 0x7F:
        return f"\\u{code:04x}"
    return ("\\" if chr(code) in "\\]^-[" else "") + chr(code)


def _refusal(pattern: str, why: str) -> Unsupported:
    return Unsupported(f"The pattern {pattern[:80]!r} {why}. Write another one, or leave it out.")


CATEGORIES = {
    op.CATEGORY_DIGIT: DIGITS,
    op.CATEGORY_NOT_DIGIT: others(DIGITS),
    op.CATEGORY_WORD: WORDS,
    op.CATEGORY_NOT_WORD: others(WORDS),
    op.CATEGORY_SPACE: SPACES,
    op.CATEGORY_NOT_SPACE: others(SPACES),
}

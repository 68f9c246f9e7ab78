"""Regular expressions of schemas and requests.

They are JavaScript's, as JSON Schema asks: ``\\d`` and ``\\w`` are ASCII. Python's parser reads
them. What a text is held to is spelled in letters, which xgrammar hands on as they are;
`pattern_edges` writes and reads it, and refuses what is no regular language.
"""

import functools
import itertools
import json
import math
import re
import warnings
from collections.abc import Iterable
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from dllm.grammar.characters import BY_BYTES, Ranges, others
from dllm.grammar.refusals import Unsupported

SPACES: Ranges = [
    *((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
ANYTHING = r"[^\ud800]*"  # no text has a surrogate
DIGITS: Ranges = [(48, 57)]
WORDS: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
CATEGORIES = {
    op.CATEGORY_DIGIT: DIGITS,
    op.CATEGORY_NOT_DIGIT: others(DIGITS),
    op.CATEGORY_WORD: WORDS,
    op.CATEGORY_NOT_WORD: others(WORDS),
}
BEGINNING, END = (op.AT, op.AT_BEGINNING), (op.AT, op.AT_END_STRING)
AHEAD = {op.ASSERT: True, op.ASSERT_NOT: False}  # whether what is looked for has to be there
CHARACTERS, REPEATS = (op.LITERAL, op.NOT_LITERAL, op.IN), (op.MAX_REPEAT, op.MIN_REPEAT)
# What JavaScript and Python read differently, in classes and outside of them.
ESCAPES = (
    r"\\c(?P<control>[A-Za-z])|\\u\{(?P<code>[0-9a-fA-F]{1,6})\}|(?P<unclear>\\[aAZpP])"
    r"|(?P<space>\\[sS])|\\."
)
IN_CLASS = re.compile(ESCAPES, flags=re.DOTALL)
DIFFERENT = re.compile(
    rf"{ESCAPES}|(?P<any>\[\^\])|(?P<none>\[\])|(?P<inside>\[(?:\\.|[^\]\\])*\])"
    r"|(?P<name>\(\?<(?![=!]))|(?P<count>\{,)|(?P<open>\[|\(\?<[=!])|(?P<one>\.)|(?P<end>\$)",
    flags=re.DOTALL,
)
IN_PYTHON = {
    "any": r"[\x00-\U0010ffff]",
    "none": r"[^\x00-\U0010ffff]",
    "name": "(?P<",
    "one": r"[^\n\r\u2028\u2029]",
    "end": r"\Z",
}
HELD = re.compile(r"\^held([0-9a-f]+)\$")


class Alphabet(NamedTuple):
    """Where a text stands: which characters it may have as they are.

    Attributes:
        plain: characters that stand for themselves.
        is_json: quotes, backslashes and control characters are written as JSON's escapes.
    """

    plain: Ranges
    is_json: bool = False


TEXT = Alphabet(BY_BYTES)
IN_JSON = Alphabet(
    [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F), *BY_BYTES[1:]],  # inside of a string's quotes
    is_json=True,
)
IN_GEMMA = Alphabet([(0, 0x3B), (0x3D, 0x7F), *BY_BYTES[1:]])  # its strings end with ``<|"|>``
ALPHABETS = (TEXT, IN_JSON, IN_GEMMA)


class Clause(NamedTuple):
    """What a text is held to: a pattern is found in it or not; as the whole text, or anywhere."""

    pattern: str
    is_there: bool = True
    is_whole: bool = True


class Held(NamedTuple):
    """Texts that are of all parts, with so many characters."""

    alphabet: Alphabet
    parts: tuple[Clause, ...]
    fewest: float
    most: float

    def tree(self) -> Any:
        """The tree of a single pattern that says all; None where there is none."""
        part, *more = self.parts
        (tree, _), *ahead = looks_ahead(part)
        is_free = (self.fewest, self.most) == (0, math.inf)
        is_alone = part.is_there and not more and not ahead and (part.is_whole or is_free)
        return with_lengths(tree, self.fewest, self.most) if is_alone else None


def read_held(spelled: str) -> Held:
    """What `pattern_edges.held` has spelled; of any other pattern, its whole texts."""
    found = HELD.fullmatch(spelled)
    if not found:
        return Held(TEXT, (Clause(spelled),), 0, math.inf)
    alphabet, parts, fewest, most = json.loads(bytes.fromhex(found[1]))
    return Held(ALPHABETS[alphabet], tuple(Clause(*part) for part in parts), fewest, most)


def characters_of(kind: Any, value: Any) -> tuple[Ranges, bool]:
    """(the characters of an item, whether they are named)."""
    if kind is not op.IN:
        one = [(value, value)]
        return (one, True) if kind is op.LITERAL else (others(one), False)
    ranges: Ranges = []
    for part, one in value:
        if part is op.CATEGORY:
            ranges += CATEGORIES[one]
        elif part is not op.NEGATE:
            ranges.append(one if part is op.RANGE else (one, one))
    is_negated = value[0][0] is op.NEGATE
    return others(ranges) if is_negated else ranges, not is_negated


def with_lengths(tree: Any, fewest: float, most: float) -> Any:
    """The tree with other counts of its only repetition of one character; None for other trees."""

    def width(*items: Any) -> tuple[int, int]:
        low, high = _parser.SubPattern(tree.state, list(items)).getwidth()
        return low, high

    if (fewest, most) == (0, math.inf):
        return tree
    items = list(tree)
    places = [place for place, item in enumerate(items) if len(set(width(item))) == 2]
    if len(places) != 1 or items[places[0]][0] not in REPEATS:
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
    """Whether a pattern matches somewhere in a text."""
    return _searched(pattern).search(text) is not None


@functools.lru_cache(256)
def _searched(pattern: str) -> Any:
    parsed(pattern)
    return re.compile(DIFFERENT.sub(_in_python, pattern), re.ASCII)


def exactly(texts: Iterable[str]) -> str:
    """A pattern of some texts."""
    return f"^(?:{'|'.join(map(re.escape, texts))})$"


def parsed(pattern: str) -> Any:
    """Python's tree of a pattern in JavaScript's syntax."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = _parser.parse(DIFFERENT.sub(_in_python, pattern))
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise refusal(pattern, f"cannot be read ({error})") from None
    if tree.state.flags & ~re.UNICODE:
        raise refusal(pattern, "has flags")
    return tree


def looks_ahead(part: Clause) -> list[tuple[Any, bool]]:
    """A pattern's tree, and what it looks ahead for where texts begin; whether each is there."""
    tree = parsed(part.pattern)
    lead = [*itertools.takewhile(lambda item: item == BEGINNING or item[0] in AHEAD, tree)]
    ahead = [([BEGINNING, *value[1]], AHEAD[kind]) for kind, value in lead if kind in AHEAD]
    if not ahead or not (part.is_whole or BEGINNING in lead):
        return [(tree, True)]
    return [([BEGINNING, *(tree[len(lead) :] or parsed(ANYTHING))], True), *ahead]


def _in_python(found: re.Match[str]) -> str:
    kind = found.lastgroup or ""
    if kind == "control":
        return f"\\x{ord(found['control'].upper()) - 64:02x}"
    if kind == "code":
        return f"\\U{int(found['code'], 16):08x}"
    if kind in ("unclear", "count", "open"):
        raise re.error(f"{found[0]!r} is not known")
    if kind == "inside":
        return IN_CLASS.sub(_in_python, found[0])
    if kind == "space":
        ranges = SPACES if found[0] == r"\s" else others(SPACES)
        members = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
        return members if found.re is IN_CLASS else f"[{members}]"
    return IN_PYTHON.get(kind, found[0])


def refusal(pattern: str, why: str) -> Unsupported:
    return Unsupported(f"The pattern {pattern[:80]!r} {why}. Write another one, or leave it out.")

"""Patterns: the same texts by the automaton as by Python, in each alphabet."""

import itertools
import json
import math
import random
import re

import pytest

from dllm.grammar.automaton import DEAD, Automaton
from dllm.grammar.pattern_edges import held
from dllm.grammar.patterns import IN_GEMMA, IN_JSON, TEXT, Clause, exactly, is_found
from dllm.grammar.refusals import Unsupported
from tests.support.grammars import read

CHARACTERS = [chr(code) for code in range(1, 128)] + [*"é߿ࠀ퟿￿𐀀\u2028\ufeff"]
SHORT_TEXTS = ["".join(text) for n in range(6) for text in itertools.product("abc", repeat=n)]


def accepted(made: Automaton, texts, form=str) -> set[str]:
    states = {text: made.read(0, form(text).encode()) for text in texts}
    return {text for text, state in states.items() if state != DEAD and made.accepts(state)}


def as_text(pattern: str, texts=CHARACTERS, alphabet=TEXT) -> set[str]:
    return accepted(read("regex", held([Clause(pattern)], alphabet)), texts)


def as_json(parts: str | list[Clause], texts=CHARACTERS, fewest=0, most=math.inf) -> set[str]:
    """Texts in JSON strings, spelled as ``json`` does."""
    parts = [Clause(parts)] if isinstance(parts, str) else parts
    schema = {"type": "string", "pattern": held(parts, IN_JSON, fewest, most)}
    made = read("json", json.dumps(schema))
    return accepted(made, texts, lambda text: json.dumps(text, ensure_ascii=False))


CLASSES = [
    *(".", r"\S", r"\D", r"\W", r"\d", r"\w", r"\s", r"[^\s]", r"[^\S]", r"[^\-z]", r"[\s\S]"),
    *("[^a]", "[^-a]", "[^a-]", "[^-]", "[^^]", "[^^$]", r"[^,]", r"[\x00-\x1f]", r"[\b]"),
    *("[ -~]", r"[\x20-\x7e]", r"[ -\u007E]", "[!-<]", "[a<-=-]", r"[\t-~]", r"[\s -~\d]"),
    *(r"[\w.-]", r"[\]-a\\]", "[$-^]", "[(-)]", "[é-日]", r"\.", r"\u0041", r"\x41", r"\/", "\t"),
    *("[[]", "[a[]", "[^[]", "[a-z{,}]", "[(?<]"),
    *(r"\^", r"\\", '"', '["]', "(?:a|<)", "<", r"\x3c", r"\n|\r", r"\cA", r"\u{e9}", "[^]", "𐀀"),
]


def in_python(part: str) -> re.Pattern[str]:
    """The same class for Python, where classes have characters of all scripts."""
    known = {".": r"[^\n\r\u2028\u2029]", "[^]": r"[\s\S]", r"\cA": r"\x01", r"\u{e9}": "é"}
    part = known.get(part, part).replace(r"\s", r"\s\ufeff" if "[" in part else r"[\s\ufeff]")
    part = part.replace(r"\S", r"[^\s\ufeff]") if "[" not in part else part
    return re.compile(part, flags=re.ASCII)


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize("part", CLASSES)
def test_a_class_has_its_characters_in_each_alphabet(part):
    if part in (r"\s", r"\S", r"[^\s]", r"[^\S]", r"[\s -~\d]"):
        spaces = {c for c in CHARACTERS if c in "\t\n\v\f\r \u2028\ufeff"}
        printed = {c for c in CHARACTERS if " " <= c <= "~"}
        is_space = part in (r"\s", r"[^\S]")
        known = spaces if is_space else set(CHARACTERS) - spaces
        wanted = printed | spaces if part == r"[\s -~\d]" else known
    else:
        wanted = {c for c in CHARACTERS if in_python(part).fullmatch(c)}
    assert as_text(part) == wanted
    # JSON's short escapes are written everywhere, and the long ones of characters that are named.
    long = {c for c in wanted if c < " " and c not in "\b\t\n\f\r"}
    found = as_json(part)
    assert wanted - long <= found <= wanted
    if part in (r"[\x00-\x1f]", r"[\t-~]", r"\cA"):
        assert found == wanted
    if left := wanted - {"<"}:
        assert as_text(part, alphabet=IN_GEMMA) == left
    else:
        assert held([Clause(part)], IN_GEMMA) is None


def drawn(draws: random.Random, depth: int = 0) -> str:
    """A pattern over a, b and c; repetitions of repetitions, which are easily misread."""
    kind = draws.random()
    if depth > 3 or kind < 0.35:
        return draws.choice(["a", "b", "[ab]", "c", "[^a]"])
    if kind < 0.55:
        return drawn(draws, depth + 1) + drawn(draws, depth + 1)
    if kind < 0.7:
        return f"(?:{drawn(draws, depth + 1)}|{drawn(draws, depth + 1)})"
    times = draws.choice(["?", "*", "+", "{1,2}", "{2}", "{0,2}", "{2,}", "{1,3}", "*?", "{1}?"])
    return f"({drawn(draws, depth + 1)}){times}"


def test_drawn_patterns_have_the_texts_that_python_finds():
    draws = random.Random(0)
    for _ in range(60):
        pattern = drawn(draws)
        whole = {text for text in SHORT_TEXTS if re.fullmatch(pattern, text)}
        assert as_json(pattern, SHORT_TEXTS) == whole, pattern
        assert as_text(f"^{pattern}$", SHORT_TEXTS) == whole, pattern
        is_somewhere = {text for text in SHORT_TEXTS if re.search(pattern, text)}
        assert {text for text in SHORT_TEXTS if is_found(pattern, text)} == is_somewhere, pattern


@pytest.mark.parametrize(
    ("pattern", "text", "is_there"),
    [
        ("^a", "ab", True),
        ("^b", "ab", False),
        ("b$", "ab", True),
        ("b$", "ab\n", False),
        ("^a|b$", "xb", True),
        (r"^\d$", "٣", False),
        ("(?<n>é)", "é", True),
    ],
)
def test_a_pattern_is_found_as_in_javascript(pattern, text, is_there):
    assert is_found(pattern, text) == is_there


@pytest.mark.parametrize(
    "pattern",
    [
        *("a^b", "a$b", r"\bword", "(?i)a", "(?i:a)", "(?<!a)b", "a(?=b)", "a(?!b)", r"a\Z"),
        *(r"\Aa", r"\\\b", r"(a)\1", "a++", "(?>a)", "[a", "[.*", "a{,3}", r"\p{L}", "a\\", "("),
        *("[z-a]", "[^]a^b]", "(" * 5000),
    ],
    ids=lambda value: value[:10],
)
def test_what_is_no_regular_language_or_unclear_is_refused(pattern):
    with pytest.raises(Unsupported, match="pattern"):
        as_text(pattern)


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^(?!ab)[ab]*$", {"", "a", "b"}),
        ("^(?=.*b)(?!.*c)a?.?$", {"ab", "b"}),
        ("^(?!ab$|b)", {"", "a", "ac", "aba", "abab"}),
        ("(?!.*c)^a", {"a"}),
    ],
)
def test_what_is_looked_for_where_a_text_begins_is_held(pattern, texts):
    tried = ["", "a", "ab", "ac", "aba", "abab", "b"]
    assert as_json(pattern, tried) == as_text(pattern, tried) == texts
    parts = [Clause(pattern, is_there=False, is_whole=False)]
    assert as_json(parts, tried) == {text for text in tried if not is_found(pattern, text)}


@pytest.mark.parametrize(
    ("pattern", "fewest", "most", "texts"),
    [
        ("^[ab]+$", 2, 3, {"ab", "aba"}),
        ("a*", 0, 1, {"", "a"}),
        ("[]|a", 0, 9, {"a"}),
        ("^[ab]{2}$", 1, 5, {"ab"}),
        ("^a(?:b|c)$", 2, 2, {"ab", "ac"}),
        ("^a|aba$", 2, 3, {"aba"}),
        ("^(?:ab|a)+$", 3, 4, {"aba", "abab"}),
        ("^$[ab]*$", 0, 9, {""}),
    ],
)
def test_lengths_beside_a_pattern_are_held(pattern, fewest, most, texts):
    assert as_json(pattern, ["", "a", "ab", "ac", "aba", "abab"], fewest, most) == texts


@pytest.mark.parametrize(
    ("pattern", "also", "texts"),
    [
        ("^a", "[ab]*", {"a", "ab", "aba", "abab"}),
        ("b$", "[ab]*", {"ab", "abab", "b"}),
        ("a", "[ac]*", {"a", "ac"}),
        ("^a|c$", "[abc]*", {"a", "ab", "ac", "aba", "abab"}),
        ("(?:^b|(?:^|a)b$)", "[ab]*", {"ab", "abab", "b"}),
    ],
)
def test_two_patterns_are_held_at_once(pattern, also, texts):
    tried = ["", "a", "ab", "ac", "aba", "abab", "b"]
    there, absent = (Clause(pattern, is_there, is_whole=False) for is_there in (True, False))
    assert as_json([Clause(also), there], tried) == texts
    assert as_json([Clause(also), absent], tried) == as_json(also, tried) - texts


def test_texts_that_there_are_not_are_told():
    for pattern, alphabet, *lengths in [
        *(("^ab|c$", IN_GEMMA, 3), ("^(?:ab)+$", IN_GEMMA, 3, 3), ("<", IN_GEMMA), ("[]", TEXT)),
        *(("^a{3}$", IN_JSON, 4), ("^a{3}$", IN_JSON, 0, 2), ("^(?!a)a", IN_JSON)),
    ]:
        assert held([Clause(pattern)], alphabet, *lengths) is None
    assert held([Clause("^(?:ab)+$")], IN_GEMMA, 3)


@pytest.mark.parametrize(
    "names", [["a"], ["a", "ab", "b"], ["", "abc"], ['q"', "é", "a.b"], ['"'], ["(", "-"]], ids=str
)
def test_other_names_are_all_but_these(names):
    tried = ["", "a", "ab", "abc", "abcd", "b", "bb", "é", "éa", "q", 'q"', "日本", "a.b"]
    parts = [Clause(exactly(names), is_there=False)]
    assert as_json(parts, tried) == {*tried} - {*names}
    made = read("json", json.dumps({"type": "string", "pattern": held(parts)}))
    assert not accepted(made, [r'"\u0061"'])

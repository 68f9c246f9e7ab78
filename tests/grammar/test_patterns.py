"""Patterns that are refused, and those that are made to do without ``<``: by the automaton."""

import numpy as np
import pytest

from dllm.grammar.automaton import DEAD, Unsupported
from dllm.grammar.patterns import PART, check_pattern, without_less_than
from dllm.grammar.reach import nearest
from tests.support.grammars import automaton

ASCII = [chr(code) for code in range(1, 128)]


def texts_of(pattern: str, texts) -> set[str]:
    """Those of some texts that xgrammar's automaton accepts."""
    made, _ = automaton("regex", pattern)
    states = {text: made.read(0, text.encode()) for text in texts}
    return {text for text, state in states.items() if state != DEAD and made.accepts(state)}


@pytest.mark.parametrize("pattern", ["a^b", "(a$)", r"\bword", "(?i)a", "(?<!a)b", r"a\Z", r"\\\b"])
def test_what_looks_around_is_refused(pattern):
    with pytest.raises(Unsupported, match=r"looks around|inside"):
        check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", [r"C:\\bin", r"a\\z", r"[\b]", r"a\$b\^", r"[^$^]+\\$", r"\[a$", "[(?=]", "^$", ""]
)
def test_what_only_seems_to_look_around_is_not_refused(pattern):
    check_pattern(pattern)


@pytest.mark.parametrize("pattern", [r"\x41a", r"a[\x41a]", r"\\\x410"])
def test_numbers_that_xgrammar_misreads_are_refused(pattern):
    with pytest.raises(Unsupported, match="hexadecimal"):
        check_pattern(pattern)
    assert "A" not in texts_of(r"[\x41a]", "A"), "xgrammar reads it right: admit it"


@pytest.mark.parametrize("pattern", [r"\x41", r"\x41g", r"\\x41a", r"\u0041a", r"[\x20-\x7e]"])
def test_other_numbers_are_not_refused(pattern):
    check_pattern(pattern)


def test_a_class_that_is_empty_in_javascript_ends_there():
    with pytest.raises(Unsupported, match="inside"):
        check_pattern("[^]a^b]")


@pytest.mark.parametrize("opened", ["[", "[^", "[a", "[\\", "\\[["])
def test_a_class_that_nothing_closes_is_one_part(opened):
    """So that no part is read twice."""
    assert len(PART.findall(opened * 5000)) <= 2


PARTS = [
    *(".", r"\S", r"\D", r"\W", r"\d", r"\w", r"\s", r"[^\s]", r"[^\S]", r"[^\-z]"),
    *("[^a]", "[^]", "[^-a]", "[^a-]", "[^-]", "[^^]"),
    *("[ -~]", r"[\x20-\x7e]", r"[ -\u007E]", "[!-<]", "[<-z]", "[;-=]"),
    *("[a<-=-]", r"[\t-~]", r"[\s -~\d]", r"[\w.-]", r"[\]-a\\]", "[$-^]", "[(-)]", "[é-日]"),
    *("[^é<]", r"\.", r"\u0041", r"\x41", r"\/"),
]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_all_its_characters_but_one(part):
    assert texts_of(without_less_than(part), ASCII) == texts_of(part, ASCII) - {"<"}


@pytest.mark.parametrize(
    "pattern",
    [
        *("^.*$", r"[\w.-]+@\S+", "^(?:[^,]*|[ -~]{3}){1,4}$", r"https?://[^\s]+"),
        *(r"^[^\W\d]\D\W$", r"[0-9]+\$", r"^[0-9]+\\\$$", r"\\$", ".|a", "(.|a)*?", "x{2,}.?"),
    ],
)
def test_no_text_has_the_character(pattern):
    made, _ = automaton("regex", without_less_than(pattern))
    found = nearest(made, 4096)
    assert (found.rows[:, found.class_of[ord("<")]] == DEAD).all()
    assert (found.rows != DEAD).any()


def test_random_classes_never_have_the_character():
    draws = np.random.default_rng(0)
    pieces = [*"-^<;=ac3~ !", r"\-", r"\]", r"\\", r"\w", r"\d", r"\S"]
    pieces += [r"\x3c", r"\x03", r"\u003B", r"\x7", r"\c"]
    num_made = 0
    for _ in range(3000):
        text = "[" + "".join(draws.choice(pieces, draws.integers(0, 6))) + "]"
        try:
            made = without_less_than(text)
            allowed = texts_of(made, ASCII)
        except (Unsupported, RuntimeError):  # by us or by xgrammar
            continue
        num_made += 1
        assert allowed == texts_of(text, ASCII) - {"<"}, (text, made)
    assert num_made > 500


def test_anchors_are_left_out_and_escaped_ones_are_not():
    assert texts_of(without_less_than(r"^[0-9]+\$$"), ["5$", "5", "5\\"]) == {"5$"}
    assert texts_of(without_less_than(r"\$"), ["$", "\\"]) == {"$"}
    assert texts_of(without_less_than(r"a\\$"), ["a\\", "a$"]) == {"a\\"}
    assert texts_of(without_less_than(r"\^a"), ["^a", "a"]) == {"^a"}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ('a<|"|>b', "ends a string"),
        (r"\<", "ends a string"),
        (r"\x3c", "ends a string"),
        (r"\u003C", "ends a string"),
        ("[<]", "ends a string"),
        (r"[a\x3C]", "ends a string"),
        (r"[\s\S]", "Write '.'"),
        (r"[.-\w]", "the class"),  # from "." to the first letter of "\w", for xgrammar
        (r"[\d-z]", "the class"),
        (r"[\u{3c}]", "the class"),
        ("[a", "the class"),
        (r"\x03c", "hexadecimal"),  # "\x3c" for xgrammar
        (r"[\u0003c]", "the class"),
        (r"[\x03\w]", "the class"),  # "[\x03a-z...]" for xgrammar
        (r"\cA", "not known"),
        (r"\u{3c}", "not known"),
        ("a\\", "not known"),
        ("(?=a)", "looks around"),
    ],
)
def test_what_may_have_the_character_is_refused(pattern, message):
    with pytest.raises(Unsupported, match=message):
        without_less_than(pattern)

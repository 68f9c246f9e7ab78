"""A table holds what its automaton holds, cut only by levels of recursion, and survives packing."""

import functools
import json
import random

import numpy as np
import pytest

from dllm.grammar import reach
from dllm.grammar import table as tables
from dllm.grammar.automaton import DEAD, START, Automaton
from dllm.grammar.children import grammar_of
from dllm.grammar.reach import NEVER, TooManyStates, nearest
from dllm.grammar.refusals import Unsupported
from dllm.grammar.table import Table
from dllm.grammar.vocabulary import Vocabulary
from tests.support.grammars import (
    GRAMMARS,
    PADDING,
    STOP,
    VOCABULARY,
    WORDS,
    automaton,
    build,
    spelled,
    table,
)


@pytest.mark.parametrize("name", GRAMMARS)
def test_it_allows_the_tokens_that_the_automaton_allows(name):
    made, _ = automaton(*GRAMMARS[name])
    found = build(made, most_states=300)

    @functools.cache  # many ways lead to one state
    def num_allowed(state: int, here: int) -> int:
        allowed = 0
        for token in range(len(WORDS)):
            is_allowed = found.read(here, [token]) != DEAD
            should = VOCABULARY.is_text[token] and made.read(state, WORDS[token]) != DEAD
            assert is_allowed == should or (name in ("nested", "list", "anything") and should)
            allowed += is_allowed
        return allowed

    rng = random.Random(0)
    checked = 0
    for _ in range(200):
        state, here = START, 0
        for _ in range(rng.randint(0, 12)):
            allowed = np.flatnonzero(np.append(found.next[here] != DEAD, False)[found.class_of])
            if not len(allowed):
                break
            token = int(rng.choice(allowed.tolist()))
            state, here = made.read(state, WORDS[token]), found.read(here, [token])
            assert state != DEAD and made.accepts(state) == found.accepts[here]
        checked += num_allowed(state, here)
    assert checked > (0 if name == "choice" else 100)


def tagged(*tags):
    of_tag = {"type": "object", "required": ["k", "v"]}
    inner = {"type": "string", "maxLength": 40}
    each = [of_tag | {"properties": {"k": {"const": tag}, "v": inner}} for tag in tags]
    return json.dumps({"anyOf": each})


LONG = json.dumps({"type": "array", "items": {"enum": ["ab", "cb"]}, "maxItems": 300})


@pytest.mark.parametrize("text", [tagged(1, 2), tagged(1, None, True), LONG])
def test_states_with_equal_continuations_are_one(text):
    """What is counted stays apart."""
    serialized = grammar_of("json", text, any_whitespace=False).serialize_json()
    made = Automaton(serialized, is_merged=False)
    whole = nearest(made, 8000)
    made.is_merged = True
    merged = nearest(made, 8000)
    assert len(merged.rows) < len(whole.rows)
    pairs, todo = {(0, 0)}, [(0, 0)]  # that one text leads to
    while todo:
        one, other = todo.pop()
        assert merged.accepts[one] == whole.accepts[other]
        rows = merged.rows[one][merged.class_of], whole.rows[other][whole.class_of]
        np.testing.assert_array_equal(rows[0] == DEAD, rows[1] == DEAD)
        new = {(a, b) for a, b in zip(*map(np.ndarray.tolist, rows), strict=True) if a != DEAD}
        todo += new - pairs
        pairs |= new
    assert len({one for one, _ in pairs}) == len(merged.rows)


@pytest.mark.parametrize("name", GRAMMARS)
def test_edges_are_what_follows(name):
    found, _ = table(*GRAMMARS[name], most_states=300)
    edges, following = found.edges, np.full_like(found.next, DEAD)
    for source, label, target in zip(edges.source, edges.label, edges.target, strict=True):
        following[source, edges.classes(label)] = target
    np.testing.assert_array_equal(following, found.next)
    pairs = [*zip(edges.target.tolist(), edges.source.tolist(), strict=True)]
    assert pairs == sorted(set(pairs))
    labels = [edges.classes(label).tobytes() for label in range(len(edges.bounds) - 1)]
    assert len(set(labels)) == len(labels) == len(set(edges.label.tolist()))


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_state_leads_to_an_end(name):
    found, _ = table(*GRAMMARS[name], most_states=300)
    assert (found.left < NEVER).all()
    for state in range(len(found.left)):
        behind = found.left[found.next[state][found.next[state] != DEAD]]
        expected = 0 if found.accepts[state] else behind.min() + 1
        assert found.left[state] == expected


def test_spellings_do_not_matter():
    """Every way to cut a text into tokens leads to one state."""
    found, _ = table(*GRAMMARS["words"])
    words = {word: token for token, word in enumerate(WORDS)}
    a, b, ab, ba = (words[word] for word in (b"a", b"b", b"ab", b"ba"))
    assert found.read(0, [a, b, a, b]) == found.read(0, [ab, ab]) == found.read(0, [a, ba, b])


def test_levels_are_taken_whole():
    for most_states in (150, 300, 1000):
        made, _ = automaton(*GRAMMARS["anything"])
        found = build(made, most_states=most_states)
        assert len(found.left) <= most_states
        deep = ['{"a": ' * n + "1" + "}" * n for n in range(1, 9)]
        mixed = ['{"a": [' * n + "1" + "]}" * n for n in range(1, 5)]
        num_levels = sum(is_held(found, text) for text in deep)
        assert 1 <= num_levels < len(deep)
        for texts, step in ((deep, 1), (mixed, 2)):
            for number, text in enumerate(texts, 1):
                assert is_held(found, text) == (number * step <= num_levels), text


def test_levels_in_which_next_to_nothing_fits_are_refused():
    """Of a list of such lists not just the empty one is served."""
    item = {"type": "object", "properties": {"name": {"type": "string"}, "in": {"$ref": "#"}}}
    item |= {"required": ["name"], "additionalProperties": False}
    text = json.dumps({"type": "array", "items": item})
    made, _ = automaton("json", text)
    assert is_held(build(made, most_states=200), '[{"name": ""}]')
    with pytest.raises(TooManyStates):
        build(made, most_states=20)


def test_where_the_first_text_ends_deep_inside_there_is_room_for_it(monkeypatch):
    monkeypatch.setattr(reach, "UNROLLED", 16)
    names = [f"{number * 7919 % 65536:016b}" for number in range(40)]
    text = {"anyOf": [{"$ref": "#"}, {"enum": names}]}
    for name in "ab":
        inner = {"type": "array", "items": text, "minItems": 1} if name == "a" else text
        text = {"type": "object", "properties": {name: inner}, "required": [name]}
    made, _ = automaton("json", json.dumps(text))
    assert is_held(build(made), json.dumps({"b": {"a": names}}))


def is_held(found: Table, text: str) -> bool:
    return found.read(0, spelled(text)) != DEAD


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("MAP_ENTRIES", "different ways"),
        *((limit, "allowed: 10") for limit in ("CELLS", "CLASSES", "EDGES", "LABELS", "MEMBERS")),
    ],
)
def test_what_is_beyond_a_limit_is_refused(limit, words, monkeypatch):
    monkeypatch.setattr(tables, f"MOST_{limit}", 10)
    with pytest.raises(Unsupported, match=words):
        table(*GRAMMARS["person"])


def test_a_grammar_that_no_token_spells_is_refused():
    made, _ = automaton("regex", "[xy]+")
    with pytest.raises(Unsupported, match="spelled"):
        build(made, Vocabulary((b"a", b"b", b"")))


def test_tokens_without_words_are_in_no_text():
    found, _ = table("regex", "[^x]*")
    assert (found.class_of[[STOP, PADDING]] < 0).all()


def test_vocabularies_differ_by_any_word():
    lists = ([b"ab", b"c"], [b"a", b"bc"], [b"a", b"b"], [b"a", b"b", b""])
    packed = [Vocabulary(words).to_bytes() for words in lists]
    assert len(set(packed)) == 4
    assert [Vocabulary.from_bytes(one).words for one in packed] == list(lists)


def test_the_trie_holds_every_word_once():
    trie = VOCABULARY.trie
    spelled = [b""]
    for parents, letters in trie.levels:
        spelled += [
            spelled[parent] + bytes([letter])
            for parent, letter in zip(parents.tolist(), letters.tolist(), strict=True)
        ]
    assert len(set(spelled)) == len(spelled) == trie.num_nodes
    assert [spelled[node] for node in trie.end.tolist()] == list(WORDS)

"""The automaton allows the texts that xgrammar's own matcher allows."""

import json
import random

import pytest
import xgrammar

from dllm.grammar.automaton import DEAD, START, Automaton
from dllm.grammar.reach import nearest
from dllm.grammar.refusals import Unsupported
from tests.support.grammars import GRAMMARS, automaton, of_schema, random_schema, table


def same_as_the_matcher(
    made: Automaton, compiled, rng: random.Random, length: int, likely: str = ""
) -> bytes:
    """Walk at random, mostly along what is allowed; compare at every byte. Returns the text."""
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    state, text = START, b""
    for _ in range(length):
        allowed = [byte for byte, target in enumerate(made.row(state)) if target != DEAD]
        byte = rng.choice(allowed) if allowed and rng.random() < 0.95 else rng.randrange(256)
        byte = ord(rng.choice(likely)) if likely and rng.random() < 0.8 else byte
        following = int(made.row(state)[byte])
        is_control = byte < 32  # refused by ours inside strings of JSON
        is_escape = byte == ord("\\")  # allowed by ours in strings of a bounded length
        accepted = matcher.accept_string(bytes([byte])) if byte < 128 else following != DEAD
        if accepted != (following != DEAD):
            assert (is_control and following == DEAD) or is_escape, (text, byte)
            return text
        if following == DEAD:
            return text
        state, text = following, text + bytes([byte])
        if byte >= 128:
            return text  # the matcher takes whole characters only
        assert made.accepts(state) == matcher.is_completed(), text
    return text


@pytest.mark.parametrize("name", GRAMMARS)
def test_random_texts(name):
    made, compiled = automaton(*GRAMMARS[name])
    rng = random.Random(0)
    texts = {same_as_the_matcher(made, compiled, rng, 40) for _ in range(100)}
    assert max(map(len, texts)) > 1


def test_free_text_around_tags():
    content = {"type": "regex", "pattern": "[^a]{2,4}"}
    tags = [
        {"type": "tag", "begin": begin, "content": content, "end": "</a>"}
        for begin in ("<a>b", "<ac")
    ]
    form = {"type": "triggered_tags", "triggers": ["<a"], "excludes": ["<<>", "b<"], "tags": tags}
    made, compiled = automaton(
        "structural_tag", json.dumps({"type": "structural_tag", "format": form})
    )
    rng = random.Random(2)
    for _ in range(100):
        same_as_the_matcher(made, compiled, rng, 60, "<ab>c/")


def test_random_schemas():
    rng = random.Random(1)
    for _ in range(150):
        schema = {"type": "object", "properties": {"v": random_schema(rng)}, "required": ["v"]}
        made, compiled = of_schema(json.dumps(schema), any_whitespace=rng.random() < 0.3)
        for _ in range(5):
            same_as_the_matcher(made, compiled, rng, 60)


def test_what_follows_the_first_item_is_what_follows_the_others():
    made, _ = of_schema('{"type": "array"}')
    texts = b"[1", b"[1, 1", b'[{"a": 1}, 1'
    assert len({made.read(START, text) for text in texts}) == 1
    inner = b'[[{"a": "x', b'[1, [{"a": "x', b'[1, [1, {"b": 1, "a": "x'
    assert len({made.read(START, text) for text in inner}) == 1


def test_equal_continuations_are_one_state():
    made, _ = automaton(*GRAMMARS["list"])
    first, second = made.read(START, b"[ab,"), made.read(START, b"[[x],c,")
    assert first == second != DEAD
    assert made.read(START, b"[a") != first
    assert made.read(START, b"[a]]") == DEAD


def test_what_is_written_twice_is_read_once():
    """Behind what tells alternatives apart; the states are those before equal ones are merged."""

    def num_states(*tags: str) -> int:
        each = [
            {"properties": {"k": {"const": tag}, "v": {"format": "date", "type": "string"}}}
            for tag in tags
        ]
        made, _ = of_schema(json.dumps({"anyOf": [one | {"required": ["k", "v"]} for one in each]}))
        made.is_merged = False
        return len(nearest(made, 1000).rows)

    assert num_states("a", "b") < num_states("a") + 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('root ::= root "a" | "b"', "left-recursive"),
        ('root ::= "a" root', "no finite text"),
    ],
)
def test_what_is_refused(text, words):
    with pytest.raises(Unsupported, match=words):
        table("ebnf", text)


def test_there_are_no_surrogates():
    made, _ = automaton("json", '{"type": "string"}')
    assert made.read(START, '"\ud7ff\ue000\U0001f600'.encode()) != DEAD
    for second in range(0xA0, 0xC0):
        assert made.read(START, bytes([ord('"'), 0xED, second])) == DEAD

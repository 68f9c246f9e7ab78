"""Tables from memory and from children, and what is refused in what time."""

import contextlib
import json
import os
import select
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from dllm.grammar import children as children_of
from dllm.grammar import compile as compiling
from dllm.grammar.automaton import DEAD
from dllm.grammar.children import Children
from dllm.grammar.compile import Grammars, Spec, Tokens
from dllm.grammar.refusals import TooSlow, Unsupported
from dllm.grammar.table import MOST_STATES, Table
from dllm.grammar.tags import lower_text
from tests.support.grammars import GRAMMARS, VOCABULARY, WORDS, accepts, table
from tests.support.patience import HANG_S
from tests.support.process import run_python, start_python

PERSON = Spec("json", GRAMMARS["person"][1], any_whitespace=False)
SCATTERED = [f"{number * 257491268817 % 2**40:010x}" for number in range(9000)]
SLOW = Spec("regex", "(((a{1,30}){1,30}){1,30}){1,30}")


@pytest.fixture(scope="module")
def children():
    made = Children(VOCABULARY, seconds=HANG_S)  # no test that shares them is about time
    yield made
    made.close()


class Counted:
    """Children that are only counted."""

    def __init__(self, children):
        self.children = children
        self.num_asked = 0

    def table(self, request):
        self.num_asked += 1
        return self.children.table(request)


def grammars(children, names=(), **limits) -> Grammars:
    return Grammars(lambda: Tokens(list(WORDS), dict(names)), children, **limits)


def made_by(made: Grammars, spec: Spec, stops=()) -> Table:
    return Table.from_bytes(made.begin(spec, stops).result())


def same(one: Table, other: Table) -> bool:
    names = ("class_of", "next", "accepts", "left")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("name", ["words", "list", "person"])
def test_a_child_builds_what_this_process_builds(name, children):
    kind, text = GRAMMARS[name]
    spec = Spec("grammar" if kind == "ebnf" else kind, text, any_whitespace=False)
    found = made_by(grammars(children, most_states=300), spec)
    lowered = lower_text(kind, text) if kind == "json" else text
    assert same(found, table(kind, lowered, most_states=300)[0])


def test_other_kinds(children):
    made = grammars(children)
    lark = made_by(made, Spec("lark", 'start: "a" | "b"'))
    assert accepts(lark, "a")
    schema = json.dumps({"type": "integer", "minimum": 1, "maximum": 2})
    tag = {"begin": "<a>", "schema": json.loads(schema), "end": "</a>"}
    tagged = made_by(
        made, Spec("structural_tag", json.dumps({"structures": [tag], "triggers": ["<a>"]}))
    )
    new = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
    newer = made_by(
        made, Spec("structural_tag", json.dumps({"type": "structural_tag", "format": new}))
    )
    for found, inside in ((tagged, "1"), (newer, "any\n")):
        assert accepts(found, f"<a>{inside}</a>")
    spaced = made_by(made, Spec("json", schema, separators=(",", ":")))
    assert accepts(spaced, "1")


def test_special_tokens_are_text_only_where_a_tag_names_them(children):
    """And stop tokens never are."""
    ab, ba = WORDS.index(b"ab"), WORDS.index(b"ba")
    made = grammars(children, names={ab: "ab", ba: "ba"})
    text = made_by(made, Spec("regex", "(ab|ba)+"))
    assert text.class_of[ab] == text.class_of[ba] == -1
    form = {"type": "tag", "begin": "ab", "content": {"type": "regex", "pattern": "a"}, "end": "ba"}
    spec = Spec("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    tag = made_by(made, spec)
    assert tag.accepts[tag.read(0, [ab, WORDS.index(b"a"), ba])]
    assert made_by(made, spec, [ab]).read(0, [ab]) == DEAD


def test_no_other_tokens_spell_the_mark_that_a_tag_names(children):
    """But in its content, which may be any text, the same letters are text, and no mark is."""
    letters = {letter: WORDS.index(letter.encode()) for letter in "abdemnr"}
    name, red = WORDS.index(b"name"), WORDS.index(b"red")
    content = {"type": "regex", "pattern": '"[a-z]*"'}
    form = {"type": "tag", "begin": "name", "content": content, "end": "red"}
    spec = Spec("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    made = Grammars(lambda: Tokens(list(WORDS), {name: "name"}, {red: "red"}), children)
    found, quote = made_by(made, spec), WORDS.index(b'"')
    inside = [quote, *(letters[letter] for letter in "named"), quote]
    assert found.accepts[found.read(0, [name, *inside, red])]
    assert found.read(0, [letters[letter] for letter in "name"]) == DEAD
    assert found.read(0, [name, *inside, *(letters[letter] for letter in "red")]) == DEAD
    assert found.read(0, [name, quote, red]) == DEAD
    without = made_by(made, spec, [name])  # which ends the request
    assert without.read(0, [letters[letter] for letter in "name"]) != DEAD


@pytest.mark.parametrize(
    ("schema", "is_refused"),
    [
        ({"enum": ["x", "a</tool_call>"]}, True),
        ({"properties": {"a": {"const": {"b": ["<tool_call>"]}}}}, True),
        ({"enum": ["tool_call", "<b>"], "description": "<tool_call>"}, False),
        ({"properties": {"enum": {"description": "<tool_call>"}}}, False),
        ({"$defs": {"const": {"title": "<tool_call>"}}, "$ref": "#/$defs/const"}, False),
        ({"properties": {"properties": {"enum": ["<tool_call>"]}}}, True),
        ({"dependentRequired": {"enum": ["<tool_call>"]}}, False),
        ({"default": {"enum": ["<tool_call>"]}}, False),
        ({"properties": {"default": {"enum": ["<tool_call>"]}}}, True),
        ({"const": {"default": "<tool_call>"}}, True),
    ],
)
def test_a_value_with_a_mark_of_the_tag_is_refused(schema, is_refused):
    """A parser of calls would end the call there, and return it cut."""
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"begin": "<tool_call>\n", "content": content, "end": "</tool_call>"}
    with pytest.raises(Unsupported, match="has a mark") if is_refused else contextlib.nullcontext():
        lower_text("structural_tag", json.dumps(tag))


def test_tokens_that_the_model_lacks_are_in_no_text(children):
    """A tokenizer may have more tokens than the model."""
    made = grammars(children, names={len(WORDS) + 3: "<pad>"})
    assert same(made_by(made, PERSON, [len(WORDS)]), made_by(grammars(children), PERSON))


def test_a_table_is_made_once(children):
    counted = Counted(children)
    made = grammars(counted)
    found = made.begin(PERSON, [9]).result()
    assert made.begin(PERSON, [9]).result() is found
    assert counted.num_asked == 1
    # Anything of the request that the table depends on makes it another one.
    made.begin(Spec("json", PERSON.text, any_whitespace=True), [9]).result()
    made.begin(PERSON, [10]).result()
    assert counted.num_asked == 3


def test_what_is_in_memory_does_not_wait_for_the_vocabulary():
    """Who asks for it serves all streams; a large vocabulary is read for seconds."""
    reading, may_go = threading.Event(), threading.Event()

    def read_tokens():
        reading.set()
        assert may_go.wait(HANG_S)
        raise ValueError("enough")

    def ask():
        with pytest.raises(ValueError, match="enough"):
            made.begin(PERSON, []).result()

    made = Grammars(read_tokens)
    thread = threading.Thread(target=ask)
    thread.start()
    assert reading.wait(HANG_S)
    asked = threading.Thread(target=lambda: made.begin(PERSON, []))
    asked.start()
    asked.join(HANG_S)
    is_free = not asked.is_alive()
    may_go.set()
    thread.join()
    assert is_free


def test_what_was_asked_for_longest_ago_is_forgotten(children, monkeypatch):
    specs = [Spec("regex", f"a{{{number}}}") for number in range(3)]
    one = len(grammars(children).begin(specs[0], []).result()) + compiling.KEY_BYTES
    monkeypatch.setattr(compiling, "MOST_BYTES", int(2.5 * one))
    counted = Counted(children)
    made = grammars(counted)
    for spec in (*specs[:2], specs[0], specs[2], specs[0]):
        made.begin(spec, []).result()
    assert counted.num_asked == 3
    made.begin(specs[1], []).result()
    assert counted.num_asked == 4
    monkeypatch.setattr(compiling, "MOST_BYTES", 1)
    assert grammars(children).begin(specs[0], []).result()


def test_threads_get_their_own_tables(children):
    made, found = grammars(children), {}

    def build_one(length: int) -> None:
        found[length] = made_by(made, Spec("regex", f"a{{{length}}}"))

    threads = [threading.Thread(target=build_one, args=(length,)) for length in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {length: len(each.accepts) for length, each in found.items()} == {
        length: length + 1 for length in range(1, 9)
    }


MARKED = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "json_schema", "json_schema": {"enum": ["<a>"]}},
        "end": "</a>",
    },
}


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Spec("json", " " * (compiling.MOST_TEXT + 1)), "131,073 bytes; allowed: 131,072"),
        (Spec("regex", "é" * compiling.MOST_TEXT), "262,144 bytes"),
        (Spec("regex", "\ud800"), "surrogate"),
        (Spec("grammar", 'root ::= root "a" | "b"'), "left-recursive"),
        (Spec("grammar", 'root ::= x "a" | "b"\nx ::= root "c" | "d"'), "left-recursive"),
        (Spec("grammar", "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000), "xgrammar does not"),
        (Spec("regex", "a{1000000}"), f"limit of states, {MOST_STATES}"),
        (Spec("regex", "(a|b)*a(a|b){20}"), f"limit of states, {MOST_STATES}"),
        (
            Spec("json", json.dumps({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"})),
            "leads back to itself",
        ),
        (Spec("json", json.dumps({"enum": SCATTERED})), f"limit of states, {MOST_STATES}"),
        (Spec("json", '{"const": %s}' % ("[" * 300 + "]" * 300)), "nested too deeply"),
        (Spec("structural_tag", json.dumps(MARKED)), "has a mark of calls"),
        (Spec("structural_tag", "{"), "no valid JSON"),
        (Spec("structural_tag", "3"), "xgrammar does not"),
        *(
            (
                Spec("structural_tag", json.dumps({"structures": tags, "triggers": triggers})),
                "no 'tri",
            )
            for tags, triggers in [(3, []), ([{"begin": "a"}], ["a"]), ([], 3), (["a"], ["a"])]
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else value.kind,
)
def test_limits_are_answers(spec, words, children):
    counted = Counted(children)
    made = grammars(counted)
    for _ in range(3):
        with pytest.raises(Unsupported, match=words) as refusal:
            made.begin(spec, []).result()
        assert not isinstance(refusal.value, TooSlow)
    assert counted.num_asked <= 1  # the refusal is remembered


def test_a_grammar_that_takes_too_long_is_ended_and_the_next_one_is_served():
    children = Children(VOCABULARY, seconds=0.5, patience=HANG_S)
    counted = Counted(children)
    made = grammars(counted)
    with pytest.raises(TooSlow, match=r"more than 0\.5 s"):  # unended it takes hours
        made.begin(SLOW, []).result()
    with pytest.raises(TooSlow):  # not remembered: the machine may be less busy then
        made.begin(SLOW, []).result()
    assert counted.num_asked == 2
    assert len(made_by(made, Spec("regex", "a|b")).accepts) == 2
    children.close()


def test_a_machine_that_is_busy_is_named():
    children = Children(VOCABULARY, seconds=0.5, patience=1)
    with pytest.raises(TooSlow, match="the machine is busy"):
        grammars(children).begin(SLOW, []).result()
    children.close()


@pytest.mark.parametrize(
    ("patience", "work", "ended_by"),
    [(10**6, "while True: pass", signal.SIGPROF), (1, "time.sleep(10**6)", signal.SIGALRM)],
    ids=["of a processor", "by the clock"],
)
def test_the_time_of_a_grammar_is_that_of_a_processor(patience, work, ended_by):
    """Or a machine that does much else would refuse what it serves at other times."""
    limited = f"from dllm.grammar.children import end_after; end_after(0.1, {patience})"
    run_python("-c", f"import time; {limited}\n{work}", status=-ended_by)


def test_a_grammar_that_takes_too_much_memory_is_ended():
    children = Children(VOCABULARY, seconds=60, most_memory=16 << 20)
    with pytest.raises(Unsupported, match="more than 16 MiB"):
        grammars(children).begin(Spec("json", json.dumps({"enum": SCATTERED})), []).result()
    children.close()


def test_a_process_that_dies_is_replaced(children, monkeypatch):
    """Its death says nothing about the grammar that comes next; it is logged."""
    said = []
    monkeypatch.setattr(children_of.logger, "warning", lambda *line: said.append(line))
    made = grammars(children)
    made.begin(Spec("regex", "a"), []).result()
    children.forking.send_signal(signal.SIGKILL)
    children.forking.wait()
    assert len(made_by(made, Spec("regex", "ab")).accepts) == 3
    assert [code for _, code in said] == [-signal.SIGKILL]


BUSY = """
import sys, threading
from dllm.grammar.children import Children
from dllm.grammar.compile import Grammars, Spec, Tokens
from dllm.grammar.vocabulary import Vocabulary
children = Children(Vocabulary([b"a"]), seconds=600)
made = Grammars(lambda: Tokens([b"a"], {}), children)
made.begin(Spec("regex", "a"), []).result()
made.begin(Spec("regex", sys.argv[1]), [])
print(children.forking.pid, flush=True)
"""


@pytest.mark.parametrize("ended", ["asking", "child"])
def test_a_busy_child_ends_with_the_process_that_asked_and_alone(ended):
    with start_python("-c", BUSY, SLOW.text) as asking:
        forking = psutil.Process(int(asking.stdout.readline()))
        handles = [os.pidfd_open(forking.pid)]
        child = busy_child(forking)
        handles.append(os.pidfd_open(child.pid))
        (asking if ended == "asking" else child).kill()
        poll = select.poll()
        for handle in handles[ended == "child" :]:
            poll.register(handle, select.POLLIN)
            assert poll.poll(1000 * HANG_S)
            poll.unregister(handle)
        if ended == "child":
            assert busy_child(forking).pid != child.pid  # it is asked once more
            asking.kill()
    for handle in handles:
        os.close(handle)


def busy_child(forking: psutil.Process) -> psutil.Process:
    """A child that has used some CPU time with its grammar."""
    while True:
        for child in forking.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if sum(child.cpu_times()[:2]) > 0.3:
                    return child
        time.sleep(0.05)


def test_a_grammar_that_kills_two_children_is_an_error_and_not_remembered(monkeypatch, children):
    made, asked = grammars(children), []
    with monkeypatch.context() as patched:
        patched.setattr(Children, "_ask", lambda self, request: asked.append(request) or b"")
        with pytest.raises(ChildProcessError, match="failed twice"):
            made.begin(Spec("regex", "abb"), []).result()
    assert len(asked) == 2
    assert len(made_by(made, Spec("regex", "abb")).accepts) == 4

"""Tables from memory, from files and from children, and what is refused in what time."""

import json
import os
import resource
import select
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from dllm.grammar import compile as compiling
from dllm.grammar.automaton import Unsupported
from dllm.grammar.cache import Files, Recent
from dllm.grammar.children import Children, TooSlow
from dllm.grammar.compile import Compiler, Spec
from dllm.grammar.table import Table
from tests.support.grammars import GRAMMARS, VOCABULARY, WORDS, table
from tests.support.process import start_python

PERSON = Spec("json", GRAMMARS["person"][1], any_whitespace=False)
SCATTERED = [f"{number * 2654435761 % 2**32:08x}" for number in range(2000)]
SLOW = Spec("regex", "(((a{1,30}){1,30}){1,30}){1,30}")


@pytest.fixture(scope="module")
def children():
    made = Children(seconds=20)
    yield made
    made.close()


class Counted:
    """Children that are only counted."""

    def __init__(self, children):
        self.children = children
        self.num_asked = 0

    def explore(self, request):
        self.num_asked += 1
        return self.children.explore(request)


def same(one: Table, other: Table) -> bool:
    names = ("class_of", "next", "accepts", "left")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_child_builds_what_this_process_builds(name, children):
    kind, text = GRAMMARS[name]
    spec = Spec("grammar" if kind == "ebnf" else kind, text, any_whitespace=False)
    found = Compiler(VOCABULARY, children=children, most_states=300).table(spec)
    assert same(found, table(kind, text, most_states=300)[0])


def test_other_kinds(children):
    compiler = Compiler(VOCABULARY, children=children)
    lark = compiler.table(Spec("lark", 'start: "a" | "b"'))
    assert lark.accepts[lark.read(0, [0])]
    schema = json.dumps({"type": "integer", "minimum": 1, "maximum": 2})
    tag = {"begin": "<a>", "schema": json.loads(schema), "end": "</a>"}
    tagged = compiler.table(
        Spec("structural_tag", json.dumps({"structures": [tag], "triggers": ["<a>"]}))
    )
    new = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
    newer = compiler.table(
        Spec("structural_tag", json.dumps({"type": "structural_tag", "format": new}))
    )
    for found, inside in ((tagged, "1"), (newer, "any\n")):
        tokens = [WORDS.index(bytes([byte])) for byte in f"<a>{inside}</a>".encode()]
        assert found.accepts[found.read(0, tokens)]
    spaced = compiler.table(Spec("json", schema, separators=(",", ":")))
    assert spaced.accepts[spaced.read(0, [WORDS.index(b"1")])]


def test_memory_then_files_then_children(children, tmp_path):
    counted = Counted(children)
    first = Compiler(VOCABULARY, tmp_path, counted)
    found = first.table(PERSON)
    assert first.table(PERSON) is found and counted.num_asked == 1
    again = Compiler(VOCABULARY, tmp_path, counted)
    assert same(again.table(PERSON), found) and counted.num_asked == 1
    # Anything that the table depends on makes it another one.
    Compiler(VOCABULARY, tmp_path, counted, most_states=2000).table(PERSON)
    again.table(Spec("json", PERSON.text, any_whitespace=True))
    assert counted.num_asked == 3 and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "directory"])
def test_a_damaged_file_is_built_again(damage, children, tmp_path):
    found = Compiler(VOCABULARY, tmp_path, children).table(PERSON)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    if damage == "directory":
        path.unlink()
        path.mkdir()
    else:
        changed = whole[:50] + bytes([whole[50] ^ 255]) + whole[51:]
        path.write_bytes({"cut": whole[:-9], "changed": changed, "empty": b""}[damage])
    counted = Counted(children)
    assert same(Compiler(VOCABULARY, tmp_path, counted).table(PERSON), found)
    assert counted.num_asked == 1
    if damage != "directory":
        assert path.read_bytes() == whole


@pytest.mark.parametrize("missing", [1, 2000])
def test_on_a_full_disk_there_is_a_table_and_no_file(missing, children, tmp_path):
    """The disk is full when so many bytes of the file are missing."""
    compiler = Compiler(VOCABULARY, tmp_path, children)
    compiler.table(PERSON)
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    path.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - missing, hard))
    try:
        table = Compiler(VOCABULARY, tmp_path, children).table(PERSON)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(table.accepts) > 10 and not list(tmp_path.iterdir())
    counted = Counted(children)
    Compiler(VOCABULARY, tmp_path, counted).table(PERSON)
    assert counted.num_asked == 1 and [one.stat().st_size for one in tmp_path.iterdir()] == [size]


def test_without_a_place_for_files_there_is_no_cache(children, tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "folder"  # cannot be made, not even by root
    assert len(Compiler(VOCABULARY, folder, children).table(PERSON).accepts) > 10


def test_files_used_longest_ago_are_deleted(tmp_path):
    found, _ = table(*GRAMMARS["words"])
    files = Files(tmp_path, most_bytes=3 * len(found.to_bytes()))
    for number in range(5):
        files.put(str(number), found)
        os.utime(tmp_path / f"{number}.table", (number, number))
        if number == 2:
            assert files.get("0", len(WORDS)) is not None  # used last
    assert {path.stem for path in tmp_path.iterdir()} == {"0", "3", "4"}
    assert files.get("0", 1) is None  # of another vocabulary


def test_tables_used_longest_ago_are_forgotten():
    found, _ = table(*GRAMMARS["words"])
    recent = Recent(3 * found.num_bytes)
    for key in "abc":
        recent.put(key, found)
    assert recent.get("a") is found
    recent.put("d", found)
    assert recent.get("b") is None and recent.get("a") is found
    assert recent.num_bytes == 3 * found.num_bytes
    small = Recent(found.num_bytes - 1)
    small.put("a", found)
    assert small.get("a") is None


def test_equal_requests_at_one_time_build_once(children):
    entered, may_go = threading.Event(), threading.Event()

    class Held(Counted):
        def explore(self, request):
            entered.set()
            assert may_go.wait(60)
            return super().explore(request)

    held = Held(children)
    compiler = Compiler(VOCABULARY, children=held)
    found: list[Table] = []
    threads = [
        threading.Thread(target=lambda: found.append(compiler.table(PERSON))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    may_go.set()
    for thread in threads:
        thread.join()
    assert held.num_asked == 1 and all(each is found[0] for each in found)


def test_threads_get_their_own_tables(children):
    compiler, found = Compiler(VOCABULARY, children=children), {}

    def build_one(length: int) -> None:
        found[length] = compiler.table(Spec("regex", f"a{{{length}}}"))

    threads = [threading.Thread(target=build_one, args=(length,)) for length in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {length: len(each.accepts) for length, each in found.items()} == {
        length: length + 1 for length in range(1, 9)
    }


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Spec("json", " " * (compiling.MOST_TEXT + 1)), "131,073 bytes; allowed: 131,072"),
        (Spec("regex", "é" * compiling.MOST_TEXT), "262,144 bytes"),
        (Spec("grammar", 'root ::= root "a" | "b"'), "left-recursive"),
        (Spec("grammar", 'root ::= x "a" | "b"\nx ::= root "c" | "d"'), "left-recursive"),
        (Spec("grammar", "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000), "xgrammar does not"),
        (Spec("regex", "a{1000000}"), "limit of states, 4096"),
        (Spec("regex", "(a|b)*a(a|b){20}"), "limit of states, 4096"),
        (
            Spec("json", json.dumps({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"})),
            "no finite text",
        ),
        (Spec("json", json.dumps({"enum": SCATTERED})), "limit of states, 4096"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else value.kind,
)
def test_limits_are_answers(spec, words, children):
    counted = Counted(children)
    compiler = Compiler(VOCABULARY, children=counted)
    for _ in range(2):
        with pytest.raises(Unsupported, match=words) as refusal:
            compiler.table(spec)
        assert not isinstance(refusal.value, TooSlow)
    assert counted.num_asked <= 1  # the refusal is remembered


def test_a_grammar_that_takes_too_long_is_ended_and_the_next_one_is_served():
    children = Children(seconds=0.5)
    compiler = Compiler(VOCABULARY, children=children)
    start = time.monotonic()
    with pytest.raises(TooSlow, match=r"more than 0\.5 s"):
        compiler.table(SLOW)
    assert time.monotonic() - start < 60  # unended it takes hours; starting a child is most of it
    with pytest.raises(TooSlow):  # not remembered: another child tried
        compiler.table(SLOW)
    children.close()
    # Children have the lowest priority: on a busy machine the next one may wait for its turn.
    children.seconds = 60
    assert len(compiler.table(Spec("regex", "a|b")).accepts) == 2
    children.close()


def test_a_grammar_that_takes_too_much_memory_is_ended():
    children = Children(seconds=60, most_memory=256 << 20)
    names = [f"f{i}" for i in range(1000)]
    schema = {"type": "object", "properties": {name: {} for name in names}, "required": names}
    with pytest.raises(Unsupported, match="more than 256 MiB"):
        children.explore(
            {
                "kind": "json", "text": json.dumps(schema), "any_whitespace": True,
                "separators": None, "most_states": 4096,
            }
        )  # fmt: skip
    children.close()


def test_a_child_that_dies_is_replaced(children):
    """Its death says nothing about the grammar that comes next."""
    compiler = Compiler(VOCABULARY, children=children)
    compiler.table(Spec("regex", "a"))
    children._idle[-1].send_signal(signal.SIGKILL)
    children._idle[-1].wait()
    assert len(compiler.table(Spec("regex", "ab")).accepts) == 3


BUSY = """
import sys, threading
from dllm.grammar.children import Children
children = Children(seconds=60)
children.start()
child = children._idle[0]
request = dict(kind="regex", text=sys.argv[1], any_whitespace=True, separators=None)
request |= dict(most_states=10**6)
threading.Thread(target=children.explore, args=[request]).start()
print(child.pid, flush=True)
"""


def test_a_busy_child_ends_with_the_process_that_asked():
    with start_python("-c", BUSY, SLOW.text) as asking:
        child = int(asking.stdout.readline())
        handle = os.pidfd_open(child)
        wait_until_busy(child)
        asking.kill()
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(30_000)
    os.close(handle)


def wait_until_busy(pid):
    """Until a child that is ready for requests has used another second of CPU time."""
    process = psutil.Process(pid)
    while process.nice() != 19:
        time.sleep(0.05)
    begun = sum(process.cpu_times()[:2])
    while sum(process.cpu_times()[:2]) < begun + 1:
        time.sleep(0.05)


def test_a_grammar_that_kills_two_children_is_an_error_and_not_remembered(monkeypatch, children):
    def killed(*args):
        raise ChildProcessError("the grammar's compiler ended with status -11")

    compiler = Compiler(VOCABULARY, children=children)
    with monkeypatch.context() as patched:
        patched.setattr(Children, "_ask", killed)
        with pytest.raises(ChildProcessError, match="-11"):
            compiler.table(Spec("regex", "abb"))
    assert len(compiler.table(Spec("regex", "abb")).accepts) == 4


def test_too_many_edges_are_refused(monkeypatch):
    monkeypatch.setattr("dllm.grammar.table.MOST_EDGES", 10)
    with pytest.raises(Unsupported, match="allowed: 10"):
        table(*GRAMMARS["person"])

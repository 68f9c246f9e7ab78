"""Real sockets: a worker in a thread that is stopped and started; hostile peers."""

import contextlib
import socket
import stat
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dllm.remote import stream
from dllm.remote.address import Address, check_private
from dllm.remote.link import Link
from dllm.remote.stream import CHUNK_BYTES, MAX_CONNECTIONS, Server
from dllm.remote.wire import (
    GREETING,
    MAX_BATCH_BYTES,
    MAX_DRAFT_TOKENS,
    MAX_ROWS,
    Delta,
    Draft,
    DraftBatch,
    Reply,
    frame,
    reply_bytes,
)
from dllm.remote.worker import MAX_SESSIONS, DraftWorker
from tests.support.draft_links import ANSWER, PROMPT, ask, count, linked, serving, until
from tests.support.oracle import Oracle
from tests.support.patience import HANG_S


@pytest.fixture
def place(tmp_path) -> Address:
    return Address(str(tmp_path / "worker.sock"))


def test_a_worker_that_goes_and_comes_back(place):
    with linked(place) as link:
        assert not link.receive() and not link.is_up
        assert not link.ask(DraftBatch(1, 0, []))  # nothing is kept for who is not there
        for _ in range(2):
            with serving(place):
                assert ask(link) == ANSWER
            until(link, lambda: bool(link.receive() or not link.is_up))
        assert link.num_ups == 2 and not count(link, "refused")


def test_a_socket_that_nobody_listens_at_is_removed_and_one_in_use_is_not(place):
    with serving(place), pytest.raises(ValueError, match="in use"):
        Server(place)
    assert not Path(place.path).exists()
    with socket.socket(socket.AF_UNIX) as left:  # as of a process that was killed
        left.bind(place.path)
    with serving(place), linked(place) as link:
        assert ask(link) == ANSWER
    Path(place.path).write_text("")
    with pytest.raises(ValueError, match="no socket"):
        Server(place)


def test_a_socket_is_in_a_folder_that_nobody_else_enters(tmp_path):
    new = Address(str(tmp_path / "new" / "worker.sock"))
    with serving(new), linked(new) as link:
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
        assert ask(link) == ANSWER
        (tmp_path / "new").chmod(0o750)
        with pytest.raises(ValueError, match="chmod 700"):
            check_private(new.path)
        with linked(new) as other:
            for _ in range(3):
                other.receive()
            assert other.connection is None
    with pytest.raises(ValueError, match="chmod 700"):
        Server(new)


# --- hostile targets ------------------------------------------------------------------------------


class Hostile:
    """A connection that sends bytes as fast as they are taken."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.rest, self.is_closed = connection, b"", False
        connection.setblocking(False)

    @classmethod
    def to(cls, address: Address) -> "Hostile":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.path)
        return cls(connection)

    def send(self, data: bytes) -> None:
        """Go on with what was not taken before, and then with ``data``."""
        self.rest = self.rest or data
        try:
            while self.rest and not self.is_closed:
                self.rest = self.rest[self.socket.send(self.rest) :]
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True


def framed(message: object) -> bytes:
    data = msgspec.msgpack.encode(message)
    return struct.pack(">I", len(data)) + data


GOOD = frame(DraftBatch(1, 0, [Delta(2**40, 0, [5], 1)]))
WRONG = [
    b"GET / HTTP/1.1\r\n\r\n" * 4,
    struct.pack(">I", 0),
    struct.pack(">I", 60) + b"x" * 60,
    frame(Reply(1, [])),
    framed(["dllm-ask-2", 1, 0, [], []]),
    framed(["dllm-ask-3", 1, 0, [[1, 0, [2**31], 1]], []]),
    framed(["dllm-ask-3", 1, 0, [[1, 0, [-1], 1]], []]),
    framed(["dllm-ask-3", 1, 0, [[1, 0, ["5"], 1]], []]),
    framed(["dllm-ask-3", 1, 0, [[1, 0, [5], 129]], []]),
    framed(["dllm-ask-3", 1, 0, [[1, 2**31, [5], 1]], []]),
    framed(["dllm-ask-3", 1, 0, [[1, 0, [5], 1, 0]], []]),
    framed(["dllm-ask-3", 1, 0, [[1, 0, [], 0]] * (MAX_ROWS + 1), []]),
    framed(["dllm-ask-3", 1, 2**32, [], []]),
    framed({"type": "dllm-ask-3", "step": 1}),
]


@pytest.mark.parametrize("data", WRONG, ids=range(len(WRONG)))
def test_who_sends_what_is_no_ask_is_not_listened_to(place, data):
    with serving(place) as server, linked(place) as link:
        assert ask(link) == ANSWER
        hostile = Hostile.to(place)
        hostile.send(GOOD + data + GOOD)
        hostile.socket.settimeout(HANG_S)
        with contextlib.suppress(ConnectionResetError):
            while hostile.socket.recv(1 << 16):
                pass  # until it is closed
        assert server.num_refused <= 1
        assert ask(link, 2) == ANSWER
        assert link.num_ups == 1
        hostile.socket.close()


ENDLESS = struct.pack(">I", 2**32 - 1) + b"x" * (1 << 20)
LONGEST = struct.pack(">I", MAX_BATCH_BYTES)
FULL = frame(DraftBatch(1, 0, [Delta(number, 0, [], 1) for number in range(MAX_ROWS)]))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"", ENDLESS),
        (LONGEST, b"x" * (1 << 20)),
        (LONGEST + b"x" * (MAX_BATCH_BYTES - 1), b""),
        (b"", GOOD * 1000),
        (b"", FULL * 4),
    ],
    ids=["endless frame", "garbage", "unfinished frame", "flood", "flood of sessions"],
)
def test_what_a_hostile_target_takes_of_memory_is_bounded(place, first, then):
    """It sends whenever there is room, and reads nothing; another target is served meanwhile."""
    server, worker = Server(place), DraftWorker(Oracle(max_len=64))
    many = [Hostile.to(place) for _ in range(2)]
    with linked(place) as link:
        tracemalloc.start()
        try:
            for hostile in many:
                hostile.send(first)
            for step in range(1, 11):
                for hostile in many:
                    hostile.send(then)
                answered = count(link, "replies")
                asked = 0
                end = time.monotonic() + HANG_S
                while count(link, "replies") == answered:
                    worker.turn(server)
                    rows = [row for reply in link.receive() for row in reply.rows]
                    if link.is_up and asked != link.num_ups:
                        asked = link.num_ups
                        assert link.ask(DraftBatch(step, 10**6, [Delta(1, 0, PROMPT, 2)]))
                    assert time.monotonic() < end
                assert rows == ANSWER
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # A frame, what is read at once, two replies; and what the worker keeps of its sessions.
    each = MAX_BATCH_BYTES + CHUNK_BYTES + 2 * reply_bytes(MAX_ROWS)
    assert peak < len(many) * each + 2000 * MAX_SESSIONS
    assert worker.num_sessions <= MAX_SESSIONS
    assert link.num_ups == 1
    for stream_ in server._streams.values():
        assert len(stream_._in) <= 4 + MAX_BATCH_BYTES + CHUNK_BYTES
    for hostile in many:
        hostile.socket.close()
    server.close()


def test_many_connections_do_not_push_out_who_asks(place):
    with serving(place) as server, linked(place) as link:
        assert ask(link) == ANSWER
        many = []
        for number in range(3 * MAX_CONNECTIONS):
            many.append(Hostile.to(place))
            many[-1].send(GOOD[: number % len(GOOD)])
        for step in range(2, 6):
            assert ask(link, step) == ANSWER
        assert len(server._streams) <= MAX_CONNECTIONS
        assert link.num_ups == 1
        for hostile in many:
            hostile.socket.close()


def test_of_those_who_ask_the_one_that_asked_last_longest_ago_makes_room(place, monkeypatch):
    monkeypatch.setattr(stream, "MAX_CONNECTIONS", 2)
    server = Server(place)
    first, second = Hostile.to(place), Hostile.to(place)

    def ask_as(hostile: Hostile) -> int:
        """The number of its connection."""
        hostile.send(GOOD)
        while True:
            for number, message in list(server.receive(HANG_S)):
                assert message is not None
                return number

    numbers = [ask_as(each) for each in (first, second, first)]
    assert numbers[0] == numbers[2] != numbers[1]
    late = Hostile.to(place)
    assert list(server.receive(HANG_S)) == [(numbers[1], None)]
    assert ask_as(first) == numbers[0]
    for hostile in (first, second, late):
        hostile.socket.close()
    server.close()


def test_a_target_that_leaves_before_its_reply_ends_nobody_else(place):
    server = Server(place)
    leaving = Hostile.to(place)
    leaving.send(GOOD)
    asked: list[int] = []
    while not asked:
        asked += [number for number, message in server.receive(HANG_S) if message is not None]
    leaving.socket.close()
    server.reply(asked[0], Reply(1, []))  # a broken pipe
    assert list(server.receive(HANG_S)) == [(asked[0], None)]
    with linked(place) as link:
        until(link, lambda: bool(list(server.receive(0)) or link.receive() or link.is_up))
    server.close()


def test_sessions_end_with_their_connection(place):
    server, worker = Server(place), DraftWorker(Oracle())
    with linked(place) as link:
        end = time.monotonic() + HANG_S
        while not worker.num_sessions:
            link.receive()
            if link.is_up and not count(link, "asks"):
                assert link.ask(DraftBatch(1, 10**6, [Delta(1, 0, PROMPT, 100)]))
            worker.turn(server)
            assert time.monotonic() < end
    while worker.num_sessions:
        worker.turn(server)
        assert time.monotonic() < end
    assert not worker.is_busy and not worker._drafts.runs
    server.close()


def test_two_large_messages_do_not_wait_for_each_other():
    """Neither end can write before the other one reads."""
    ends = [stream.Stream(each, 1 << 22, None) for each in socket.socketpair()]
    data = struct.pack(">I", 1 << 22) + bytes(1 << 22)
    assert all(end.send(data) for end in ends)
    found: list[list[bytes]] = [[], []]
    for _ in range(1000):
        for end, messages in zip(ends, found, strict=True):
            messages += end.read()
    assert found == [[data[4:]]] * 2
    for end in ends:
        end.close()


# --- hostile workers ------------------------------------------------------------------------------


@contextlib.contextmanager
def hostile_worker(place: Address, max_rows: int = 2) -> Iterator[tuple[Link, Hostile]]:
    """A link to a worker that sends whatever it is told to."""
    with socket.socket(socket.AF_UNIX) as listening, linked(place, max_rows=max_rows) as link:
        listening.bind(place.path)
        listening.listen()
        link.receive()  # it knocks
        hostile = Hostile(listening.accept()[0])
        hostile.send(frame(GREETING))
        until(link, lambda: bool(link.receive() or link.is_up))
        yield link, hostile
        hostile.socket.close()


def test_a_target_reads_so_much_at_once_however_much_is_there(place):
    full = Reply(0, [Draft(1, 0, [70_000] * MAX_DRAFT_TOKENS)] * 2)
    with hostile_worker(place) as (link, hostile):
        num_read = 0
        for _ in range(50):
            hostile.send(frame(full) * 100)
            found = link.receive()
            assert all(each == full for each in found) and len(found) <= stream.MAX_FRAMES
            assert len(link.connection._in) <= 4 + reply_bytes(2) + CHUNK_BYTES
            num_read += len(found)
        assert num_read > 100 and link.is_up


@pytest.mark.parametrize(
    "data",
    [
        frame(DraftBatch(1, 0, [])),
        framed(["dllm-reply-3", 1, [[1, 0, [5] * (MAX_DRAFT_TOKENS + 1), False]]]),
        struct.pack(">I", reply_bytes(2) + 1) + b"x" * 100_000,
        struct.pack(">I", 9) + b"x" * 9,
    ],
    ids=["a batch", "too many tokens", "too long", "garbage"],
)
def test_what_is_no_reply_ends_the_connection(place, data):
    with hostile_worker(place) as (link, hostile):
        hostile.send(data)
        until(link, lambda: bool(link.receive() or not link.is_up))

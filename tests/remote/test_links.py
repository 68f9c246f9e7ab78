"""Real sockets: a worker in a thread, killed and restarted; keys; and who is refused."""

import contextlib
import stat
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from dllm.remote.keys import TARGET, WORKER, check_address, is_loopback, main, read_keys
from dllm.remote.link import MAX_BYTES, MAX_WAITING, Link, Server, check_bind, wait
from dllm.remote.wire import (
    ASK,
    HEADER,
    MAGIC,
    MAX_GUESS,
    MAX_MESSAGE_BYTES,
    MAX_ROWS,
    REPLY,
    ROW,
    VERSION,
    Message,
    Row,
    encode,
)
from dllm.remote.worker import DraftWorker
from dllm.settings.command import CommandError
from tests.support.oracle import Oracle, plain

PROMPT = [1, 2, 3]
ANSWER = [Row(1, 3, plain(PROMPT, 2)[3:], 0)]
LONG_S = 20.0  # a test that waits so long has failed


def until(links: list[Link], holds: Callable[[], bool], seconds: float = LONG_S) -> bool:
    """Wait for something that news of these links bring."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        wait(links, 0.1)
    return True


def bound(address: str, keys) -> Server:
    """A server; at an address that another one has just left it may take a moment."""
    end = time.monotonic() + LONG_S
    while True:
        try:
            return Server(address, keys)
        except zmq.ZMQError:
            assert time.monotonic() < end
            time.sleep(0.01)


@contextlib.contextmanager
def serving(address: str = "tcp://127.0.0.1:*", keys=None) -> Iterator[Server]:
    """A draft worker with an oracle, in a thread."""
    server, is_over = bound(address, keys), threading.Event()
    worker = DraftWorker(Oracle())
    thread = threading.Thread(target=worker.serve, args=(server, lambda: not is_over.is_set()))
    thread.start()
    try:
        yield server
    finally:
        is_over.set()
        thread.join()
        server.close()


@contextlib.contextmanager
def linked(address: str, keys=None) -> Iterator[Link]:
    link = Link(address, keys)
    try:
        yield link
    finally:
        link.close()


def ask(link: Link, step: int = 1) -> list[Row] | None:
    """The rows of the reply to an ask."""
    found: list[Message] = []

    def has_answer() -> bool:
        found.extend(link.receive())
        return bool(found)

    assert until([link], lambda: bool(link.receive() or link.is_up))
    assert link.send(Message(ASK, 5, step, 10**6, [Row(1, 0, PROMPT, 2)]))
    return found[0].rows if until([link], has_answer) else None


def test_a_worker_that_goes_and_comes_back():
    with serving() as server, linked(server.address) as link:
        assert ask(link) == ANSWER
        address = server.address
    with linked(address) as link:
        assert not link.send(Message(ASK, 5, 1, 0, []))  # nothing is kept for who is not there
        with serving(address):
            assert ask(link) == ANSWER
        assert until([link], lambda: bool(link.receive() or not link.is_up))
        with serving(address):
            started = time.monotonic()
            assert until([link], lambda: bool(link.receive() or link.is_up))
            came_back_s = time.monotonic() - started
            assert ask(link) == ANSWER
    # 50 to 300 ms between attempts; the rest is this machine's.
    assert came_back_s < 1.0


def test_what_is_no_message_is_counted_and_dropped():
    with serving() as server, linked(server.address) as link:
        assert ask(link) == ANSWER
        with zmq.Context.instance().socket(zmq.DEALER) as hostile:
            hostile.set(zmq.LINGER, 0)
            hostile.connect(server.address)
            good = encode(Message(ASK, 5, 1, 0, []))
            for frames in ([b""], [b"x" * 60], [good, good], [good[:-1]], [b"\x80\x04N."]):
                hostile.send_multipart(frames)
            hostile.send(good)
            assert hostile.poll(1e3 * LONG_S)  # the last one is answered: all were read
        assert server.num_refused == 5
        assert ask(link, 2) == ANSWER


def test_an_ask_is_no_reply():
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        router.set(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with linked(f"tcp://127.0.0.1:{port}") as link:
            assert until([link], lambda: bool(link.receive() or link.is_up))
            assert link.send(Message(ASK, 5, 1, 0, []))
            peer, data = router.recv_multipart()
            for frames in ([data], [b"junk"], [data, data]):
                router.send_multipart([peer, *frames])
            assert until([link], lambda: link.receive() == [] and link.num_refused == 3)


@contextlib.contextmanager
def hostile_worker(max_rows: int) -> Iterator[tuple[Link, Callable[..., None]]]:
    """A link to a worker that sends whatever it is told to."""
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        router.set(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        link = Link(f"tcp://127.0.0.1:{port}", max_rows=max_rows)
        try:
            assert until([link], lambda: bool(link.receive() or link.is_up))
            assert link.send(Message(ASK, 5, 1, 0, []))
            peer, _ = router.recv_multipart()
            yield link, lambda *frames: router.send_multipart([peer, *frames])
        finally:
            link.close()


def test_a_target_reads_so_much_at_once_however_much_is_there():
    with hostile_worker(2) as (link, send):
        full = Message(REPLY, 5, 1, 0, [Row(1, 0, [5] * MAX_GUESS, 0)] * 2)
        for _ in range(3):
            send(encode(full))
        assert all(until([link], lambda: link.receive() == [full]) for _ in range(3))
        for _ in range(3 * MAX_WAITING):
            send(encode(Message(REPLY, 5, 1, 0, [])))
        sizes: list[int] = []
        assert until([link], lambda: sizes.append(len(link.receive())) or sum(sizes) == 48)
        assert max(sizes) <= MAX_WAITING
        # A message of many frames is one that is refused, and what comes next is read.
        send(*[b"x"] * (3 * MAX_WAITING))
        send(encode(full))
        assert until([link], lambda: link.receive() == [full])
        assert link.num_refused == 1


def test_a_reply_beyond_what_can_be_needed_ends_the_connection():
    with hostile_worker(2) as (link, send):
        send(encode(Message(REPLY, 5, 1, 0, [Row(1, 0, [], 0)] * 3)))
        assert until([link], lambda: link.receive() == [] and link.num_refused == 1)
        send(b"x" * 100_000)
        assert until([link], lambda: link.receive() == [] and not link.is_up)


def test_a_worker_reads_so_much_at_once_however_much_is_there():
    server = Server("tcp://127.0.0.1:*")
    ask = HEADER.pack(MAGIC, VERSION, ASK, 1, 1, 0, MAX_ROWS) + MAX_ROWS * ROW.pack(1, 0, 0, 1)
    with linked(server.address) as link:
        assert until([link], lambda: bool(link.receive() or link.is_up))
        for _ in range(MAX_WAITING):
            link._socket.send(ask)
        counts: list[int] = []
        end = time.monotonic() + LONG_S
        while sum(counts) < MAX_WAITING and time.monotonic() < end:
            counts.append(len(server.receive(1.0)))
        assert sum(counts) == MAX_WAITING and max(counts) <= 1 + MAX_BYTES // len(ask)
        link._socket.send(b"x" * (MAX_MESSAGE_BYTES + 4096))
        assert until([link], lambda: bool(link.receive() or not link.is_up))
    server.close()


# --- keys -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "keys"
    assert main([str(path)]) == 0
    return path


def test_with_keys_only_those_on_the_list_are_let_in(folder, tmp_path):
    other = tmp_path / "other"
    main([str(other)])
    stranger = read_keys(str(other), TARGET)._replace(worker=read_keys(str(folder), TARGET).worker)
    with serving(keys=read_keys(str(folder), WORKER)) as server:
        with linked(server.address, read_keys(str(folder), TARGET)) as link:
            assert ask(link) == ANSWER
        # Not on the list; without keys; with the key of another worker: nobody gets in while a
        # target that may is served.
        for keys in (stranger, None, read_keys(str(other), TARGET)):
            with (
                linked(server.address, keys) as outside,
                linked(server.address, read_keys(str(folder), TARGET)) as inside,
            ):
                assert ask(inside) == ANSWER
                outside.receive()
                assert not outside.is_up
                assert not outside.send(Message(ASK, 5, 1, 0, []))


def test_secrets_are_for_their_owner(folder):
    for name in ("worker.key_secret", "target.key_secret"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    with pytest.raises(CommandError, match="has keys already"):
        main([str(folder)])
    (folder / "worker.key_secret").chmod(0o644)
    with pytest.raises(ValueError, match="others may read"):
        read_keys(str(folder), WORKER)


@pytest.mark.parametrize("name", ["allowed/target.key", "worker.key", "worker.key_secret"])
def test_a_file_that_holds_no_key_is_refused(folder, name):
    for text in ("junk", 'curve\n public-key = "abc"\n'):
        (folder / name).write_text(text)
        with pytest.raises(ValueError, match=f"keys: .*{name}"):
            read_keys(str(folder), WORKER)


def test_a_folder_that_was_there_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    assert main([str(tmp_path)]) == 0
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "target.key_secret").stat().st_mode) == 0o600
    with pytest.raises(CommandError, match="is no folder"):
        main([str(tmp_path / "target.key")])


def test_an_address_of_ipv6_is_one_to_listen_at():
    with serving("tcp://[::1]:*") as server, linked(server.address) as link:
        assert ask(link) == ANSWER
        with pytest.raises(ValueError, match="in use"):
            check_bind(server.address)
    check_bind("tcp://127.0.0.1:*")


def test_a_worker_without_a_list_is_refused(folder):
    (folder / "allowed" / "target.key").unlink()
    with pytest.raises(ValueError, match="nobody would be let in"):
        read_keys(str(folder), WORKER)
    with pytest.raises(ValueError, match="draft-keys"):
        read_keys(str(folder / "allowed"), TARGET)


@pytest.mark.parametrize(
    ("address", "is_inside"),
    [
        ("tcp://127.0.0.1:5800", True),
        ("tcp://127.8.9.1:*", True),
        ("tcp://localhost:5800", True),
        ("tcp://[::1]:5800", True),
        ("ipc:///tmp/drafts", True),
        ("tcp://0.0.0.0:5800", False),
        ("tcp://10.0.0.3:5800", False),
        ("tcp://*:5800", False),
        ("tcp://drafts.example:5800", False),
        ("tcp://[::]:5800", False),
    ],
)
def test_addresses_outside_need_keys(address, is_inside):
    assert is_loopback(address) == is_inside
    check_address(address, "keys", "--listen", is_own=True)
    if is_inside:
        check_address(address, None, "--listen", is_own=True)
    else:
        with pytest.raises(ValueError, match="outside of this machine"):
            check_address(address, None, "--listen", is_own=True)


@pytest.mark.parametrize(
    "address",
    [
        5,
        "127.0.0.1:5800",
        "http://127.0.0.1:1",
        "tcp://127.0.0.1",
        "tcp://:5",
        "tcp://a:x",
        "tcp://127.0.0.1:*",
        "tcp://*:5800",
        "tcp://127.0.0.1:\u0665\u0668\u0660\u0660",
        "tcp://127.0.0.1#x:5800",
        "tcp://127.0.0.1:0;10.0.0.5:5800",
        "tcp://127.0.0.1:5800\n",
        "tcp://[::1:5800",
        "tcp://[::1::2]:5800",
        "ipc://",
        "ipc://*",
        "ipc://" + 108 * "a",
        "ipc://\ud800",
        "ipc://a\0",
    ],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        check_address(address, "keys", "workers")

"""Real sockets: a draft worker with an oracle in a thread, and links of a target to it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from dllm.engine.metrics import Counts
from dllm.remote import stream
from dllm.remote.address import Address
from dllm.remote.dialing import dialer
from dllm.remote.keys import Keys
from dllm.remote.link import Link
from dllm.remote.stream import Server
from dllm.remote.wire import Delta, Draft, DraftBatch, Reply, reply_bytes
from dllm.remote.worker import DraftWorker
from tests.support.oracle import Oracle, plain
from tests.support.patience import HANG_S

PROMPT = [1, 2, 3]
ANSWER = [Draft(1, 3, plain(PROMPT, 2)[3:])]
TCP = Address(host="127.0.0.1")


def until(link: Link, holds: Callable[[], bool]) -> None:
    """Wait for something that news of this link bring."""
    end = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end, "not in time"
        stream.wait([link.connection] if link.connection else [], 0.01)


@contextlib.contextmanager
def serving(address: Address, keys: Keys | None = None) -> Iterator[Server]:
    """A draft worker with an oracle, in a thread."""
    server, is_over = Server(address, keys), threading.Event()
    worker = DraftWorker(Oracle())
    thread = threading.Thread(target=worker.serve, args=(server, lambda: not is_over.is_set()))
    thread.start()
    try:
        yield server
    finally:
        is_over.set()
        thread.join()
        server.close()


def linked(
    address: Address, keys: Keys | None = None, max_rows: int = 8
) -> contextlib.closing[Link]:
    dial = dialer(address, keys, reply_bytes(max_rows))
    return contextlib.closing(Link(str(address), dial, HANG_S, Counts()))


def count(link: Link, what: str) -> float:
    """``remote_WHAT`` of a link."""
    return link._counts.get((f"remote_{what}", link.address), 0)


def ask(link: Link, step: int = 1) -> list[Draft]:
    """The rows of the reply to a batch; asked again on a connection that broke meanwhile."""
    found: list[Reply] = []
    asked = 0

    def has_answer() -> bool:
        nonlocal asked
        found.extend(link.receive())
        if link.is_up and asked != link.num_ups:
            assert link.ask(DraftBatch(step, 10**6, [Delta(1, 0, PROMPT, 2)]))
            asked = link.num_ups
        return bool(found)

    until(link, has_answer)
    return found[-1].rows

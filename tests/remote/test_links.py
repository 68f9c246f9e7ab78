"""The states of a link to a draft worker: what they follow from, and what is logged of them."""

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import pytest

from dllm import LOGGER
from dllm.engine.metrics import Counts
from dllm.remote import dialing
from dllm.remote.address import Address
from dllm.remote.keys import Keys
from dllm.remote.link import CONNECT_WITHIN_S, RECONNECT_S, Link, State
from dllm.remote.report import EVERY_S
from dllm.remote.wire import Delta, DraftBatch
from tests.remote.test_keys import keys_of, pairs  # noqa: F401  a fixture
from tests.support.clock import Clock
from tests.support.draft_links import ANSWER, TCP, ask, linked, serving, until
from tests.support.oracle import VOCAB
from tests.support.patience import HANG_S
from tests.support.remote_harness import Net, link_to, simulated, worker

DEADLINE_S = 0.05
BATCH = DraftBatch(1, 1000, [Delta(1, 0, [1, 2, 3], 1)])


@pytest.fixture
def said(caplog) -> Iterator[list[str]]:
    """What was logged, line by line."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger(LOGGER), Lines()
    logger.addHandler(handler)
    with caplog.at_level(logging.INFO, logger=LOGGER):
        yield lines
    logger.removeHandler(handler)


def look(link: Link, clock: Clock, seconds: float) -> State:
    """The state after so many seconds."""
    clock.now += seconds
    link.receive()
    return link.state


def test_each_state_that_lasts_is_logged_once(said):
    clock = Clock()
    net = Net(worker(clock), clock)
    net.is_there = False
    link = Link(net.address, net.dial, DEADLINE_S, Counts(), clock)
    for _ in range(100):
        assert look(link, clock, RECONNECT_S) is State.DOWN
    net.is_there = True
    assert look(link, clock, RECONNECT_S) is State.CONNECTING
    for _ in range(100):
        assert look(link, clock, RECONNECT_S) is State.UP
    net.is_hung = True
    assert link.ask(BATCH)
    for _ in range(100):
        assert look(link, clock, 2 * RECONNECT_S) is State.LATE
    net.is_hung = False
    assert look(link, clock, DEADLINE_S) is State.UP
    link.ask(BATCH)
    for _ in range(10):
        assert look(link, clock, EVERY_S / 2) is State.UP
    net.kill()
    for _ in range(100):
        assert look(link, clock, RECONNECT_S) is State.DOWN
    assert len(said) == 5, said
    for line, what in zip(said, ("down", "is asked", "50 ms", "is asked", "down"), strict=True):
        assert what in line and net.address in line
    assert link.num_ups == 1


def test_tokens_that_the_other_side_lacks_are_named_on_both(said):
    """Once each: nothing else shows that two models have not the same tokenizer."""
    target, _ = simulated()
    target.client._vocab_size = 3
    target.add("few", [1, 2], 40)
    target.run()
    assert target.count("refused") > 1 and not target.count("drafts")
    target.clock.now += EVERY_S
    target.links[0].receive()
    target.client._vocab_size = VOCAB
    target.add("many", [VOCAB + 7, 3], 40)
    target.run()
    foreign = [line for line in said if "same tokenizer" in line or "target's tokenizer" in line]
    assert ["answered with" in line for line in foreign] == [True, False], said


def test_a_worker_that_comes_and_goes_cannot_fill_the_log(said):
    clock = Clock()
    net = Net(worker(clock), clock)
    link = link_to(net, DEADLINE_S)
    seconds = 10 * EVERY_S
    for _ in range(int(seconds / RECONNECT_S)):
        net.close()
        look(link, clock, RECONNECT_S)
        look(link, clock, 0.0)
    assert link.num_ups > seconds / RECONNECT_S / 2
    assert 2 <= len(said) <= seconds / EVERY_S + 1


def test_a_worker_that_does_not_greet_is_never_up_and_connected_to_again(said):
    clock = Clock()
    net = Net(worker(clock), clock)
    net.read = list
    link = Link(net.address, net.dial, DEADLINE_S, Counts(), clock)
    while net.peer < 4:
        assert look(link, clock, RECONNECT_S) is State.CONNECTING
        assert not link.ask(BATCH)
    assert clock.now >= 3 * CONNECT_WITHIN_S
    assert len(said) == 1 and "no answer within 3 s" in said[0]


@pytest.fixture
def keys(pairs) -> dict[str, Keys]:  # noqa: F811
    return {name: keys_of(folder) for name, folder in pairs.items()}


def test_a_target_that_a_worker_does_not_trust_is_told_so_on_both_sides(keys, said):
    """Under TLS 1.3 the handshake of the target is over before the worker has looked at it."""
    with (
        serving(TCP, keys["worker"]) as server,
        linked(server.address, keys["stranger"]) as link,
    ):
        until(link, lambda: bool(link.receive() or (link._why and server.num_refused > 2)))
        assert link.num_ups == 0 and link.is_out
    lines = [line for line in said if "does not let this target in" in line]
    assert len(lines) == 1 and "unknown ca" in lines[0]
    refused = [line for line in said if "were refused" in line or "was refused" in line]
    assert len(refused) == 1 and "127.0.0.1" in refused[0]


# --- where a worker is ----------------------------------------------------------------------------


NAME = "drafts.example"


class Names:
    """A name server that knows one host."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.is_there = threading.Event()
        self.is_there.set()
        self.num_asked = 0

    def getaddrinfo(self, host: str, port: int, type: int) -> list[tuple]:
        addresses: tuple[str, ...] = (host,)
        if host == NAME:
            self.num_asked += 1
            self.is_there.wait(HANG_S)
            addresses = self.addresses
        return [(socket.AF_INET, type, 6, "", (each, port)) for each in addresses]


@pytest.fixture
def names(monkeypatch) -> Iterator[Names]:
    found = Names("127.0.0.1")
    monkeypatch.setattr(dialing, "LOOK_UP_S", 0.0)
    monkeypatch.setattr("dllm.remote.address.socket.getaddrinfo", found.getaddrinfo)
    yield found
    found.is_there.set()


def linked_by_name(port: int, keys: Keys) -> contextlib.AbstractContextManager[Link]:
    return linked(Address(host=NAME, port=port), keys)


def test_a_worker_that_moves_is_found_where_its_name_leads_to(keys, names):
    with contextlib.ExitStack() as stack:
        with serving(TCP, keys["worker"]) as server:
            port = server.address.port
            link = stack.enter_context(linked_by_name(port, keys["one"]))
            assert ask(link) == ANSWER
        names.addresses = ("127.0.0.2",)
        with serving(Address(host="127.0.0.2", port=port), keys["worker"]):
            assert ask(link, 2) == ANSWER


def test_every_address_of_a_name_is_tried(keys, names):
    with serving(TCP, keys["worker"]) as server:
        names.addresses = ("127.0.0.2", "127.0.0.3", "127.0.0.1")
        with linked_by_name(server.address.port, keys["one"]) as link:
            assert ask(link) == ANSWER


def test_a_name_server_that_hangs_stops_nobody(keys, names):
    with (
        serving(TCP, keys["worker"]) as server,
        linked_by_name(server.address.port, keys["one"]) as link,
    ):
        names.is_there.clear()
        assert ask(link) == ANSWER  # where it was before
        assert names.num_asked == 2  # the second is not answered

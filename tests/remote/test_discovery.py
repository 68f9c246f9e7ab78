"""Workers that come and go: the target's list, the process that prints it, and NVIDIA Dynamo."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from dllm.drafter.metrics import send_drafting, show_workers
from dllm.engine.metrics import LABELS, Counts, record
from dllm.remote import discovery, dynamo_process
from dllm.remote.address import Address
from dllm.remote.discovery import Child, Following, find_python, list_with_dynamo, watch_dynamo
from dllm.remote.link import Link
from dllm.settings import files
from tests.support.dynamo import needs_dynamo, wait_for
from tests.support.oracle import VOCAB, plain
from tests.support.remote_harness import Clock, Net, Target, link_to, worker

FIRST, SECOND = "unix:///drafts/1", "unix:///drafts/2"


# --- a target and the list ------------------------------------------------------------------------


class Simulated:
    """A target that follows a list of simulated workers."""

    def __init__(self, *listed: str) -> None:
        self.clock = Clock()
        self.target = Target([], self.clock)
        self.child = SimpleNamespace(addresses=None)
        self.nets: dict[str, Net] = {}
        self.following = Following(self.child, self.connect, None)
        self.list(*listed)

    def connect(self, address: Address) -> Link:
        net = self.nets[str(address)] = Net(worker(self.clock), self.clock, address=str(address))
        return link_to(net, 0.05)

    def list(self, *addresses: str) -> None:
        self.child.addresses = list(addresses)
        self.following.update(self.target.client)
        self.target.nets = [net for net in self.nets.values() if net.is_open]

    @property
    def homes(self) -> set[str]:
        """Where the sessions are."""
        return {each.link.address for each in self.target.client.sessions.values()}

    def begin(self, *names: int) -> None:
        for name in names:
            self.target.add(str(name), [name % VOCAB, 3, 7], 100)

    def finish(self) -> None:
        self.target.run()
        for name, request in self.target.finished.items():
            assert request.tokens == plain([int(name) % VOCAB, 3, 7], 100), name


def test_sessions_of_a_worker_that_leaves_the_list_go_to_others():
    simulated = Simulated(FIRST, SECOND)
    simulated.begin(*range(8))
    simulated.target.step(5)
    assert simulated.homes == {FIRST, SECOND}
    simulated.list(SECOND)
    assert not simulated.nets[FIRST].is_open
    simulated.target.step()
    assert simulated.homes == {SECOND}
    before = len(simulated.target.widths)
    simulated.finish()
    assert min(simulated.target.widths[before + 1 : before + 10]) > 0  # drafts went on


def test_sessions_stay_where_they_are_when_a_worker_comes_and_new_ones_use_it():
    simulated = Simulated(FIRST)
    simulated.begin(*range(4))
    simulated.target.step()
    simulated.list(FIRST, SECOND)
    simulated.target.step()
    assert simulated.homes == {FIRST}
    simulated.begin(*range(4, 8))
    simulated.target.step()
    assert simulated.homes == {FIRST, SECOND}
    simulated.finish()


def test_a_request_that_ended_at_a_worker_that_left_is_told_to_nobody():
    simulated = Simulated(FIRST)
    simulated.begin(0)
    simulated.target.step(3)
    simulated.target.abort("0")
    simulated.target.client.keep([])  # to be told with the next batch
    num_asks = len(simulated.nets[FIRST].sent)
    simulated.list(SECOND)
    simulated.begin(1)
    simulated.finish()
    assert len(simulated.nets[FIRST].sent) == num_asks


def addresses(simulated: Simulated) -> list[str]:
    return [link.address for link in simulated.target.client.links]


def test_an_address_of_another_machine_is_not_used_without_keys():
    assert addresses(Simulated(FIRST, "tcp://192.0.2.1:5800", "nonsense")) == [FIRST]


def test_an_address_that_cannot_be_connected_to_leaves_the_others_alone():
    """One that cannot be parsed, one that a name server would be asked for, and one refused."""
    simulated = Simulated()
    simulated.following._keys = "keys"

    def connect(address: Address) -> Link:
        if str(address) == SECOND:
            raise ValueError("no such host")
        return simulated.connect(address)

    simulated.following._link = connect
    simulated.list("tcp://127.0.0.1:*", "tcp://drafts.example:5800", SECOND, FIRST, FIRST)
    simulated.target.step()
    simulated.following.update(simulated.target.client)
    assert addresses(simulated) == [FIRST]


def test_a_list_that_did_not_change_leaves_connections_alone():
    simulated = Simulated(FIRST, SECOND)
    before = list(simulated.target.client.links)
    simulated.list(FIRST, SECOND)
    assert simulated.target.client.links == before
    assert all(net.is_open for net in simulated.nets.values())


def test_a_worker_that_left_the_list_is_no_longer_shown_and_its_counts_stay():
    labels = ["model", "engine"]
    assert len(labels) == len(LABELS)
    asks = Counts()

    def observe(**new: float) -> list[float | None]:
        """What is shown of the worker "one", when so many asks are new."""
        for name, count in new.items():
            asks.add("remote_asks", count, name)
        stats: Any = SimpleNamespace(ec_connector_stats=None, spec_decoding_stats=None)
        send_drafting(stats, asks.take(), dict.fromkeys(new, True))
        record(stats, labels)
        show_workers(stats, labels)
        value = prometheus_client.REGISTRY.get_sample_value
        named = dict(zip(LABELS, labels, strict=True)) | {"worker": "one"}
        return [value(f"dllm:remote_{name}", named) for name in ("asks_total", "worker_up")]

    assert observe(one=5, two=7) == [5, 1]
    assert observe(two=1) == [5, None]
    assert observe(one=2, two=1) == [7, 1]
    assert not asks


# --- the process ----------------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    started = []

    def start(*command: str) -> Child:
        started.append(Child(command))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_a_process_that_ends_is_started_again(child, monkeypatch):
    monkeypatch.setattr(discovery, "RESTART_S", 0.01)
    one = child(sys.executable, "-c", "import os; print(f'[\"{os.getpid()}\"]')")
    one.wait_until_ready()
    first = one.addresses
    wait_for(lambda: one.addresses != first)


def test_a_line_that_is_no_list_is_passed_over(child):
    lines = [b"WARN", b"5", b"\xff", b'"ab"', b'["one"]']
    code = f"import sys; sys.stdout.buffer.write({b''.join(x + bytes([10]) for x in lines)!r})"
    one = child(sys.executable, "-c", code + "; sys.stdout.flush(); input()")
    one.wait_until_ready()
    assert one.addresses == ["one"]


def test_a_process_that_says_nothing_is_not_waited_for_without_end(child, monkeypatch):
    monkeypatch.setattr(discovery, "READY_WITHIN_S", 0.01)
    one = child(sys.executable, "-c", "input()")
    with pytest.raises(ValueError, match="no answer"):
        one.wait_until_ready()
    assert one._process.poll() is not None


def test_a_process_that_hangs_is_killed(child, monkeypatch):
    monkeypatch.setattr(discovery, "END_WITHIN_S", 0.01)
    one = child(sys.executable, "-c", "import time; print('[]', flush=True); time.sleep(30)")
    one.wait_until_ready()
    one.close()
    assert one._process.returncode == -signal.SIGKILL


def test_an_interpreter_is_found_or_the_error_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv(discovery.PYTHON_VARIABLE, sys.executable)
    assert find_python() == sys.executable
    monkeypatch.setenv(discovery.PYTHON_VARIABLE, str(tmp_path / "python"))
    with pytest.raises(ValueError, match="there is no such file"):
        find_python()
    monkeypatch.delenv(discovery.PYTHON_VARIABLE)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(discovery.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="make setup-dynamo"):
        find_python()


# --- Dynamo ---------------------------------------------------------------------------------------


@pytest.fixture
def own_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "list"))


@needs_dynamo
def test_the_first_list_has_who_is_there_already(own_list):
    """Or a target whose watching process ended would drop its workers."""
    first = list_with_dynamo(FIRST)
    first.wait_until_ready()
    command = [find_python(), "-I", dynamo_process.__file__, "watch"]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as watching:
        assert watching.stdout.readline() == f'["{FIRST}"]\n'
        watching.stdin.close()
    first.close()


@needs_dynamo
def test_a_list_survives_the_process_that_reads_it(own_list):
    watching, first = watch_dynamo(), list_with_dynamo(FIRST)
    wait_for(lambda: watching.addresses == [FIRST])
    before = watching.addresses
    os.kill(watching._process.pid, signal.SIGKILL)
    wait_for(lambda: watching.addresses is not before)
    wait_for(lambda: watching.addresses == [FIRST])
    for each in (watching, first):
        each.close()

"""What ends with what, in this process; tests/server/test_kills.py kills real processes."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import zmq
from vllm.v1.engine.exceptions import EngineDeadError

from dllm.patches import lifetime
from tests.support.patience import HANG_S


@pytest.fixture
def ends(monkeypatch):
    """Nothing ends this process; the mock hears what would."""
    heard = Mock()
    monkeypatch.setattr(lifetime, "LOOK_EVERY_S", 0)
    monkeypatch.setattr(lifetime, "CLIENT_GRACE_S", 0)
    monkeypatch.setattr(lifetime, "GRACE_S", 0)
    monkeypatch.setattr(lifetime, "Finalize", heard.finalize)
    monkeypatch.setattr(lifetime, "_end_after", heard.end_after)
    return heard


def test_the_others_end_within_five_seconds_by_what_they_wait_for(monkeypatch):
    """docs/reliability.md promises it. A worker is killed: the other workers end, the engine core
    fails, the API server looks for it and ends. Each of them waits so long at most."""
    assert lifetime.LET_GO_S + lifetime.LOOK_EVERY_S + lifetime.GRACE_S <= 5.0
    slept, ended, looks = [], [], iter((7, 7, 1))
    monkeypatch.setattr(lifetime.time, "sleep", slept.append)
    monkeypatch.setattr(lifetime.os, "getppid", lambda: next(looks))
    monkeypatch.setattr(lifetime.os, "_exit", ended.append)
    monkeypatch.setattr(lifetime.signal, "pthread_kill", lambda *_: None)
    monkeypatch.setattr(lifetime, "_remove_sockets", lambda: None)
    monkeypatch.setattr(lifetime.multiprocessing, "active_children", list)
    lifetime._watch(7)  # until the parent is another process
    assert slept == [lifetime.LOOK_EVERY_S] * 2 + [lifetime.GRACE_S] and ended == [1]
    ours, theirs = os.pipe()
    os.close(theirs)
    lifetime._end_behind(ours)  # until the executor has let go
    os.close(ours)
    assert slept[3:] == [lifetime.LET_GO_S] and ended == [1, 1]


def test_clients_get_half_a_second_to_read_the_last():
    assert lifetime.CLIENT_GRACE_S == 0.5  # as in docs/reliability.md


def watched(engine, *, cancel):
    """The server and a connection of it, after the watchdog has run."""
    connection = SimpleNamespace(transport=Mock())
    state = SimpleNamespace(connections={id(connection): connection}.values())
    server = SimpleNamespace(should_exit=False, server_state=state)

    async def run() -> None:
        hung_up = asyncio.Event()
        connection.transport.abort.side_effect = hung_up.set
        task = asyncio.create_task(lifetime.watchdog_loop(server, engine))
        if cancel:
            await asyncio.sleep(0)  # it has begun
            task.cancel()
        await asyncio.wait_for(hung_up.wait(), HANG_S)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    return server


def test_a_dead_engine_ends_the_server_with_an_error(ends):
    server = watched(SimpleNamespace(errored=True, is_running=False), cancel=False)
    assert server.should_exit
    ends.finalize.assert_called_once_with(None, os._exit, args=(1,), exitpriority=-2)
    ends.end_after.assert_called_once_with(0)


def test_a_call_of_an_engine_that_dies_fails(monkeypatch):
    resources = SimpleNamespace(engine_dead=False)
    asked = asyncio.Event()

    async def never(client, method, *args, engine):
        assert (method, args, engine) == ("is_sleeping", (7,), b"0")
        asked.set()
        await asyncio.Event().wait()

    async def call() -> None:
        client = SimpleNamespace(resources=resources)
        answer = asyncio.ensure_future(lifetime.call_utility(client, "is_sleeping", 7, engine=b"0"))
        await asked.wait()
        resources.engine_dead = True
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(answer, HANG_S)

    monkeypatch.setattr(lifetime, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(lifetime, "_call_utility", never)
    asyncio.run(call())


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_is_answered_is_vllms(monkeypatch, fails):
    async def answer(client, method, *args, engine):
        if fails:
            raise ValueError("no such method")
        return method

    monkeypatch.setattr(lifetime, "_call_utility", answer)
    call = lifetime.call_utility(SimpleNamespace(), "is_sleeping", engine=b"0")
    with pytest.raises(ValueError, match="no such") if fails else contextlib.nullcontext():
        assert asyncio.run(call) == "is_sleeping"


def test_a_signal_during_the_handshake_is_not_swallowed():
    address = f"inproc://{os.getpid()}"
    with (
        pytest.raises(SystemExit) as ended,
        lifetime.handshake_socket(address, zmq.ROUTER, bind=True),
    ):
        raise KeyboardInterrupt("terminated")
    assert ended.value.code == 0


def test_a_server_that_is_told_to_stop_only_hangs_up(ends):
    server = watched(SimpleNamespace(errored=False, is_running=True), cancel=True)
    assert not server.should_exit
    assert not ends.mock_calls


@pytest.fixture
def base(monkeypatch):
    """A folder with a short path: a longer one is left as it is."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv(lifetime.SOCKETS, folder)
        monkeypatch.setenv(lifetime.PROCESSES, "1")
        yield Path(folder)


def test_sockets_get_a_folder_once_that_is_removed(ends, monkeypatch, base):
    monkeypatch.setenv(lifetime.PROCESSES, "0")
    lifetime._collect_sockets()
    assert not list(base.iterdir())
    monkeypatch.setenv(lifetime.PROCESSES, "1")
    lifetime._collect_sockets()
    folder = Path(os.environ[lifetime.SOCKETS])
    assert folder.parent == base and folder.stat().st_mode & 0o777 == 0o700
    lifetime._collect_sockets()  # of a child
    assert os.environ[lifetime.SOCKETS] == str(folder)
    (folder / "socket").touch()
    ends.finalize.call_args.args[1]()
    assert not folder.exists() and base.exists()


def test_a_folder_stays_while_the_process_that_made_it_lives(ends, monkeypatch, base):
    """A worker that outlives a killed engine core leaves the API server's folder alone."""
    lifetime._collect_sockets()
    folder, maker = Path(os.environ[lifetime.SOCKETS]), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: maker + 1)  # in the worker
    lifetime._remove_sockets()
    assert folder.exists()
    monkeypatch.setattr(lifetime, "_is_alive", lambda process: process != maker)
    lifetime._remove_sockets()
    assert not folder.exists()
    lifetime._collect_sockets()  # of a process that inherited the variable
    another = Path(os.environ[lifetime.SOCKETS])
    assert another.parent == base and another.exists() and another != folder


def test_who_is_alive():
    assert lifetime._is_alive(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended: a zombie
        assert not lifetime._is_alive(process.pid)
    assert not lifetime._is_alive(process.pid)


def test_an_api_server_of_several_keeps_its_signals(monkeypatch):
    """Its event loop runs already, and uvloop hears signals over a descriptor."""
    heard = Mock()
    monkeypatch.setattr(lifetime.signal, "set_wakeup_fd", heard)
    monkeypatch.setattr(lifetime.multiprocessing, "parent_process", lambda: None)
    lifetime.end_without_parent()
    assert not heard.called
    lifetime._begin_child()
    heard.assert_called_once_with(-1)


def test_nothing_but_our_own_folder_is_removed(monkeypatch, tmp_path):
    (tmp_path / "precious").touch()
    monkeypatch.setenv(lifetime.SOCKETS, str(tmp_path))
    lifetime._remove_sockets()
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("left", [0, 1])
def test_a_folder_whose_sockets_would_have_too_long_paths_is_left_as_it_is(
    ends, monkeypatch, base, left
):
    longest = 107 - len(f"/dllm-sockets-{os.getpid()}-12345678/") - 36
    long = base / ("x" * (longest + left - len(str(base)) - 1))
    long.mkdir()
    monkeypatch.setenv(lifetime.SOCKETS, str(long))
    lifetime._collect_sockets()
    assert (os.environ[lifetime.SOCKETS] == str(long)) == bool(left)

"""What ends with what, in this process; tests/server/test_kills.py kills real processes."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from dllm.patches import lifetime


@pytest.fixture
def at_exit(monkeypatch):
    """Hears what would be called when this process ends."""
    heard = Mock()
    monkeypatch.setattr(lifetime, "Finalize", heard)
    return heard


def test_the_others_end_within_five_seconds_by_what_they_wait_for(monkeypatch):
    """docs/reliability.md promises it: an engine core looks for its parent, and ends."""
    assert lifetime.LOOK_EVERY_S + lifetime.GRACE_S <= 5.0
    slept, ended, looks = [], [], iter((7, 7, 1))
    monkeypatch.setattr(lifetime.time, "sleep", slept.append)
    monkeypatch.setattr(lifetime.os, "getppid", lambda: next(looks))
    monkeypatch.setattr(lifetime.os, "_exit", ended.append)
    monkeypatch.setattr(lifetime.signal, "pthread_kill", lambda *_: None)
    monkeypatch.setattr(lifetime, "_remove_sockets", lambda: None)
    monkeypatch.setattr(lifetime.multiprocessing, "active_children", list)
    lifetime._watch(7)  # until the parent is another process
    assert slept == [lifetime.LOOK_EVERY_S] * 2 + [lifetime.GRACE_S] and ended == [1]


@pytest.mark.parametrize(("name", "is_one_of_several"), [("ApiServer_1", True), ("Main", False)])
def test_an_api_server_of_several_ends_with_the_one_that_started_it(
    monkeypatch, name, is_one_of_several
):
    watch = Mock()
    monkeypatch.setattr(lifetime, "end_without_parent", watch)
    monkeypatch.setattr(lifetime.multiprocessing.current_process(), "name", name)
    monkeypatch.setattr(lifetime.EngineCoreProc, "run_engine_core", lifetime._engine_core)
    lifetime._bind_processes.__wrapped__()
    assert watch.called is is_one_of_several
    assert lifetime.EngineCoreProc.run_engine_core is lifetime.engine_core_main


@pytest.fixture
def base(monkeypatch):
    """A folder with a short path: a longer one is left as it is."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv(lifetime.SOCKETS, folder)
        monkeypatch.setenv(lifetime.PROCESSES, "1")
        yield Path(folder)


def test_sockets_get_a_folder_once_that_is_removed(at_exit, monkeypatch, base):
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
    at_exit.call_args.args[1]()
    assert not folder.exists() and base.exists()


def test_a_folder_stays_while_the_process_that_made_it_lives(at_exit, monkeypatch, base):
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
    monkeypatch.setattr(lifetime, "_engine_core", heard.engine_core)
    lifetime.end_without_parent()
    assert not heard.called
    lifetime.engine_core_main(7, local=True)
    assert heard.mock_calls == [call(-1), call.engine_core(7, local=True)]


def test_nothing_but_our_own_folder_is_removed(monkeypatch, tmp_path):
    (tmp_path / "precious").touch()
    monkeypatch.setenv(lifetime.SOCKETS, str(tmp_path))
    lifetime._remove_sockets()
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("left", [0, 1])
def test_a_folder_whose_sockets_would_have_too_long_paths_is_left_as_it_is(
    at_exit, monkeypatch, base, left
):
    longest = 107 - len(f"/dllm-sockets-{os.getpid()}-12345678/") - 36
    long = base / ("x" * (longest + left - len(str(base)) - 1))
    long.mkdir()
    monkeypatch.setenv(lifetime.SOCKETS, str(long))
    lifetime._collect_sockets()
    assert (os.environ[lifetime.SOCKETS] == str(long)) == bool(left)

"""The processes of a server end together, also after SIGKILL, and leave no sockets behind.

In vLLM a process that ends in order ends those that it has started; one that is killed cannot. Here
the engine core and every worker watch their parent, and end when it is gone. The API server looks
for a dead engine core more often than in vLLM, also before it is ready, and hangs up on its clients
when it stops.

Unix sockets of a server are in a folder of their own. It is removed by the process that made it,
or by those that outlive that one. Shared memory needs no care of ours: Python's resource
tracker removes it behind the last process.
"""

import asyncio
import contextlib
import functools
import multiprocessing
import os
import re
import select
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import psutil
from vllm.entrypoints.launchers import launcher
from vllm.entrypoints.launchers.launcher import terminate_if_errored
from vllm.logger import init_logger
from vllm.v1.engine import utils
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.multiproc_executor import WorkerProc

from dllm import LOGGER

logger = init_logger(LOGGER)

LOOK_EVERY_S = 0.5
GRACE_S = 2.5  # to end in order
LET_GO_S = 2.0  # for a worker to end in order
CLIENT_GRACE_S = 0.5  # for clients to read the last that the server has to say
SOCKETS, PROCESSES = "VLLM_RPC_BASE_PATH", "VLLM_ENABLE_V1_MULTIPROCESSING"
PREFIX = "dllm-sockets-"
MOST_PATH = 107 - 37  # bytes, of a folder: a socket's path has at most 107, and its name takes 37
RANDOM = 8  # characters that mkdtemp adds

# vLLM's own; this module is imported before it replaces them.
_engine_core, _worker, _coordinator = (
    EngineCoreProc.run_engine_core,
    WorkerProc.worker_main,
    DPCoordinatorProc.run_coordinator,
)
_handshake_socket = utils.zmq_socket_ctx
_call_utility = AsyncMPClient._call_utility_async


def end_together() -> None:
    """Bind the processes that this one is going to start to it; called before vLLM starts any."""
    _collect_sockets()
    _bind_processes()


@functools.cache
def _bind_processes() -> None:
    if multiprocessing.current_process().name.startswith("ApiServer_"):
        end_without_parent()  # one of --api-server-count
    # Started later, it would be a child of the engine core, and vLLM kills those with it.
    resource_tracker.ensure_running()
    launcher.watchdog_loop = watchdog_loop
    utils.zmq_socket_ctx = handshake_socket
    AsyncMPClient._call_utility_async = call_utility  # type: ignore[method-assign]
    _replace_main_functions()


def _replace_main_functions() -> None:
    EngineCoreProc.run_engine_core = staticmethod(engine_core_main)  # type: ignore[method-assign]
    WorkerProc.worker_main = staticmethod(worker_main)  # type: ignore[method-assign]
    DPCoordinatorProc.run_coordinator = staticmethod(coordinator_main)  # type: ignore[method-assign]


# --- engine core, workers, coordinator ------------------------------------------------------------

# multiprocessing sends the main function to a spawned process as the names of a module and of a
# function in it. The process imports this module to find it. So a spawned process runs what is
# below, as a forked one does.


def engine_core_main(*args: Any, **options: Any) -> None:
    """vLLM's, in a process that ends with its parent."""
    _begin_child()
    _replace_main_functions()  # before it starts workers
    _engine_core(*args, **options)


def worker_main(*args: Any, **options: Any) -> None:
    """vLLM's, in a process that ends with its parent, and soon after its executor lets it go.

    Where several workers compute together and one is dead, the others wait for it for ever. vLLM
    kills them after 9 s.
    """
    _begin_child()
    if (pipe := options.get("death_pipe")) is not None:
        threading.Thread(
            target=_end_behind, args=(os.dup(pipe.fileno()),), name="dllm-executor", daemon=True
        ).start()
    _worker(*args, **options)


def coordinator_main(*args: Any, **options: Any) -> None:
    """vLLM's, in a process that ends with its parent."""
    _begin_child()
    _coordinator(*args, **options)


def _begin_child() -> None:
    # A forked process's signals would wake up its parent's event loop, too. Not in an API server,
    # which has an event loop of its own by now.
    signal.set_wakeup_fd(-1)
    end_without_parent()


def end_without_parent() -> None:
    """Watch the parent in a thread; does nothing in a process that multiprocessing did not start.

    Not Linux's PR_SET_PDEATHSIG, which looks at the thread that started a process.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent.pid,), name="dllm-parent", daemon=True).start()


def _watch(parent: int | None) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    name = multiprocessing.current_process().name
    logger.error("%s ends: its parent process %s is gone.", name, parent)
    _remove_sockets()
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    _end_after(GRACE_S)


def _end_behind(pipe: int) -> None:
    let_go = select.poll()
    let_go.register(pipe, 0)  # wakes up when the other end is closed
    let_go.poll()
    _end_after(LET_GO_S)


def _end_after(seconds: float) -> None:
    """End this process and its children, if it has not ended by then."""
    time.sleep(seconds)
    for child in multiprocessing.active_children():
        child.kill()
    _remove_sockets()
    os._exit(1)


# --- the API server -------------------------------------------------------------------------------


@functools.wraps(_handshake_socket)
@contextlib.contextmanager
def handshake_socket(*args: Any, **options: Any) -> Iterator[Any]:
    """vLLM's, but a signal while the engine core starts ends the server.

    vLLM turns SIGTERM into KeyboardInterrupt there. Its socket swallows that, and the server goes
    on, or waits ten minutes for an engine core that has obeyed.
    """
    with _handshake_socket(*args, **options) as handshake:
        try:
            yield handshake
        except KeyboardInterrupt:
            logger.info("Stopped before the server was ready.")
            raise SystemExit(0) from None


async def call_utility(self: Any, method: str, *args: Any, engine: Any) -> Any:
    """vLLM's, which waits for ever for the answer of an engine core that dies.

    Raises:
        EngineDeadError: it died.
    """
    answer = asyncio.ensure_future(_call_utility(self, method, *args, engine=engine))
    while not (await asyncio.wait({answer}, timeout=LOOK_EVERY_S))[0]:
        if self.resources.engine_dead:
            answer.cancel()
            raise EngineDeadError
    return answer.result()


async def watchdog_loop(server: Any, engine: Any) -> None:
    """Stop the HTTP server when the engine is dead, and hang up on clients when the server stops.

    vLLM's looks every 5 s. Its server then waits until every answer is read, also those that will
    never be complete; so it does after SIGTERM, which cancels this task.
    """
    try:
        while not server.should_exit:
            await asyncio.sleep(LOOK_EVERY_S)
            terminate_if_errored(server, engine)
        Finalize(None, os._exit, args=(1,), exitpriority=-2)  # vLLM's exit status would be 0
        threading.Thread(target=_end_after, args=(GRACE_S,), name="dllm-end", daemon=True).start()
    finally:
        asyncio.get_running_loop().call_later(CLIENT_GRACE_S, _hang_up, server)


def _hang_up(server: Any) -> None:
    for connection in list(server.server_state.connections):
        connection.transport.abort()


# --- sockets --------------------------------------------------------------------------------------


def _collect_sockets() -> None:
    """Make a folder for the sockets of this process and its children, unless a parent did."""
    # Not from vllm.envs, which may hold cached values of an engine that ran earlier.
    base = Path(os.environ.get(SOCKETS) or tempfile.gettempdir())
    if os.environ.get(PROCESSES, "1") == "0":  # an engine without processes has no sockets
        return
    if (maker := _maker_of(base)) is not None:
        if _is_alive(maker):
            return
        base = base.parent
    prefix = f"{PREFIX}{os.getpid()}-"
    if len(os.fsencode(base)) > MOST_PATH - len(prefix) - RANDOM - 1:
        return
    with contextlib.suppress(OSError):  # vLLM says what is wrong with the folder
        os.environ[SOCKETS] = tempfile.mkdtemp(prefix=prefix, dir=base)
        Finalize(None, _remove_sockets, exitpriority=-1)


def _remove_sockets() -> None:
    """Remove the folder, unless the process that made it is another one, and alive."""
    folder = Path(os.environ.get(SOCKETS, ""))
    maker = _maker_of(folder)
    if maker is not None and (maker == os.getpid() or not _is_alive(maker)):
        shutil.rmtree(folder, ignore_errors=True)


def _maker_of(folder: Path) -> int | None:
    """The process that made a folder for sockets; None if it is another folder."""
    found = re.fullmatch(rf"{PREFIX}(\d+)-.*", folder.name)
    return int(found[1]) if found else None


def _is_alive(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

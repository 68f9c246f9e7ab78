"""An engine core ends with the process that started it, also after SIGKILL, and leaves no sockets.

In vLLM a process that ends in order ends those that it has started; one that is killed cannot. The
engine core would stay, with its workers and the memory of the model, and the next server would find
none. So it watches its parent here. A worker ends with its engine core in vLLM, too.

Unix sockets of a server are in a folder of their own. It is removed by the process that made it,
or by those that outlive that one. Shared memory needs no care of ours: Python's resource
tracker removes it behind the last process.
"""

import contextlib
import functools
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import psutil
from vllm.logger import init_logger
from vllm.v1.engine.core import EngineCoreProc

from dllm import LOGGER, register

logger = init_logger(LOGGER)

LOOK_EVERY_S = 0.5
GRACE_S = 2.5  # in which a process may end in order, before it is killed
SOCKETS, PROCESSES = "VLLM_RPC_BASE_PATH", "VLLM_ENABLE_V1_MULTIPROCESSING"
PREFIX = "dllm-sockets-"
# Bytes of the folder's path: a socket's path has at most 107, and its name takes 37 of them.
MOST_PATH = 107 - 37
RANDOM = 8  # characters that mkdtemp adds

_engine_core = EngineCoreProc.run_engine_core  # vLLM's own, because it is not replaced yet


def end_together() -> None:
    """Called before vLLM starts processes."""
    _collect_sockets()
    _bind_processes()


@functools.cache
def _bind_processes() -> None:
    if multiprocessing.current_process().name.startswith("ApiServer_"):
        end_without_parent()  # one of --api-server-count
    # The tracker is started here. Started later, it would be a child of the engine core, and vLLM
    # kills these when the engine core ends.
    resource_tracker.ensure_running()
    EngineCoreProc.run_engine_core = staticmethod(engine_core_main)  # type: ignore[method-assign]


# --- the engine core ------------------------------------------------------------------------------


def engine_core_main(*args: Any, **options: Any) -> None:
    """A spawned process gets its main function by its name, and imports this module to find it."""
    # Signals of a forked process would wake up its parent's event loop, too. (An API server of
    # --api-server-count has an event loop of its own by now, so that only an engine core needs
    # this.)
    signal.set_wakeup_fd(-1)
    end_without_parent()
    register()  # vLLM does when it has made its engine core, and ours is another
    _engine_core(*args, **options)


def end_without_parent() -> None:
    """Watch the parent; does nothing in a process that multiprocessing did not start.

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


def _end_after(seconds: float) -> None:
    time.sleep(seconds)
    for child in multiprocessing.active_children():
        child.kill()
    _remove_sockets()
    os._exit(1)


# --- sockets --------------------------------------------------------------------------------------


def _collect_sockets() -> None:
    """Unless a parent did."""
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
    """Unless the process that made the folder is another one, and alive."""
    folder = Path(os.environ.get(SOCKETS, ""))
    maker = _maker_of(folder)
    if maker is not None and (maker == os.getpid() or not _is_alive(maker)):
        shutil.rmtree(folder, ignore_errors=True)


def _maker_of(folder: Path) -> int | None:
    found = re.fullmatch(rf"{PREFIX}(\d+)-.*", folder.name)
    return int(found[1]) if found else None


def _is_alive(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

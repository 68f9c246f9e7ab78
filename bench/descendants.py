"""Nothing that a block of code started is left over: processes, and all that they started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
PATIENCE_S = 5.0  # until a killed process is gone; one with a GPU's memory takes a while


@contextmanager
def ending_descendants() -> Iterator[None]:
    """Kill what was started inside, and wait until it is gone.

    A process whose parent ends becomes a child of this one (a "subreaper"). So none is lost,
    whatever its session is and however its parent ended.
    """
    import psutil

    before = psutil.Process().children()
    _adopt_orphans(True)
    try:
        yield
    finally:
        deadline = time.monotonic() + PATIENCE_S
        while (started := _descendants(before)) and time.monotonic() < deadline:
            for process in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(started, timeout=0.5)
        _adopt_orphans(False)


def _descendants(without: list[psutil.Process]) -> list[psutil.Process]:
    """All descendants of this process, except some of its children and theirs."""
    import psutil

    found = []
    for child in psutil.Process().children():
        if child not in without:
            found.append(child)
            with contextlib.suppress(psutil.NoSuchProcess):
                found += child.children(recursive=True)
    return found


def _adopt_orphans(does: bool) -> None:
    """Raises OSError where the system has no such thing."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

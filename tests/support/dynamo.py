"""For tests of discovery; those that need NVIDIA Dynamo are skipped where it is missing."""

import time
from collections.abc import Callable

import pytest

from dllm.remote.discovery import find_python
from tests.support.patience import HANG_S


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds that another process or thread brings about."""
    end = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


def _missing() -> str:
    try:
        find_python()
    except ValueError as error:
        return str(error)
    return ""


needs_dynamo = pytest.mark.skipif(bool(_missing()), reason=_missing() or "it is here")

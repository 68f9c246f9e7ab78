"""Each process of ours may use AMX: vLLM's attention kernel runs its instructions unasked."""

from pathlib import Path

import pytest

from tests.support.process import run_python

HAS_AMX = " amx_tile " in Path("/proc/cpuinfo").read_text()
READ = """
import ctypes
from vllm.plugins import load_general_plugins

load_general_plugins()
allowed = ctypes.c_ulong()
ARCH_PRCTL, ARCH_GET_XCOMP_PERM = 158, 0x1022
assert ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(allowed)) == 0
assert allowed.value >> 18 & 1, hex(allowed.value)  # XFEATURE_XTILEDATA
"""


@pytest.mark.skipif(not HAS_AMX, reason="this CPU has no AMX")
def test_a_process_with_the_plugin_may_use_amx() -> None:
    run_python("-c", READ)

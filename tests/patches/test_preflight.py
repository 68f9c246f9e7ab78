"""What a fresh machine lacks is said before an engine starts, in one message."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from dllm.patches import preflight
from dllm.patches.cpu import is_cpu_without_triton

pytestmark = pytest.mark.skipif(
    not is_cpu_without_triton(), reason="elsewhere vLLM's own worker runs"
)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for switch in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(switch, raising=False)


@pytest.fixture
def start(checkpoint: Callable[..., Path]) -> Callable[..., Any]:
    """What ``vllm serve`` does before it starts an engine."""

    def start(**flags: Any) -> Any:
        load_general_plugins()
        return EngineArgs(str(checkpoint()), max_model_len=512, **flags).create_engine_config()

    return start


def test_without_a_compiler_a_server_is_refused(start) -> None:
    with pytest.raises(ValueError, match=r"no C\+\+ compiler no-such-compiler.*--enforce-eager"):
        start()


def test_without_the_headers_of_python_a_server_is_refused(start, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(preflight, "HEADER", tmp_path / "Python.h")
    with pytest.raises(ValueError, match=r"no \S+/Python\.h.*python3-dev.*--enforce-eager"):
        start()
    (tmp_path / "Python.h").touch()
    assert start().compilation_config.mode != 0


@pytest.mark.parametrize(
    "flags",
    [{"enforce_eager": True}, {"optimization_level": 0}, {"compilation_config": {"mode": 0}}],
    ids=str,
)
def test_it_is_not_needed_where_nothing_is_compiled(start, flags) -> None:
    assert start(**flags).compilation_config.mode == 0


def test_nor_with_a_switch_of_torch(start, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert start().compilation_config.mode == 0


def test_a_mode_that_compiles_needs_it_at_any_level(start) -> None:
    with pytest.raises(ValueError, match="no-such-compiler"):
        start(optimization_level=0, compilation_config={"mode": 3})


def test_without_the_kernels_of_vllm_a_server_is_refused(start, monkeypatch) -> None:
    monkeypatch.setattr(preflight, "ANY_KERNEL", "absent")
    with pytest.raises(ValueError, match=r"from vllm\._C.*apt-get install libnuma1"):
        start(enforce_eager=True)


@pytest.mark.parametrize(
    ("share", "bound", "is_said"), [(0.9, None, True), (0.2, None, False), (0.9, 1, False)]
)
def test_a_cache_of_most_of_the_memory_is_said(
    monkeypatch: pytest.MonkeyPatch, share: float, bound: int | None, is_said: bool
) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    from dllm.patches import cpu_worker

    size = int(share * psutil.virtual_memory().total)
    monkeypatch.setattr(CPUWorker, "determine_available_memory", lambda self: size)
    said: list[Any] = []
    monkeypatch.setattr(cpu_worker.logger, "warning", lambda *parts: said.append(parts))
    worker = object.__new__(cpu_worker.CanvasCPUWorker)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=bound)
    worker._compiler_is_ready = lambda: None
    assert worker.determine_available_memory() == size
    assert [("--kv-cache-memory-bytes" in parts[0]) for parts in said] == [True] * is_said

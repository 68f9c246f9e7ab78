"""Starts engines with asynchronous scheduling on a CPU, where vLLM has none.

vLLM's CPU platform turns it off at start, and our configuration does not choose it. With both
overruled the engine core keeps two visits in flight, as on a GPU: it schedules a visit before it
has counted the one before. Only the worker is not asynchronous: it has run a visit when the core
gets back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms.cpu import CpuPlatform

from dllm.patches import configure
from tests.support.engine_harness import Engine, get_engine


@contextmanager
def asynchronous_platform() -> Iterator[None]:
    """As if vLLM's CPU platform left ``async_scheduling`` as it is."""
    check_and_update = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        chosen = vllm_config.scheduler_config.async_scheduling
        check_and_update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configure, "_platform_is_synchronous", lambda: False)
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
        yield


def get_async_engine(model: str | Path, **options: Any) -> Engine:
    """As ``get_engine``, with asynchronous scheduling."""
    with asynchronous_platform():
        engine = get_engine(model, async_scheduling=True, **options)
    assert engine.core.batch_queue_size == 2
    return engine

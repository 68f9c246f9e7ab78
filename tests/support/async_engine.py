"""Starts engines with asynchronous scheduling on a CPU (``tests.support.forced_async``)."""

from pathlib import Path
from typing import Any

from tests.support.engine_harness import Engine, get_engine
from tests.support.forced_async import asynchronous_platform


def get_async_engine(model: str | Path, **options: Any) -> Engine:
    """As ``get_engine``, with asynchronous scheduling."""
    with asynchronous_platform():
        engine = get_engine(model, async_scheduling=True, **options)
    assert engine.core.batch_queue_size == 2
    return engine

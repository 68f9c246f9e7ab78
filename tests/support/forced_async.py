"""Asynchronous scheduling on a CPU, where vLLM has none: for tests and rehearsals of a GPU run.

vLLM's CPU platform turns it off at start, and our configuration does not choose it. With both
overruled the engine core keeps two engine steps in flight, as on a GPU: it schedules an engine step
    before it has counted the one before. Only the worker is not asynchronous: it has run an engine
    step when the core gets back. ``--no-async-scheduling`` works as on a GPU.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def asynchronous_platform() -> Iterator[None]:
    """As if vLLM's CPU platform left ``async_scheduling`` as it is."""
    from vllm.platforms.cpu import CpuPlatform

    from dllm.patches import cpu

    check_and_update = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        chosen = vllm_config.scheduler_config.async_scheduling
        check_and_update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = chosen

    replaced = classmethod(check_and_update_config)
    with (
        mock.patch.object(cpu, "is_synchronous", lambda: False),
        mock.patch.object(CpuPlatform, "check_and_update_config", replaced),
    ):
        yield


_forced = ExitStack()  # until this process ends


def force() -> None:
    """Make this process's platform asynchronous; vLLM calls it where ``write_plugin`` says so."""
    _forced.enter_context(asynchronous_platform())


def write_plugin(folder: Path) -> None:
    """Make every vLLM process that has ``folder`` in its PYTHONPATH call ``force``."""
    about = folder / "forced_async-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: forced-async\nVersion: 0\n")
    lines = ["[vllm.general_plugins]", f"forced_async = {__name__}:force"]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")

"""vLLM's own executor, which also names the parts of a step in the engine core's process.

Named in ``--distributed-executor-backend``; `bench.step_ranges` says how it is used. On a CPU the
worker is a process of its own, so a step's trace comes from two; on one GPU it is the same process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from bench.step_ranges import (
    LOG,
    Range,
    engine_functions,
    name_parts,
    unname_parts,
    write_trace,
)

if TYPE_CHECKING or current_platform.is_cpu():
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor as Base
else:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor as Base


class ProfiledExecutor(Base):
    """Does in the engine core what `StepRanges` does in the worker, and joins their ranges."""

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; three methods are answered here too."""
        if method == "write_step_trace":
            (path,) = kwargs.pop("args", None) or args[1]  # timeout, args, kwargs
            (worker,) = super().collective_rpc("take_step_ranges")
            write_trace(path, [*LOG, *(Range(*one) for one in worker)])
            LOG.clear()
            return [None]
        result = super().collective_rpc(method, *args, **kwargs)
        if method == "name_step_parts":  # after the worker, which may share this process's log
            name_parts(engine_functions(self.vllm_config))
        elif method == "unname_step_parts":
            unname_parts()
        return result

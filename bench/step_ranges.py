"""Names for the parts of an engine step, put around functions of vLLM and ours while profiling.

The product knows nothing of them, so they cost nothing when nobody profiles. A server, or an
``LLM``, can be asked for them after two options of vLLM's own (run from the repository):

    --distributed-executor-backend bench.profiled_executor.ProfiledExecutor
    --worker-extension-cls bench.step_ranges.StepRanges

It then answers ``collective_rpc("name_step_parts")`` by naming them from then on, and
``collective_rpc("write_step_trace", args=(path,))`` with a Chrome trace, for Perfetto, of what ran
since then. Over HTTP: ``POST /collective_rpc``, with VLLM_SERVER_DEV_MODE=1. A named call costs
two reads of a clock. While torch.profiler runs (vLLM's ``--profiler-config``, ``/start_profile``),
each part is also a ``record_function`` range of that trace, among the kernels.

`bench.step_trace` reads both kinds of trace.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

PREFIX = "step part: "  # of a range in a trace
# Names of ranges that hold no time: a step begins here; what its batch holds (three numbers).
STEP = "step"
BATCH = "batch"

# Components of a step in the order of a bar, and the group that a colour stands for.
SCHEDULING = "scheduling"
INPUTS = "input preparation"
OUTPUT = "output copy"
IPC = "IPC and engine loop"
SELF_CONDITIONING = "self-conditioning"
FORWARD = "forward"
HEAD = "head"
STATISTICS = "sampler: statistics"
DECISIONS = "sampler: accept, renoise, stop"
SOFT_EMBEDDING = "sampler: soft embedding"
SAMPLER = "sampler: rest"
IDLE = "idle gaps"
GROUPS = {
    SCHEDULING: "engine",
    INPUTS: "engine",
    OUTPUT: "engine",
    IPC: "engine",
    SELF_CONDITIONING: "forward",
    FORWARD: "forward",
    HEAD: "head",
    STATISTICS: "sampler",
    DECISIONS: "sampler",
    SOFT_EMBEDDING: "sampler",
    SAMPLER: "sampler",
    IDLE: "idle",
}


class Range(NamedTuple):
    """One call of a named function; in one process a parent contains its children."""

    name: str
    start_us: float  # of a clock that all processes share
    end_us: float
    process: int


class Named(NamedTuple):
    """A function that belongs to a part: ``owner.attribute``."""

    owner: Any
    attribute: str
    part: str


LOG: list[Range] = []
# Shared by all processes of a machine. Who has one thread only may set processor time instead.
clock_ns: Callable[[], int] = time.perf_counter_ns
_undo: list[tuple[Any, str, Any]] = []


def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, noting when it ran, that a step begins, and what its batch holds."""
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name == "schedule":
            _mark(STEP)
        with part_of_step(part):
            result = function(*args, **kwargs)
        if name == "prepare_inputs" and hasattr(result, "num_draft_tokens"):
            _mark(f"{BATCH} {result.num_reqs} {result.num_draft_tokens} {result.num_tokens}")
        return result

    return call


def _mark(name: str) -> None:
    with part_of_step(name):
        pass


@contextmanager
def part_of_step(part: str) -> Iterator[None]:
    """A range of this name, in our log and in a trace that torch is taking."""
    start = clock_ns()
    if torch.autograd._profiler_enabled():
        with torch.profiler.record_function(PREFIX + part):
            yield
    else:
        yield
    LOG.append(Range(part, start / 1e3, clock_ns() / 1e3, os.getpid()))


def name_parts(functions: Iterable[Named]) -> None:
    """Name the parts of every step from now on, in this process, and forget those before."""
    LOG.clear()
    unique = {(id(one.owner), one.attribute): one for one in functions}  # engines share classes
    for owner, attribute, part in unique.values():
        _undo.append((owner, attribute, vars(owner).get(attribute, _undo)))
        setattr(owner, attribute, timed(part, getattr(owner, attribute)))


def unname_parts() -> None:
    """Put every function back as it was."""
    while _undo:
        owner, attribute, original = _undo.pop()
        if original is _undo:  # it was inherited, or the class's
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, original)


# --- which function is which part; one that runs inside another is taken out of it ---------------


def engine_functions(vllm_config: Any) -> list[Named]:
    """Those of the engine core."""
    from vllm.v1.engine.core import EngineCoreProc

    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    return [
        Named(EngineCoreProc, "_process_engine_step", IPC),
        Named(EngineCoreProc, "_process_input_queue", IPC),
        Named(scheduler, "schedule", SCHEDULING),
        Named(scheduler, "update_from_output", SCHEDULING),
        Named(scheduler, "update_draft_token_ids", SCHEDULING),
    ]


def worker_functions(runner: Any) -> list[Named]:
    """Those of a worker, whose model runner (V2) holds our model or the built-in one."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    found = [
        Named(runner, "execute_model", INPUTS),
        Named(runner, "prepare_inputs", INPUTS),
        Named(runner.model, "forward", FORWARD),
        Named(runner.model, "compute_logits", HEAD),
        Named(runner, "sample", SAMPLER),
        Named(runner, "sample_tokens", OUTPUT),
        Named(runner, "take_draft_token_ids", OUTPUT),
        Named(AsyncOutput, "get_output", OUTPUT),
    ]
    graphs = getattr(runner, "cudagraph_manager", None)
    if graphs is not None:  # a graph is replayed in the place of `forward`
        found += [Named(graphs, name, FORWARD) for name in ("run_fullgraph", "run_pw_graph")]
    return found + _functions_of_ours(runner)


def _functions_of_ours(runner: Any) -> list[Named]:
    """What only our implementation has."""
    if not type(runner.sampler).__module__.startswith("dllm."):
        return []
    from vllm.config import CompilationMode

    import dllm.engine.sampler
    import dllm.ops.row_stats

    found = [
        Named(runner.model, "_logits", HEAD),  # the sampler calls it for one tile after the other
        Named(runner.model_state, "_condition_canvas", SELF_CONDITIONING),
        Named(runner.sampler, "_denoise_rows", DECISIONS),
        Named(runner.sampler, "_believe", SOFT_EMBEDDING),
        Named(dllm.ops.row_stats, "row_stats_cpu", STATISTICS),
    ]
    if runner.vllm_config.compilation_config.mode == CompilationMode.NONE:
        # Compiled, a clock inside would break the graph: the statistics of a small vocabulary are
        # then part of the decisions.
        found.append(Named(dllm.engine.sampler, "row_stats", STATISTICS))
    return found


class StepRanges:
    """What vLLM adds to its worker; `bench.profiled_executor` does the same for the engine core."""

    def name_step_parts(self) -> None:
        """Name the parts of every step from now on."""
        name_parts(worker_functions(self.model_runner))  # type: ignore[attr-defined]

    def unname_step_parts(self) -> None:
        """Stop it."""
        unname_parts()

    def take_step_ranges(self) -> list[Range]:
        """What has been noted, which is forgotten."""
        taken = LOG.copy()
        LOG.clear()
        return taken


def write_trace(path: str | Path, ranges: Iterable[Range]) -> None:
    """Ranges as a Chrome trace."""
    events = [
        {"ph": "X", "cat": "user_annotation", "name": PREFIX + name, "pid": process, "tid": process}
        | {"ts": start, "dur": end - start}
        for name, start, end, process in ranges
    ]
    Path(path).write_text(json.dumps({"traceEvents": events}))

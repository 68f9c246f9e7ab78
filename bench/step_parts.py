"""Names for the parts of an engine step, put around functions of vLLM and ours while profiling.

The product knows nothing of them, so they cost nothing when nobody profiles; a named call costs two
reads of a clock. While torch.profiler runs, each part is also a ``record_function`` range of its
trace, among the kernels. `bench.step_trace` says where the time between these ranges goes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
LOOP = "engine loop"
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
    LOOP: "engine",
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
    """One call of a named function."""

    name: str
    start_us: float
    end_us: float


class Named(NamedTuple):
    """A function that belongs to a part: ``owner.attribute``."""

    owner: Any
    attribute: str
    part: str


LOG: list[Range] = []
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
    start = time.perf_counter_ns()
    if torch.autograd._profiler_enabled():
        with torch.profiler.record_function(PREFIX + part):
            yield
    else:
        yield
    LOG.append(Range(part, start / 1e3, time.perf_counter_ns() / 1e3))


def name_parts(functions: Iterable[Named]) -> None:
    """Name the parts of every step from now on, in this process, and forget those before."""
    LOG.clear()
    for owner, attribute, part in functions:
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


def step_functions(llm: Any) -> list[Named]:
    """Those of an ``LLM`` whose engine core and worker run in this process."""
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    return [
        Named(engine, "step", LOOP),
        Named(core.scheduler, "schedule", SCHEDULING),
        Named(core.scheduler, "update_from_output", SCHEDULING),
        Named(core.scheduler, "update_draft_token_ids", SCHEDULING),
        *_worker_functions(core.model_executor.driver_worker.worker.model_runner),
    ]


def _worker_functions(runner: Any) -> list[Named]:
    """Those of a model runner (V2), which holds our model or the built-in one."""
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

    from dllm.models.gemma import step
    from dllm.ops import dispatch

    found = [
        Named(runner.model, "_logits", HEAD),  # the sampler calls it for one tile after the other
        Named(runner.model_state, "_condition", SELF_CONDITIONING),
        Named(runner.sampler, "_denoise_rows", DECISIONS),
        Named(runner.sampler, "_store_soft_embeddings", SOFT_EMBEDDING),
        Named(dispatch, "row_stats_cpu", STATISTICS),
    ]
    if runner.vllm_config.compilation_config.mode == CompilationMode.NONE:
        # Compiled, a clock inside would break the graph: the statistics of a small vocabulary are
        # then part of the decisions.
        found.append(Named(step, "row_stats", STATISTICS))
    return found

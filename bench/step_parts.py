"""Names for the parts of an engine step, put around functions of vLLM and ours while profiling.

The product knows nothing of them, so they cost nothing when nobody profiles. Every instant belongs
to the part whose function was entered last and has not returned, so that the parts of a step add up
to its wall time. A step lasts from one ``schedule()`` to the next; with the denoise loop it may
hold several passes of the model.

On a GPU the instants are those of its stream: a kernel counts for the part that launched it, and so
does the time in which the stream waits for that part's next kernel.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

# Components of a step in the order of a table, and the group that each belongs to.
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


class Named(NamedTuple):
    """A function that belongs to a part: ``owner.attribute``."""

    owner: Any
    attribute: str
    part: str


@dataclass
class Step:
    """One engine step: milliseconds of its components, and its batch (0 where no model ran).

    Attributes:
        num_reqs, num_canvas_rows, num_rows: of its first pass.
        num_passes: how often the canvases went through the model.
    """

    parts_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_reqs: int = 0
    num_canvas_rows: int = 0
    num_rows: int = 0
    num_passes: int = 1

    @property
    def wall_ms(self) -> float:
        """From its ``schedule()`` to the next."""
        return sum(self.parts_ms.values())

    @property
    def is_denoise_only(self) -> bool:
        """Every row belongs to a canvas: no prompt, no block to commit."""
        return 0 < self.num_canvas_rows == self.num_rows


class Recorder:
    """While its context lasts, notes which part runs; afterwards ``steps`` has the times."""

    def __init__(self, functions: Iterable[Named], has_gpu: bool = False) -> None:
        self.steps: list[Step] = []
        self._functions, self._has_gpu = list(functions), has_gpu
        self._open = [IDLE]  # parts that were entered and have not returned
        self._marks: list[tuple[Any, str, Step | None]] = []  # from this moment on, this part
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Recorder:
        for owner, attribute, part in self._functions:
            function = getattr(owner, attribute)
            undo = functools.partial(delattr, owner, attribute)  # it was inherited, or the class's
            if attribute in vars(owner):
                undo = functools.partial(setattr, owner, attribute, function)
            self._undo.append(undo)
            setattr(owner, attribute, self._timed(part, function))
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()
        times = [moment for moment, *_ in self._marks]
        if self._has_gpu and times:
            torch.cuda.synchronize()
            times = [times[0].elapsed_time(event) for event in times]
        for (start, end), (_, part, step) in zip(pairwise(times), self._marks, strict=False):
            if step is not None:
                step.parts_ms[part] += end - start

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, noting when it runs, that a step begins, and what its batch holds."""
        name = function.__name__

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "schedule":
                self.steps.append(Step())
            self._open.append(part)
            self._note()
            try:
                result = function(*args, **kwargs)
            finally:
                self._open.pop()
                self._note()
            if name == "prepare_inputs" and hasattr(result, "num_draft_tokens"):
                step = self.steps[-1]
                step.num_reqs, step.num_rows = result.num_reqs, result.num_tokens
                step.num_canvas_rows = result.num_draft_tokens
            if name == "goes_on":
                self.steps[-1].num_passes += result
            return result

        return call

    def _note(self) -> None:
        step = self.steps[-1] if self.steps else None
        self._marks.append((self._now(), self._open[-1], step))

    def _now(self) -> Any:
        """Milliseconds, or on a GPU an event of its stream."""
        if not self._has_gpu:
            return time.perf_counter_ns() / 1e6
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


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
        Named(runner.model_state, "canvas_attention", INPUTS),
        Named(runner.model_state, "canvas_inputs", INPUTS),
        Named(runner.sampler.loop, "goes_on", SAMPLER),
        Named(runner.sampler, "_denoise_rows", DECISIONS),
        Named(runner.sampler, "_store_soft_embeddings", SOFT_EMBEDDING),
        Named(dispatch, "row_stats_cpu", STATISTICS),
    ]
    if runner.vllm_config.compilation_config.mode == CompilationMode.NONE:
        # Compiled, a clock inside would break the graph: the statistics of a small vocabulary are
        # then part of the decisions.
        found.append(Named(step, "row_stats", STATISTICS))
    return found

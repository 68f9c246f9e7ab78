"""An ``LLM`` in this process: how long answers take, and which part of a step runs when."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

PARTS = ENGINE, FORWARD, HEAD, SAMPLER, IDLE = "engine", "forward", "head", "sampler", "idle"

Named = tuple[Any, str, str]  # a function that belongs to a part: owner, attribute, part


@dataclass
class Step:
    """One engine step, from a ``schedule()`` to the next, with all of its passes."""

    parts_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    num_reqs: int = 0
    num_new: int = 0
    num_canvas_rows: int = 0  # rows of the batch that belong to canvases
    num_passes: int = 1

    @property
    def wall_ms(self) -> float:
        """Milliseconds until the next ``schedule()``."""
        return sum(self.parts_ms.values())

    @property
    def is_denoise_only(self) -> bool:
        """No prompt runs beside the canvases."""
        return self.num_canvas_rows > 0 == self.num_new


class Recorder:
    """Notes which part runs while it watches functions; afterwards ``steps`` has the times."""

    def __init__(self, has_gpu: bool = False) -> None:
        self.steps: list[Step] = []
        self._has_gpu = has_gpu
        self._open = [IDLE]  # parts that were entered and have not returned
        self._marks: list[tuple[Any, str, Step | None]] = []  # from this moment on, this part

    @contextmanager
    def watching(self, functions: Iterable[Named]) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, attribute, part in functions:
                timed = self._timed(part, getattr(owner, attribute))
                stack.enter_context(mock.patch.object(owner, attribute, timed))
            yield
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
            if name == "schedule":
                self.steps[-1].num_new = len(result.scheduled_new_reqs)
            if name == "prepare_inputs" and hasattr(result, "num_draft_tokens"):
                step = self.steps[-1]
                step.num_reqs, step.num_canvas_rows = result.num_reqs, result.num_draft_tokens
            if name == "goes_on":
                self.steps[-1].num_passes += result
            return result

        return call

    def _note(self) -> None:
        """Milliseconds, or on a GPU an event of its stream."""
        now: Any = time.perf_counter_ns() / 1e6
        if self._has_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((now, self._open[-1], self.steps[-1] if self.steps else None))


def generate_ms(
    llm: Any, num_requests: int, prompt_len: int, num_tokens: int, words: int = 100
) -> float:
    """Until requests have ``num_tokens`` each; their prompts are the same each time.

    ``words``: how many different tokens prompts have. Raises RuntimeError: an answer is too short.
    """
    from vllm import SamplingParams, TokensPrompt

    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(20, 20 + words, (num_requests, prompt_len), generator=draws).tolist()
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in tokens]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = 1e3 * (time.perf_counter() - start)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    if lengths != [num_tokens] * num_requests:
        raise RuntimeError(f"{lengths} tokens instead of {num_tokens} for each request.")
    return took


def step_functions(llm: Any) -> list[Named]:
    """The functions of an ``LLM`` whose engine core and worker run in this process."""
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner  # V2, of our model or another
    found = [
        (llm.llm_engine, "step", ENGINE),
        (core.scheduler, "schedule", ENGINE),
        (runner, "prepare_inputs", ENGINE),
        (runner.model, "forward", FORWARD),
        (runner.model, "compute_logits", HEAD),
        (runner, "sample", SAMPLER),
    ]
    graphs = getattr(runner, "cudagraph_manager", None)
    if graphs is not None:  # a graph is replayed in the place of `forward`
        found += [(graphs, name, FORWARD) for name in ("run_fullgraph", "run_pw_graph")]
    if type(runner.sampler).__module__.startswith("dllm."):
        found += [
            (runner.model, "_logits", HEAD),  # the sampler calls it for one tile after the other
            (runner.model_state, "_condition", FORWARD),
            # The denoise loop prepares inputs inside of the sampler.
            (runner.sampler.loop.forward_of.__self__, "_canvases_alone", ENGINE),
            (runner.model_state, "canvas_attention", ENGINE),
            (runner.model_state, "canvas_inputs", ENGINE),
            (runner.sampler.loop, "goes_on", SAMPLER),
        ]
    return found

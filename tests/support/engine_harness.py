"""An in-process vLLM engine whose denoise steps can be watched."""

import functools
import gc
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

# Before vLLM is imported: no worker process, no compilation.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would overrule what an engine is given
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams
from vllm.distributed import parallel_state
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import RequestOutputKind

# Once a process: vLLM searches every module, which takes longer than the rest of an engine's start.
CpuPlatform.register_triton_kernel_overrides = staticmethod(
    functools.cache(CpuPlatform.register_triton_kernel_overrides)
)
# vLLM looks at a model class in another process, so that a GPU is opened by none but the engine.
# That process imports everything again.
registry._run_in_subprocess = lambda look: look()

Prompts = Sequence[Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams]  # of all prompts, or of each
Adapters = Sequence[LoRARequest | None] | None  # of each prompt; None: no prompt has one


@dataclass
class DenoiseStep:
    """What happened to one canvas in one forward pass."""

    canvas_start: int
    causal_len: int
    logits: torch.Tensor | None  # [width, vocab], the model's own
    canvas: list[int]  # the input of the pass
    num_emitted: int


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference of logits in units of the largest one; inf if other ones are -inf."""
    is_out = theirs == -torch.inf
    if not torch.equal(is_out, ours == -torch.inf):
        return float("inf")
    ours, theirs = (logits.masked_fill(is_out, 0) for logits in (ours, theirs))
    return float((ours - theirs).abs().max() / theirs.abs().max())


@dataclass
class Run:
    """The tokens of one request, and the logits of all its denoise steps.

    A random model mostly repeats its input, so equal tokens alone prove little. The logits of a
    step change by half their range if its context is wrong.
    """

    tokens: list[int]
    logits: torch.Tensor  # [denoise steps * canvas width, vocab]

    def difference(self, other: "Run") -> float:
        """``relative_error`` of the logits; inf for other tokens."""
        is_same = self.tokens == other.tokens
        return relative_error(self.logits, other.logits) if is_same else float("inf")


# Small, because many engines are alive at once, and a cache is in memory from the start.
KV_CACHE_BYTES = 32 << 20
DEFAULTS: dict[str, Any] = dict(
    dtype="float32",
    enforce_eager=True,
    max_model_len=512,
    max_num_seqs=4,
    disable_log_stats=True,
    kv_cache_memory_bytes=KV_CACHE_BYTES,
)
# Four requests of some blocks preempt each other, and a step has no room for all of their canvases.
TIGHT = dict(
    max_num_batched_tokens=72, max_model_len=288, block_size=32, num_gpu_blocks_override=24
)

# A batch of another size rounds differently: differences of 1e-5 were measured.
RUN_TOLERANCE = 1e-4


def assert_same_runs(runs: Sequence[Run], expected: Sequence[Run]) -> None:
    """Check that tokens are equal, and logits equal up to rounding."""
    differences = [run.difference(other) for run, other in zip(runs, expected, strict=True)]
    assert max(differences) < RUN_TOLERANCE, differences


def assert_same_logprobs(ours: Any, theirs: Any) -> None:
    """The same tokens and ranks in each place; in fp32, but for sums in another order."""
    assert (ours is None) == (theirs is None)
    for both in zip(ours or (), theirs or (), strict=True):
        found, expected = (
            {
                (token, name): getattr(one, name)
                for token, one in (place or {}).items()
                for name in ("logprob", "rank")
            }
            for place in both
        )
        assert found == pytest.approx(expected, abs=1e-4)


def _make_group_of_experts() -> None:
    """Make vLLM's process group of experts, if it is missing.

    vLLM makes its groups with the first engine of a process, this one only if that engine's model
    has experts. Without it a later engine with experts fails.
    """
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        world = parallel_state.get_world_group()
        backend = torch.distributed.get_backend(world.device_group)
        parallel_state._EP = parallel_state.init_model_parallel_group(
            [[0]], world.local_rank, backend, group_name="ep"
        )


class Engine:
    """vLLM's offline engine on the CPU runtime, eager, in this process."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._ids = itertools.count()
        _make_group_of_experts()
        self.llm = LLM(str(model), **(DEFAULTS | options))
        # It would end the process groups of all engines when this one is dropped.
        self.llm.llm_engine.engine_core._finalizer.detach()

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def loop(self) -> Any:
        return self.runner.model_state.loop

    def one_pass_a_step(self) -> AbstractContextManager[Any]:
        """The same engine with ``denoise_loop_ms`` 0, so that ``step`` is a single pass."""
        return mock.patch.object(self.loop, "bound", 0)

    def generate(
        self, prompts: Prompts, params: Params, adapters: Adapters = None
    ) -> list[list[int]]:
        """Token ids of the first completion of each prompt."""
        outputs = self.outputs(prompts, params, adapters)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def outputs(self, prompts: Prompts, params: Params, adapters: Adapters = None) -> list[Any]:
        many = params if isinstance(params, Sequence) else [params] * len(prompts)
        adapters = adapters or [None] * len(prompts)
        ids = [self.add(*one) for one in zip(prompts, many, adapters, strict=True)]
        finished = self.run()
        return [finished[req_id] for req_id in ids]

    def runs(self, prompts: Prompts, params: Params, adapters: Adapters = None) -> list[Run]:
        """Generate, watching every denoise step."""
        with self.watch(keep_logits=True) as watched:
            outputs = self.outputs(prompts, params, adapters)
        return [
            Run(
                list(output.outputs[0].token_ids),
                torch.cat([step.logits for step in watched[output.request_id]]),
            )
            for output in outputs
        ]

    def denoised(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> tuple[list[int], list[DenoiseStep]]:
        """Run one request: its tokens, and its denoise steps."""
        with self.watch(keep_logits=True) as watched:
            (tokens,) = self.generate([prompt], params)
        (steps,) = watched.values()
        return tokens, steps

    def quiet_run(self, prompt: Sequence[int], params: SamplingParams) -> Run:
        """Run one request alone, with an empty prefix cache."""
        self.reset_prefix_cache()
        return self.runs([prompt], params)[0]

    def add(
        self, prompt: Sequence[int], params: SamplingParams, adapter: LoRARequest | None = None
    ) -> str:
        """Queue one request and return its id."""
        req_id = f"r{next(self._ids)}"
        inputs = {"prompt_token_ids": list(prompt)}
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        self.llm.llm_engine.add_request(req_id, inputs, params, lora_request=adapter)
        return req_id

    def step(self) -> list[Any]:
        """One engine step; returns the requests that finished in it."""
        return [output for output in self.llm.llm_engine.step() if output.finished]

    def run(self, max_steps: int = 3000) -> dict[str, Any]:
        """Step until every request has finished; fails after ``max_steps`` engine steps."""
        finished = {}
        for _ in range(max_steps):
            if not self.llm.llm_engine.has_unfinished_requests():
                return finished
            finished |= {output.request_id: output for output in self.step()}
        raise AssertionError(f"requests unfinished after {max_steps} engine steps")

    def reset_prefix_cache(self) -> None:
        assert self.llm.reset_prefix_cache(), "blocks are still in use"

    @contextmanager
    def watch(self, keep_logits: bool = False) -> Iterator[dict[str, list[DenoiseStep]]]:
        """Record the denoise steps of every request, by the id that ``add`` returned."""
        steps: dict[str, list[DenoiseStep]] = defaultdict(list)
        sampler = self.runner.sampler
        kind = type(sampler)
        call, denoise = kind.__call__, kind._denoise_batch
        visited: list[Any] = []  # the batch of the engine step that is going on

        def spy_step(self: Any, hidden: Any, batch: Any) -> Any:
            visited[:] = [batch]
            return call(self, hidden, batch)

        def spy_pass(self: Any, hidden: Any, tiles: Any) -> Any:
            (batch,) = visited
            logits = self._model.compute_logits(hidden) if keep_logits else None
            canvases = self.req_states.draft_tokens[batch.idx_mapping].tolist()
            commits = self.state.commits[batch.idx_mapping].tolist()
            is_first = self.loop.num_passes == 1  # later passes hold canvases alone
            output = denoise(self, hidden, tiles)
            starts = batch.cu_num_logits_np
            for row, req_id in enumerate(batch.req_ids):
                width = int(starts[row + 1] - starts[row])
                if width == 0 or commits[row]:
                    continue
                causal_len = int(batch.num_scheduled_tokens[row]) - width
                of_row = slice(starts[row], starts[row + 1])
                steps[req_id.split("-")[0]].append(
                    DenoiseStep(
                        canvas_start=int(batch.seq_lens[row] - batch.num_draft_tokens_per_req[row]),
                        causal_len=causal_len if is_first else 0,
                        logits=None if logits is None else logits[of_row],
                        canvas=canvases[row][:width],
                        num_emitted=int(output.num_sampled[row]),
                    )
                )
            return output

        with mock.patch.multiple(kind, __call__=spy_step, _denoise_batch=spy_pass):
            yield steps


MOST_ENGINES = 16  # in memory; each takes 40 MB and more

_engines: dict[str, Engine] = {}


def get_engine(model: str | Path, **options: Any) -> Engine:
    """The engine with these options, started once, unless many others were asked for since.

    None is shut down: engines in one process share vLLM's process groups. The one that was asked
    for least recently is dropped, and stays alive where a fixture has it.
    """
    key = repr((str(model), sorted((DEFAULTS | options).items())))
    engine = _engines.pop(key, None)
    if engine is None:
        if len(_engines) >= MOST_ENGINES:
            del _engines[next(iter(_engines))]
            gc.unfreeze()  # vLLM freezes what an engine is made of
            gc.collect()
        engine = Engine(model, **options)
    _engines[key] = engine
    return engine


def blocks_of(steps: Sequence[DenoiseStep]) -> list[int]:
    """How many denoise steps each block took, in order."""
    counts = Counter(step.canvas_start for step in steps)
    return [counts[start] for start in sorted(counts)]

"""Measures with vLLM, in this process, how long steps of a server with a drafter take.

One request runs at a time. The widths change from step to step, and some steps draft nothing; the
times go into ``StepCosts``, which smooths them, as those of the policy ``adaptive`` do.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dllm.drafter.widths.costs import StepCosts
from dllm.drafter.widths.policy import VerifiedStep, WidthPolicy

PLAIN_ONE_IN = 5  # steps that draft nothing
ROOM = 64  # tokens of a context beyond the longest prompt and its answer
KV_CACHE_BYTES = 1 << 30


class TimedWidths(WidthPolicy):
    """Every width in turn for one request, whatever it is worth."""

    reads_outcomes = True

    def __init__(self, num_drafts: int, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(num_drafts)
        self.costs, self.clock = StepCosts(num_drafts), clock
        self._turn = 0
        self._observed_at: float | None = None

    def observe(self, step: VerifiedStep) -> None:
        now, before = self.clock(), self._observed_at
        self._observed_at = now
        if before is not None and not step.in_prompt.any():
            num_verified = int(step.verified.sum())
            self.costs.observe(1, num_verified, step.drafted, 1e3 * (now - before))

    def wants_drafts(self, slots: np.ndarray) -> bool:
        self._turn += 1
        return self._turn % PLAIN_ONE_IN != 0

    def widths(self, slots: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        return np.full(len(slots), 1 + self._turn % self.num_drafts)


def measured_costs(
    target: Path, drafter: Path, num_drafts: int, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[float, float, float]:
    """Milliseconds as in ``PilotTraining.costs``.

    Args:
        prompts: that are answered for it, greedily.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(target),
        max_model_len=max(map(len, prompts)) + max_tokens + ROOM,
        max_num_seqs=1,
        enable_prefix_caching=False,
        async_scheduling=False,  # so that the worker chooses widths
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        speculative_config={
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": num_drafts,
        },
        additional_config={"dllm": {"drafter": {"policy": "adaptive"}}},
    )
    policy = TimedWidths(num_drafts)
    llm.collective_rpc(lambda worker: setattr(worker.model_runner.speculator, "policy", policy))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for prompt in prompts:
        llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return in_milliseconds(policy.costs)


def in_milliseconds(costs: StepCosts) -> tuple[float, float, float]:
    """Costs of one request: a step without drafts, a draft pass, each verified draft."""
    plain, (drafting, with_one, *_) = costs.plain(1), costs.drafting(1)
    return plain, float(drafting) - plain, float(with_one - drafting)

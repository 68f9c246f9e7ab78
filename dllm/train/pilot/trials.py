"""Answers prompts at every draft width, with vLLM in this process."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.outputs import CompletionOutput

from dllm.drafter.widths.policy import FixedWidth, VerifiedStep
from dllm.train.pilot.network import Trials

KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class TrialSettings:
    """What is run; concurrency should be that of the server that the pilot is for.

    Attributes:
        widths: candidates.
        num_drafts: tokens drafted at a time, at least the widest candidate.
        concurrency: prompts that are answered at once.
        max_tokens: of an answer.
    """

    target: Path
    drafter: Path
    widths: tuple[int, ...]
    num_drafts: int
    concurrency: int = 1
    max_tokens: int = 128
    temperature: float = 0.0
    is_eager: bool = False


class TrialWidth(FixedWidth):
    """A fixed width that also keeps the target's logits at the end of each prompt."""

    reads_outcomes = True
    reads_prompt = True

    def __init__(self, num_drafts: int) -> None:
        super().__init__(num_drafts, 0)
        self.prompt_logits: list[torch.Tensor] = []

    def observe(self, step: VerifiedStep) -> None:
        """Keep the logits."""
        if (step.in_prompt & step.samples).any():
            assert step.prompt_logits is not None, "reads_prompt"
            self.prompt_logits.append(step.prompt_logits.float().cpu())


def run_trials(
    settings: TrialSettings,
    prompts: Sequence[tuple[int, ...]],
    is_heldout: Sequence[bool],
    advance: Callable[[], None],
) -> Trials:
    """Answer every prompt at every width.

    Widths take turns, so that a machine that gets slower or faster affects all of them alike.

    ``advance`` is called after each batch of prompts.
    """
    llm = start(settings, max(map(len, prompts)))
    policy = TrialWidth(settings.num_drafts)
    llm.collective_rpc(lambda worker: setattr(worker.model_runner.speculator, "policy", policy))
    for prompt in prompts:  # one by one, so that the logits are in this order
        given = {"prompt_token_ids": list(prompt)}
        llm.generate(given, SamplingParams(max_tokens=1), use_tqdm=False)
    logits = torch.cat(policy.prompt_logits)
    assert len(logits) == len(prompts), (len(logits), len(prompts))
    shape = (len(prompts), len(settings.widths))
    tokens, steps = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    seconds, passes = np.zeros(shape[1]), np.zeros(shape[1])
    for batch in batches(len(prompts), settings.concurrency):
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts[batch]]
        for place, policy.width in enumerate(settings.widths):
            params = SamplingParams(
                temperature=settings.temperature, max_tokens=settings.max_tokens, seed=0
            )
            start_s = time.perf_counter()
            outputs = llm.generate(asked, params, use_tqdm=False)
            seconds[place] += time.perf_counter() - start_s
            answers = [output.outputs[0] for output in outputs]
            tokens[batch, place] = [len(answer.token_ids) for answer in answers]
            steps[batch, place] = [num_steps(answer) for answer in answers]
            passes[place] += steps[batch, place].max()
        advance()
    return Trials(
        settings.widths,
        logits,
        torch.from_numpy(tokens),
        torch.from_numpy(steps),
        torch.from_numpy(seconds / passes),
        torch.tensor(is_heldout),
    )


def num_steps(answer: CompletionOutput) -> int:
    """Steps of the target, the pass over the prompt included."""
    metrics = answer.spec_decode_metrics
    verifying = 0 if metrics is None else sum(metrics.histogram)
    return 1 + (verifying or len(answer.token_ids) - 1)


def batches(num_prompts: int, size: int) -> Iterator[slice]:
    """Slices of the prompts that are answered together."""
    return (slice(start, start + size) for start in range(0, num_prompts, size))


def start(settings: TrialSettings, longest: int) -> LLM:
    """The engine, in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``)."""
    return LLM(
        str(settings.target),
        max_model_len=longest + settings.max_tokens + settings.num_drafts + 1,
        max_num_seqs=settings.concurrency,
        enforce_eager=settings.is_eager,
        enable_prefix_caching=False,  # a prompt costs as much at every width
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        disable_log_stats=True,
        per_request_spec_decode_metrics="summary",
        speculative_config={
            "method": "dflash",
            "model": str(settings.drafter),
            "num_speculative_tokens": settings.num_drafts,
        },
        # Less than num_drafts, so that the engine trims drafts; ``run_trials`` sets to what.
        additional_config={"dllm": {"drafter": {"width": 0}}},
    )

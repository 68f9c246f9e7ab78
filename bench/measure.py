"""From what a run saved to its numbers, and what is wrong with it.

Definitions:

    canvas passes    forward passes of a request that held a canvas, from the server's own counter:
                     canvas positions evaluated / canvas length. The built-in's commit passes are
                     among them, because it schedules a canvas for them.
    denoise steps    canvas passes without the built-in's commit passes
    passes per block canvas passes and commit passes / blocks. Overlapped commits take none; with
                     asynchronous scheduling the server counts ours (`dllm:commit_passes`)
    tokens per pass  output tokens / all forward passes of the requests, those of prompts included;
                     ours takes the first denoise step in the prompt's pass (where both fit, which
                     is not counted), and an autoregressive model has one pass a token. A pass of a
                     batch counts for every request in it.
    TTFT             time to first token, of a diffusion model: to its first block
    latency          end to end, of one request, from when it is sent
    ms per denoise step  latencies of all requests / their denoise steps: what a step costs the one
                     who waits, with prefill, commits, and waiting for a place in the batch
    acceptance length  tokens per step of a request that verified drafts, the target's own included
    tokens/s         output tokens / wall time of the run, as ``vllm bench serve`` prints it

``vllm bench serve`` itself takes one commit pass a block off the canvas passes, which for ours
removes a denoise step; its ``diffusion_steps_per_canvas`` is therefore not used.

A run with something wrong has no speed: those columns are empty and ``problem`` says why.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from bench.workloads import ADAPTIVE, ANSWER_TOKENS, Workload, num_correct
from dllm.tasks.suite import Question

# How an implementation reads prompts and commits blocks, which decides how its passes are counted.
OVERLAPPED = 0  # both in passes of canvases
PROMPT_APART, COMMIT_APART = 1, 2  # prompts, or blocks, in passes without a canvas; their sum: both
BUILTIN_PASSES = 4  # both apart, and those of blocks are in the server's counter
NO_CANVAS = 8


@dataclass(frozen=True)
class Measurement:
    """One run of one contestant; None where there is nothing to say.

    Attributes:
        pair: the round; contestants with the same pair and workload had the same prompts.
        problem: what was wrong; there are no speeds then.
    """

    contestant: str
    pair: int
    num_requests: int
    tokens_per_s: float | None = None
    ttft_ms: float | None = None
    latency_ms: float | None = None
    latency_p99_ms: float | None = None
    ms_per_denoise_step: float | None = None
    steps_per_block: float | None = None
    passes_per_block: float | None = None
    tokens_per_pass: float | None = None
    acceptance_length: float | None = None
    num_correct: int | None = None
    problem: str = ""


SPEEDS = ("tokens_per_s", "ttft_ms", "latency_ms", "latency_p99_ms", "ms_per_denoise_step")


def without_speed(one: Measurement, problem: str) -> Measurement:
    """The same run, said to be wrong."""
    nothing: dict[str, Any] = dict.fromkeys(SPEEDS)
    return replace(one, problem=problem, **nothing)


class Passes(NamedTuple):
    """Of all requests of a run; None where an implementation has no canvas.

    Attributes:
        num_forward: all of them.
        num_prompt: those that read a prompt and hold no canvas.
    """

    num_blocks: int | None
    num_denoise: float | None
    num_forward: float
    num_prompt: int


def count_passes(commits: int, saved: Mapping[str, Any], workload: Workload) -> Passes:
    """Blocks, denoise steps and forward passes of a run.

    Args:
        commits: how the contestant commits: one of the constants above.
    """
    lengths = saved["output_lens"]
    if commits == NO_CANVAS:
        return Passes(None, None, sum(lengths), 0)
    if "forward_passes" in saved:  # Hugging Face's generate counts its own
        counted = saved["blocks"], saved["denoise_steps"], saved["forward_passes"]
        return Passes(*counted, len(lengths))
    blocks = sum(math.ceil(length / workload.shape.canvas_length) for length in lengths)
    canvas_passes = saved["diffusion_canvas_positions"] / workload.shape.canvas_length
    commit_passes = 0.0
    if saved.get("commit_passes"):  # of all requests, those that warm it up included
        emitted = saved["diffusion_num_committed_tokens"] / workload.shape.canvas_length
        commit_passes = blocks * saved["commit_passes"] / emitted
    elif commits & COMMIT_APART:
        commit_passes = blocks - len(lengths)  # the last block is never committed
    prompts = len(lengths) if commits & (PROMPT_APART | BUILTIN_PASSES) else 0
    denoise = canvas_passes - (blocks if commits == BUILTIN_PASSES else 0)
    return Passes(blocks, denoise, canvas_passes + commit_passes + prompts, prompts)


# --- what is wrong -------------------------------------------------------------------------------


def run_problem(commits: int, saved: Mapping[str, Any], workload: Workload) -> str:
    """The first thing that is wrong with the form of a run, or nothing."""
    wanted = workload.num_requests
    if saved["completed"] != wanted or saved["failed"]:
        errors = sorted({error for error in saved.get("errors", []) if error})
        return f"{saved['completed']} of {wanted} requests succeeded: {errors}"
    lengths = saved["output_lens"]
    if workload.schedule == ADAPTIVE:
        if bad := [length for length in lengths if not 0 < length <= ANSWER_TOKENS]:
            return f"answers of {bad} tokens; allowed: 1 to {ANSWER_TOKENS}"
    elif bad := [length for length in lengths if length != workload.shape.output_len]:
        return f"{bad} tokens instead of {workload.shape.output_len}"
    if commits == NO_CANVAS:
        return ""
    if "forward_passes" not in saved and "diffusion_canvas_positions" not in saved:
        return "no diffusion counters: is this a diffusion model?"
    passes = count_passes(commits, saved, workload)
    assert passes.num_blocks and passes.num_denoise is not None
    steps = passes.num_denoise / passes.num_blocks
    if workload.steps_per_block is not None and steps != workload.steps_per_block:
        return (
            f"{steps:.3f} denoise steps per block instead of {workload.steps_per_block}: "
            "not the same work as the others'"
        )
    return ""


# --- numbers -------------------------------------------------------------------------------------


def measurement(
    contestant: str,
    pair: int,
    commits: int,
    saved: Mapping[str, Any],
    workload: Workload,
    asked: Sequence[Question] = (),
) -> Measurement:
    """The numbers of one saved run; a wrong one comes back without speeds.

    Args:
        saved: the JSON that ``vllm bench serve --save-result --save-detailed`` wrote.
        asked: the questions, in order; none for random tokens.
    """
    correct = 0
    if asked and len(saved["generated_texts"]) == len(asked):
        correct = num_correct(asked, saved["generated_texts"])
    one = Measurement(
        contestant,
        pair,
        num_requests=workload.num_requests,
        num_correct=correct if asked else None,
    )
    if problem := run_problem(commits, saved, workload):
        return replace(one, problem=problem)
    passes = count_passes(commits, saved, workload)
    blocks, denoise = passes.num_blocks, passes.num_denoise
    latencies, passes_after_prefill = saved["latencies"], passes.num_forward - passes.num_prompt
    drafts = saved.get("spec_decode_num_drafts", 0)  # steps that verified some
    num_tokens = sum(saved["output_lens"])
    return replace(
        one,
        tokens_per_s=saved["output_throughput"],
        ttft_ms=1e3 * statistics.median(saved["ttfts"]),
        latency_ms=1e3 * statistics.median(latencies),
        latency_p99_ms=1e3 * float(np.percentile(latencies, 99)),
        ms_per_denoise_step=1e3 * sum(latencies) / denoise if denoise else None,
        steps_per_block=denoise / blocks if blocks and denoise else None,
        passes_per_block=passes_after_prefill / blocks if blocks else None,
        tokens_per_pass=num_tokens / passes.num_forward,
        acceptance_length=1 + saved["spec_decode_accepted_tokens"] / drafts if drafts else None,
    )


def csv_rows(
    measured: Sequence[tuple[Workload, Measurement]], provenance: Mapping[str, str]
) -> list[dict[str, object]]:
    """One row a run: workload, numbers, provenance."""
    return [
        {
            "schedule": workload.schedule,
            "concurrency": workload.concurrency,
            "rate": workload.rate,
            "canvas_length": workload.shape.canvas_length,
            **asdict(one),
            **provenance,
        }
        for workload, one in measured
    ]

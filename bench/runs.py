"""One run of ``vllm bench serve``, and its numbers.

Definitions:

    canvas passes    forward passes of a request that held a canvas, from the server's own counter:
                     canvas positions evaluated / canvas length. The built-in's commit passes are
                     among them, because it schedules a canvas for them.
    denoise steps    canvas passes without the built-in's commit passes
    passes per block canvas passes and commit passes / blocks. Overlapped commits take none; with
                     asynchronous scheduling the server counts ours (`dllm:commit_passes`). Those
                     of the option `"commit": "separate"` are not counted
    TTFT             time to first token, of a diffusion model: to its first block
    latency          end to end, of one request, from when it is sent
    ms per denoise step  latencies of all requests / their denoise steps: what a step costs the one
                     who waits, with prefill, commits, and waiting for a place in the batch
    acceptance length  tokens per step of a request that verified drafts, the target's own included
    tokens per pass  output tokens / forward passes behind prompts, of one request
    tokens/s         output tokens / wall time of the run, as ``vllm bench serve`` prints it

``vllm bench serve`` itself takes one commit pass a block off the canvas passes, which for ours
removes a denoise step; its ``diffusion_steps_per_canvas`` is therefore not used.
"""

import asyncio
import contextlib
import io
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np

from bench.context import Row
from bench.toys.suite import Question
from bench.workloads import ANSWER_TOKENS, FIXED, Workload

TIMEOUT_S = 600
# How a server commits blocks, which decides how its passes are counted: in passes of canvases, or
# in passes that its counter takes for canvases'. Uncounted: engines without HTTP; and canvases that
# are the rest of a block, of whose many widths the counters say only the sum.
OVERLAPPED, BUILTIN_PASSES, NO_CANVAS, UNCOUNTED = "overlapped", "built-in", "none", "uncounted"
SPEEDS = ("tokens_per_s", "ttft_ms", "latency_ms", "latency_p99_ms", "ms_per_denoise_step")
FIGURES = (*SPEEDS, "steps_per_block", "passes_per_block", "tokens_per_pass", "acceptance_length")


def bench_serve(url: str, model: str, flags: Sequence[str]) -> dict[str, Any]:
    """What ``vllm bench serve`` saves in detail; it runs in this process, which imports it once.

    Raises RuntimeError: it failed, or took more than ``TIMEOUT_S``.
    """
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    line = ["--base-url", url, "--model", model, *flags, "--disable-tqdm", "--save-detailed"]
    running = asyncio.wait_for(serve.main_async(parser.parse_args(line)), TIMEOUT_S)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return asyncio.run(running)
        except (OSError, ValueError, aiohttp.ClientError) as error:
            raise RuntimeError(f"vllm bench serve {shlex.join(flags)}: {error!r}") from error


def figures(
    commits: str, saved: Mapping[str, Any], workload: Workload, asked: Sequence[Question] = ()
) -> Row:
    """The figures of one run; those of a wrong one are None, and ``problem`` says what is wrong.

    ``commits``: one of the constants above. ``saved``: the JSON of ``vllm bench serve``. ``asked``:
    the questions, in order; none for random tokens.
    """
    row: Row = {"num_requests": workload.num_requests, **dict.fromkeys(FIGURES)}
    texts = saved["generated_texts"]
    right = sum(one.is_correct(text) for one, text in zip(asked, texts, strict=False))
    row |= {"num_correct": right if asked else None, "problem": ""}
    blocks, denoise, passes = count_passes(commits, saved, workload)
    if problem := run_problem(commits, saved, workload, denoise / blocks if blocks else 0.0):
        return row | {"problem": problem}
    drafts = saved.get("spec_decode_num_drafts", 0)  # steps that verified some
    latencies, firsts = saved["latencies"], saved.get("ttfts")
    row |= {
        "tokens_per_s": saved["output_throughput"],
        "ttft_ms": 1e3 * statistics.median(firsts) if firsts else None,
        "latency_ms": 1e3 * statistics.median(latencies),
        "latency_p99_ms": 1e3 * float(np.percentile(latencies, 99)),
    }
    accepted, num_tokens = saved.get("spec_decode_accepted_tokens", 0), sum(saved["output_lens"])
    if drafts:
        row["acceptance_length"] = 1 + accepted / drafts
    # A step writes one token and the drafts that it accepts. Drafts behind an answer's end count as
    # accepted, too: with self-speculation there are more of them than tokens.
    if commits == NO_CANVAS and accepted < num_tokens:
        row["tokens_per_pass"] = num_tokens / (num_tokens - accepted)
    if blocks and denoise:
        row["ms_per_denoise_step"] = 1e3 * sum(latencies) / denoise
        row |= {"steps_per_block": denoise / blocks, "passes_per_block": passes / blocks}
        row["tokens_per_pass"] = num_tokens / passes
    return row


def count_passes(
    commits: str, saved: Mapping[str, Any], workload: Workload
) -> tuple[int, float, float]:
    """Blocks of a run, and its denoise steps and passes behind prompts; zeros if nobody counts."""
    if "denoise_steps" in saved:  # what runs without a server counts its own
        return saved["blocks"], saved["denoise_steps"], saved["denoise_steps"]
    if commits in (NO_CANVAS, UNCOUNTED) or "diffusion_canvas_positions" not in saved:
        return 0, 0.0, 0.0
    lengths, width = saved["output_lens"], workload.shape.canvas_length
    blocks = sum(math.ceil(length / width) for length in lengths)
    canvas_passes = saved["diffusion_canvas_positions"] / width
    if commits == BUILTIN_PASSES:
        return blocks, canvas_passes - blocks, canvas_passes
    commit_passes = 0.0
    if saved.get("commit_passes"):  # of all requests, those that warm it up included
        emitted = saved["diffusion_num_committed_tokens"] / width
        commit_passes = blocks * saved["commit_passes"] / emitted
    return blocks, canvas_passes, canvas_passes + commit_passes


def run_problem(commits: str, saved: Mapping[str, Any], workload: Workload, steps: float) -> str:
    """The first thing that is wrong with a run's form. ``steps``: denoise steps of a block."""
    wanted, lengths = workload.num_requests, saved["output_lens"]
    if saved["completed"] != wanted or saved["failed"]:
        errors = sorted({error for error in saved.get("errors", []) if error})
        return f"{saved['completed']} of {wanted} requests succeeded: {errors}"
    if workload.schedule != FIXED:
        if bad := [length for length in lengths if not 0 < length <= ANSWER_TOKENS]:
            return f"answers of {bad} tokens; allowed: 1 to {ANSWER_TOKENS}"
    elif bad := [length for length in lengths if length != workload.shape.output_len]:
        return f"{bad} tokens instead of {workload.shape.output_len}"
    if commits in (NO_CANVAS, UNCOUNTED):
        return ""
    if not steps:
        return "no diffusion counters: is this a diffusion model?"
    if workload.steps_per_block is not None and steps != workload.steps_per_block:
        return (
            f"{steps:.3f} denoise steps per block instead of {workload.steps_per_block}: "
            "not the same work as the others'"
        )
    return ""

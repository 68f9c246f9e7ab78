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

import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.context import Row
from bench.servers import child_environment, tail
from bench.toys.suite import Question
from bench.workloads import ANSWER_TOKENS, FIXED, Workload

TIMEOUT_S = 600
# What `vllm bench serve` imports, lazily, from main().
PRELOADED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.run_batch",
    "vllm.entrypoints.cli.collect_env",
    "vllm.benchmarks.serve",
)
# How a server commits blocks, which decides how its passes are counted: in passes of canvases, or
# in passes that its counter takes for canvases'. Uncounted: engines without HTTP; and canvases that
# are the rest of a block, of whose many widths the counters say only the sum.
OVERLAPPED, BUILTIN_PASSES, NO_CANVAS, UNCOUNTED = "overlapped", "built-in", "none", "uncounted"
TRANSFORMERS, PIPELINE = "transformers", "diffusers"  # whose answers, without a server
SPEEDS = ("tokens_per_s", "ttft_ms", "latency_ms", "latency_p99_ms", "ms_per_denoise_step")
FIGURES = (*SPEEDS, "steps_per_block", "passes_per_block", "tokens_per_pass", "acceptance_length")


# --- driving -------------------------------------------------------------------------------------


class Client:
    """Runs one thing at a time; ``folder`` gets a log and a result of each.

    ``vllm bench serve`` takes longer to import vLLM than most runs here take. So a process imports
    it once and is forked for every run (multiprocessing's forkserver); what runs in the fork is the
    ``vllm`` command's own main function with the arguments of a command line.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ.update(child_environment())  # the fork server inherits it once, when it starts
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))

    def bench_serve(self, name: str, url: str, model: str, flags: Sequence[str]) -> dict[str, Any]:
        """What it saved (``--save-detailed``). Raises RuntimeError, with the end of its log."""
        line = ["vllm", "bench", "serve", "--base-url", url, "--model", model, *flags]
        line += ["--disable-tqdm", "--save-result", "--save-detailed"]
        line += ["--result-dir", str(self.folder), "--result-filename", f"{name}.json"]
        return self.call(name, run_vllm, line)

    def call(self, name: str, function: Callable[..., None], *arguments: object) -> dict[str, Any]:
        """Run ``function(*arguments)`` in a fork and read the ``<name>.json`` that it wrote.

        Raises RuntimeError: it failed, took more than ``TIMEOUT_S``, or wrote nothing.
        """
        log, result = self.folder / f"{name}.log", self.folder / f"{name}.json"
        log.touch()
        result.unlink(missing_ok=True)  # of another contestant, whose name is nearly the same
        process = self._context.Process(target=_logged, args=(log, function, arguments))
        process.start()
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
            raise RuntimeError(f"{name} took more than {TIMEOUT_S} s:\n{tail(log)}")
        if process.exitcode or not result.exists():
            raise RuntimeError(f"{name} failed with code {process.exitcode}:\n{tail(log)}")
        saved: dict[str, Any] = json.loads(result.read_text())
        return saved


def run_vllm(line: list[str]) -> None:
    sys.argv = line
    from vllm.entrypoints.cli.main import main

    main()


def _logged(log: Path, function: Callable[..., None], arguments: Sequence[object]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    function(*arguments)


def answer_questions(
    whose: str, model: Path, asked: Sequence[Question], max_tokens: int, result: Path
) -> None:
    """Answer one question after the other, and write what ``vllm bench serve`` would have saved.

    Of that, what ``figures`` reads; beside it ``denoise_steps`` and ``blocks``. The first
    question is asked once more before the clock starts.
    """
    from bench import llada2_pipeline
    from bench.toys.reference import Generated, MaskedReference, open_reference

    class Pipeline(MaskedReference):
        def generate(self, ids: list[int], index: int) -> Generated:
            config = json.loads((model / "config.json").read_text())
            masked = llada2_pipeline.BlockMasked(
                self.model, config["block_size"], config["mask_token_id"]
            )
            stop, editing = config["eos_token_id"], self.rule.editing_threshold
            options = {"eos_token_id": stop, "threshold": self.rule.threshold}
            tokens = llada2_pipeline.generate(masked, ids, max_tokens, editing, **options)
            last = len(ids) + (tokens.index(stop) if stop in tokens else max_tokens - 1)
            num_blocks = last // masked.block_size - len(ids) // masked.block_size + 1
            return Generated(tokens, masked.num_passes, num_blocks)

    if whose == PIPELINE:
        reference: Any = Pipeline(model, max_tokens, None)
    else:
        reference = open_reference(model, max_tokens)
    reference.answer(asked[:1])
    ends = [time.perf_counter()]
    run = reference.answer(asked, lambda: ends.append(time.perf_counter()))
    lengths = [answer.num_tokens for answer in run.answers]
    saved = {
        "completed": len(asked),
        "failed": 0,
        "output_throughput": sum(lengths) / (ends[-1] - ends[0]),
        "output_lens": lengths,
        "generated_texts": [answer.text for answer in run.answers],
        "latencies": [end - start for start, end in pairwise(ends)],
        "denoise_steps": run.denoise_steps,
        "blocks": run.blocks,
    }
    result.write_text(json.dumps(saved))


# --- numbers -------------------------------------------------------------------------------------


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

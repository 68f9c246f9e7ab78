"""What a run asks for, what ``vllm bench serve`` finds, and its numbers.

Two schedules, each with the prompts that it makes sense for:

    adaptive    held-out questions of the task suite (``bench/toys/suite.py``), as many of each
                family, as chat messages. Answers end where the model ends them, and blocks stop
                when they converge. Or prompts of a file, for a model that does not know the suite.
    fixed       random tokens, answered with exactly as many tokens as asked for. Every block takes
                the same number of denoise steps, so this measures what a pass costs.

Questions are new in every round, those of another workload are others, and all contestants of a
round get the same.
"""

import asyncio
import contextlib
import functools
import io
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.context import Row
from bench.toys.prompts import write_lines
from bench.toys.suite import FAMILIES, Question, questions
from dllm.prompts.files import json_lines

ADAPTIVE, FIXED = "adaptive", "fixed"
ANSWER_TOKENS = 128  # at most, of an answer to a question; right ones are shorter
NUM_WARMUPS = 2

# Answers to `report` take two canvases of the bundled model. The built-in reads generated blocks in
# another way than the reference, gets a third of them wrong, and would have no speed at all.
ONE_BLOCK = tuple(family for family in FAMILIES if family != "report")
MIXED = "mixed"


@dataclass(frozen=True)
class Shape:
    """Sizes that all workloads of a command share, in tokens; the last two are of random prompts.

    Raises ValueError: ``output_len`` is not a multiple of ``canvas_length``.
    """

    canvas_length: int
    input_len: int
    output_len: int

    def __post_init__(self) -> None:
        if self.output_len % self.canvas_length:
            raise ValueError(
                f"--output-len {self.output_len} must be a multiple of the canvas length "
                f"{self.canvas_length}: a block that is cut costs as much as a whole one."
            )

    @property
    def prompt(self) -> list[int]:
        return [20 + position % 100 for position in range(self.input_len)]


@dataclass(frozen=True)
class Workload:
    schedule: str
    num_requests: int
    shape: Shape
    concurrency: int | None = None  # requests in flight; each answer is followed by the next one
    rate: float | None = None  # instead, requests a second, at random (Poisson)
    steps_per_block: int | None = None  # what every block must take; None leaves it to the model
    families: tuple[str, ...] = ONE_BLOCK  # of the questions
    prompts: Path | None = None  # instead of questions, a file from which a round draws its prompts

    @property
    def family(self) -> str:
        return self.families[0] if len(self.families) == 1 else MIXED

    @property
    def name(self) -> str:
        load = f"{self.rate:g} per s" if self.rate else f"{self.concurrency} at once"
        return f"{self.schedule}{f', {self.family}' * (self.schedule != FIXED)}, {load}"

    def asked(self, seed: int) -> tuple[Question, ...]:
        """The questions of a round; none for random tokens, and for prompts of a file."""
        if self.schedule == FIXED or self.prompts is not None:
            return ()
        return draw_questions(self.num_requests, seed, self.families)

    def client_flags(self, seed: int, dataset: Path) -> list[str]:
        """Flags of ``vllm bench serve``; no sampling parameter, because the built-in refuses them.

        ``seed``: of what is drawn, and of arrival times. ``dataset``: is written unless
        tokens are random; its name has to end in .jsonl.
        """
        shape, rate, at_once = self.shape, self.rate, self.concurrency
        flags: dict[str, object] = {"--num-prompts": self.num_requests, "--seed": seed}
        flags |= {"--num-warmups": NUM_WARMUPS}
        flags |= {"--request-rate": rate} if rate else {"--max-concurrency": at_once}
        if self.schedule != FIXED:
            lines: list[dict[str, Any]] = [{"prompt": one.prompt} for one in self.asked(seed)]
            if self.prompts is not None:  # conversations are nothing that the client reads
                lines = [line for _, line in json_lines(self.prompts) if "prompt" in line]
            write_lines(dataset, lines)
            flags |= {"--backend": "openai-chat", "--endpoint": "/v1/chat/completions"}
            flags |= {"--dataset-name": "custom", "--dataset-path": dataset}
            flags |= {"--custom-output-len": ANSWER_TOKENS}
            switches = ["--skip-chat-template", *["--disable-shuffle"] * (self.prompts is None)]
        else:
            flags |= {"--backend": "openai", "--endpoint": "/v1/completions"}
            flags |= {"--dataset-name": "random", "--random-input-len": shape.input_len}
            flags |= {"--random-output-len": shape.output_len}
            switches = ["--ignore-eos"]
        return [*(str(part) for flag in flags.items() for part in flag), *switches]


@functools.cache
def draw_questions(
    count: int, seed: int, families: tuple[str, ...] = tuple(FAMILIES)
) -> tuple[Question, ...]:
    each, num = math.ceil(count / len(families)), len(families)
    drawn = questions(families, "heldout", each, seed)
    return tuple(drawn[index % num * each + index // num] for index in range(count))


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
    if commits == UNCOUNTED and "diffusion_canvas_positions" in saved:
        # `vllm bench serve` has taken a pass for each canvas off.
        share = saved["diffusion_committed_tokens"] / saved["diffusion_canvas_positions"]
        row["tokens_per_pass"] = num_tokens * (1 - share) / saved["diffusion_denoising_steps"]
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

"""What a denoise step costs in a real engine, and which part of it takes how much of the time.

    python -m bench.profile --server ours built-in --concurrency 1 8 32
    python -m bench.profile --random-60m --input-len 1024 8192 32768 --concurrency 1 \
        --server ours built-in ours built-in ours built-in

Each server is an engine in a process of its own, with its scheduler, worker and client; one that is
named several times is started as often. All blocks take --steps denoise steps. ms a step: wall time
of --blocks + 1 blocks less that of one, so without prompts, divided by their denoise steps; the
median of --rounds. Shares are of one more run, under torch.profiler. A moment belongs to the part
that was entered last and has not returned:

    engine      scheduling, input preparation, what is left of the engine's loop, output
    forward     the backbone, and self-conditioning before it
    head        logits
    sampler     row statistics, accept, renoise, stop, soft embeddings

--random-60m: the released model's shape with 60 million random parameters; writes context_cpu.csv
in place of profile_cpu.csv.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.context import ROOT, Row, Rows, command_line, publish, reporting_failures
from bench.serve import BUILTIN, OURS, write_generation_config
from bench.servers import BUILTIN_ENVIRONMENT, with_engine
from bench.tables import Section, grouped, markdown, spread_of
from bench.toys.tiny import tiny_config, write_checkpoint

PARTS = ENGINE, FORWARD, HEAD, SAMPLER = "engine", "forward", "head", "sampler"
SHAPES = json.loads((ROOT / "bench/shapes.json").read_text())


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "tiny-dllm")
    parser.add_argument("--random-60m", action="store_true", help="instead of --model")
    parser.add_argument("--server", nargs="+", choices=(OURS, BUILTIN), default=[OURS])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=16, help="denoise steps of every block")
    parser.add_argument("--blocks", type=int, default=4, help="of every request, less one")
    parser.add_argument("--input-len", nargs="+", type=int, default=[64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llm", type=json.loads, default={}, help="more arguments of LLM, as JSON")
    options = parser.parse_args(arguments)
    shown = BEHIND_PROMPTS if options.random_60m else STEP_TIME
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="dllm-profile-") as folder:
        if options.random_60m:
            options.model = write_checkpoint(
                Path(folder) / "model", tiny_config(**SHAPES["random-60m"])
            )
        for start, server in enumerate(options.server):
            environment = BUILTIN_ENVIRONMENT if server == BUILTIN else {}
            found = with_engine(measure, options, environment=environment)
            rows += [{"server": server, "start": start} | row for row in found]
            publish(options.results / shown.file, rows)
    print(shown(options.results))
    return 0


def measure(options: argparse.Namespace) -> list[Row]:
    """A row for each load. Raises RuntimeError: an answer is too short."""
    from vllm import LLM

    canvas = json.loads((options.model / "config.json").read_text())["canvas_length"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:  # is read again when requests are made
        generation = Path(folder) / "generation"
        write_generation_config(options.model, generation, options.steps)
        given: dict[str, Any] = {
            "generation_config": str(generation),
            "max_model_len": max(options.input_len) + (options.blocks + 2) * canvas,
            "max_num_seqs": max(options.concurrency),
            "kv_cache_memory_bytes": 256 << 20,
        }
        llm = LLM(str(options.model), **(given | options.llm))
        for load, length in product(options.concurrency, options.input_len):

            def run(blocks: int, load: int = load, length: int = length) -> float:
                return generate_ms(llm, load, length, blocks * canvas)

            run(2)  # compiles, and fills the prefix cache
            steps = options.blocks * options.steps
            times = [(run(options.blocks + 1) - run(1)) / steps for _ in range(options.rounds)]
            with named_parts(llm), profile(activities=[ProfilerActivity.CPU]) as profiled:
                run(options.blocks + 1)
            about = {"concurrency": load, "input_len": length, "step_ms": statistics.median(times)}
            rows.append(about | shares_of(profiled.events()))
    return rows


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


@contextmanager
def named_parts(llm: Any) -> Iterator[None]:
    """While functions of this process' engine core and worker tell the profiler their part."""
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner  # V2, of our model or another
    functions = [
        (llm.llm_engine, "step", ENGINE),
        (runner.model, "forward", FORWARD),
        (runner.model, "compute_logits", HEAD),
        (runner, "sample", SAMPLER),
    ]
    if type(runner.sampler).__module__.startswith("dllm."):
        functions += [
            (runner.model_state, "_condition", FORWARD),
            # The denoise loop prepares inputs inside of the sampler.
            (runner.sampler.loop.forward_of.__self__, "_canvases_alone", ENGINE),
            (runner.model_state, "canvas_attention", ENGINE),
            (runner.model_state, "canvas_inputs", ENGINE),
        ]
    with ExitStack() as stack:
        for owner, name, part in functions:
            told = record_function(part)(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, told))
        yield


def shares_of(events: Sequence[Any]) -> dict[str, float]:
    """The share of each part in the time of all, without the parts that it called."""
    own = dict.fromkeys(PARTS, 0.0)
    for event in events:
        if event.name in PARTS:
            own[event.name] += event.cpu_time_total
            caller = event.cpu_parent
            while caller is not None and caller.name not in PARTS:
                caller = caller.cpu_parent
            if caller is not None:
                own[caller.name] -= event.cpu_time_total
    return {part: time / sum(own.values()) for part, time in own.items()}


def step_times(rows: Rows) -> str:
    """Of the first start of each server."""
    lines = []
    for (server, load), (row, *_) in grouped(rows, "server", "concurrency").items():
        shares = [f"{float(row[part]):.0%}" for part in PARTS]
        lines.append([server, load, f"{float(row['step_ms']):.2f}", *shares])
    return markdown(["", "requests at once", "ms per step", *PARTS], lines)


def behind_prompts(rows: Rows) -> str:
    lines = []
    for (length,), here in grouped(rows, "input_len").items():
        ours, other = (
            [float(row["step_ms"]) for row in here if row["server"] == server]
            for server in (OURS, BUILTIN)
        )
        pairs = [their / own for own, their in zip(ours, other, strict=False)]
        lines.append([length, spread_of(ours, 0), spread_of(other, 0), spread_of(pairs, 2)])
    heads = ["tokens of the prompt", "ours, ms a denoise step", "built-in", "built-in / ours"]
    return markdown(heads, lines)


STEP_TIME = Section("profile_cpu.csv", "python -m bench.profile", step_times)
BEHIND_PROMPTS = Section(
    "context_cpu.csv",
    "python -m bench.profile --random-60m --input-len 1024 8192 32768 --concurrency 1 "
    "--server ours built-in",
    behind_prompts,
)


if __name__ == "__main__":
    sys.exit(main())

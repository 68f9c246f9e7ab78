"""Families with blocks: ours, with fused and with separate commits, and diffusers' pipeline.

    python -m bench.families [--model DIR] [--rounds 5] [--results DIR]

All three generate the same tokens, in fp32: greedy, two denoise steps a block, without editing and
without an early end. A run whose tokens differ fails. The pipeline takes one request at a time and
recomputes the whole sequence in every pass; it is called in this process, without HTTP. Contestants
take turns, and each begins in another round.

Writes ``families.csv``, one row a run.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from bench import pipeline
from bench.context import (
    RESULTS,
    ROOT,
    GateError,
    Rows,
    as_text,
    progress,
    provenance,
    reporting_failures,
    write_csv,
)
from bench.race import in_turn, rounds
from bench.servers import SERVE_FLAGS, Server, ServerOptions
from bench.tables import Table, markdown, ratios, section, spread
from dllm.models.unmasking.reference import load_model

MODEL = ROOT / "checkpoints/tiny-sdar"
FUSED, SEPARATE, PIPELINE = "fused commit", "separate commit", "diffusers' pipeline"
STEPS = 2  # denoise steps a block
PROMPT, OUTPUT = 128, 256  # tokens
FLAGS = (*SERVE_FLAGS, "--dtype", "float32", "--max-num-seqs", "8", "--no-enable-prefix-caching")
BUDGET_S = 900

Prompts = Sequence[Sequence[int]]
# Generates OUTPUT tokens for each prompt, so many at once.
Generate = Callable[[Prompts, int], list[list[int]]]


@dataclass(frozen=True)
class Run:
    """One contestant on one load."""

    contestant: str
    block_size: int
    concurrency: int
    pair: int
    num_requests: int
    tokens_per_s: float


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the CSV file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="a LLaDA2 or SDAR checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[32, 4])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    options = parser.parse_args(arguments)
    if not pipeline.is_installed():
        raise RuntimeError(pipeline.MISSING)
    about = provenance("bench.families")
    runs = []
    for size in options.block_sizes:
        runs += race_of(options.model, size, options.concurrency, options.rounds)
    rows = [vars(run) | about for run in runs]
    write_csv(options.results / "families.csv", rows)
    print(markdown(table(as_text(rows))))
    return 0


def race_of(model: Path, size: int, concurrencies: Sequence[int], num_rounds: int) -> list[Run]:
    """All runs with one block size: two servers, and the pipeline."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {
            name: stack.enter_context(serve(model, name, size, commit, Path(folder)))
            for name, commit in ((FUSED, "overlapped"), (SEPARATE, "separate"))
        }
        contestants = {name: over_http(server) for name, server in servers.items()}
        contestants[PIPELINE] = in_process(model, size)
        for server in servers.values():
            server.wait_until_ready()
        return [
            run
            for concurrency in concurrencies
            for run in race(contestants, size, concurrency, num_rounds, vocabulary(model))
        ]


def serve(model: Path, name: str, size: int, commit: str, folder: Path) -> Server:
    """A server that starts."""
    overrides = ("--hf-overrides", json.dumps({"block_size": size}))
    chosen = (*overrides, "--additional-config", json.dumps({"dllm": {"commit": commit}}))
    options = ServerOptions(name, str(model), (*FLAGS, *chosen))
    server = Server(options, folder / f"{commit}.log")
    server.start()
    return server


def vocabulary(model: Path) -> int:
    """Token ids below this one are words; the mask and the other special tokens lie elsewhere."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"]) - 64


def over_http(server: Server) -> Generate:
    """Ask a server."""
    config = json.loads((Path(server.options.model) / "config.json").read_text())
    can_edit = config["model_type"] == "llada2_moe"
    without_editing = {"diffusion_editing": 0} if can_edit else {}

    def one(prompt: Sequence[int]) -> list[int]:
        answer = server.complete(
            prompt=list(prompt),
            max_tokens=OUTPUT,
            temperature=0,
            ignore_eos=True,
            vllm_xargs={"diffusion_max_steps": STEPS, "diffusion_threshold": 1.0} | without_editing,
        )
        if answer.status != 200:
            raise GateError(f"{server.options.name}: HTTP {answer.status}, {answer.error}")
        return list(answer.token_ids)

    def generate(prompts: Prompts, concurrency: int) -> list[list[int]]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(one, prompts))

    return generate


def in_process(model: Path, size: int) -> Generate:
    """Call diffusers' pipeline, one prompt after the other."""
    config = json.loads((model / "config.json").read_text())
    masked = pipeline.BlockMasked(load_model(model), size, config["mask_token_id"])

    def generate(prompts: Prompts, concurrency: int) -> list[list[int]]:
        return [
            pipeline.generate(
                masked,
                prompt,
                OUTPUT,
                None,
                threshold=1.0,
                num_inference_steps=STEPS,
                eos_early_stop=False,
            )
            for prompt in prompts
        ]

    return generate


def race(
    contestants: dict[str, Generate],
    block_size: int,
    concurrency: int,
    num_rounds: int,
    num_words: int,
) -> list[Run]:
    """The runs of one load; the pipeline takes part where one request is served at a time."""
    racing = {
        name: generate
        for name, generate in contestants.items()
        if concurrency == 1 or name != PIPELINE
    }
    draw = random.Random(0)
    prompts = [[draw.randrange(num_words) for _ in range(PROMPT)] for _ in range(8 * concurrency)]
    expected: list[list[int]] = []
    runs = []
    for generate in racing.values():  # loads and compiles what it needs
        generate(prompts[:concurrency], concurrency)
    for pair in rounds(num_rounds, BUDGET_S):
        for name in in_turn(list(racing), pair):
            start = perf_counter()
            tokens = racing[name](prompts, concurrency)
            seconds = perf_counter() - start
            expected = expected or tokens
            if tokens != expected:
                raise GateError(f"{name} generated other tokens than {next(iter(racing))}")
            speed = OUTPUT * len(prompts) / seconds
            runs.append(Run(name, block_size, concurrency, pair, len(prompts), speed))
            progress(str(runs[-1]))
    return runs


# --- table ---------------------------------------------------------------------------------------


def table(rows: Rows) -> Table:
    """One line a load: our speed, and its ratio to the others'."""
    lines = []
    for size, load in dict.fromkeys((row["block_size"], row["concurrency"]) for row in rows):
        raced = [r for r in rows if (r["block_size"], r["concurrency"]) == (size, load)]
        of = {
            name: [r for r in raced if r["contestant"] == name]
            for name in (FUSED, SEPARATE, PIPELINE)
        }
        lines.append(
            [
                f"B = {size}, {load} at once",
                spread(of[FUSED], "tokens_per_s", 0),
                ratios(of[FUSED], of[SEPARATE], "tokens_per_s"),
                ratios(of[FUSED], of[PIPELINE], "tokens_per_s"),
            ]
        )
    return ["", "ours, tokens/s", f"ours / {SEPARATE}", f"ours / {PIPELINE}"], lines


def families(results: Path) -> str:
    """Section of docs/families.md: speed."""
    path, command = results / "families.csv", "python -m bench.families"
    return section(path, command, lambda rows: markdown(table(rows)))


if __name__ == "__main__":
    sys.exit(main())

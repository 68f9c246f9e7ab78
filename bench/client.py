"""Runs ``vllm bench serve``, Hugging Face's ``generate`` and diffusers' pipeline in forks.

``vllm bench serve`` takes longer to import vLLM than most runs here take. So a process imports it
once and is forked for every run (multiprocessing's forkserver); what runs in the fork is the
``vllm`` command's own main function with the arguments of a command line.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.servers import child_environment, tail
from dllm.tasks.suite import Question

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


# (model, questions, max_tokens, path of what a run would have saved)
Answering = Callable[[Path, Sequence[Question], int, Path], None]


class Client:
    """Runs one thing at a time; ``folder`` gets a log and a result of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ.update(child_environment())  # the fork server inherits it once, when it starts
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))

    def bench_serve(self, name: str, url: str, model: str, flags: Sequence[str]) -> dict[str, Any]:
        """What ``vllm bench serve --save-detailed`` saved.

        Raises:
            RuntimeError: it failed; with the end of its log.
        """
        arguments = command(url, model, flags, self.folder, f"{name}.json")
        return self._call(name, run_vllm, arguments)

    def generate(
        self, name: str, answer: Answering, model: Path, asked: Sequence[Question], max_tokens: int
    ) -> dict[str, Any]:
        """What ``answer`` saved; raises as ``bench_serve``."""
        result = self.folder / f"{name}.json"
        return self._call(name, answer, model, asked, max_tokens, result)

    def _call(self, name: str, function: Callable[..., None], *arguments: object) -> dict[str, Any]:
        """Run ``function(*arguments)`` in a fork and read the ``<name>.json`` that it wrote.

        Raises:
            RuntimeError: it failed, took more than ``TIMEOUT_S``, or wrote nothing.
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


def command(url: str, model: str, flags: Sequence[str], folder: Path, filename: str) -> list[str]:
    """The arguments of ``vllm``: a user could type them."""
    fixed = ["--base-url", url, "--model", model, *flags, "--disable-tqdm"]
    saving = ["--save-result", "--save-detailed", "--result-dir", str(folder)]
    return ["bench", "serve", *fixed, *saving, "--result-filename", filename]


# --- in the fork ---------------------------------------------------------------------------------


def run_vllm(arguments: Sequence[str]) -> None:
    """The ``vllm`` command."""
    sys.argv = ["vllm", *arguments]
    from vllm.entrypoints.cli.main import main

    main()


def answer_questions(model: Path, asked: Sequence[Question], max_tokens: int, result: Path) -> None:
    """Answer with Hugging Face's ``generate``, at batch 1, and write what a run would have saved.

    The form is that of ``vllm bench serve --save-detailed``, with ``denoise_steps``, ``blocks``,
    ``forward_passes`` (encoder and decoder, counted by hooks) beside it. The first question is
    asked once more before the clock starts. A block counts as there when the
    encoder begins to read it, and the last one when the answer is complete.
    """
    from dllm.tools.eval_reference import open_reference  # torch and transformers: seconds

    reference = open_reference(model, max_tokens)
    reference.answer(asked[:1], lambda: None)

    encoded: list[float] = []  # when the encoder began
    backbone = reference.model.model
    backbone.encoder.register_forward_pre_hook(lambda *_: encoded.append(time.perf_counter()))
    ends = [time.perf_counter()]
    run = reference.answer(asked, lambda: ends.append(time.perf_counter()))

    first_blocks = []
    for start, end in pairwise(ends):
        _prompt, *blocks = (moment for moment in encoded if start <= moment < end)
        first_blocks.append((blocks[0] if blocks else end) - start)
    counts: dict[str, object] = {
        "denoise_steps": run.denoise_steps,
        "blocks": run.blocks,
        "forward_passes": len(encoded) + (run.denoise_steps or 0),
    }
    lengths = [answer.num_tokens or 0 for answer in run.answers]
    _save(result, ends, lengths, [answer.text for answer in run.answers], first_blocks, counts)


def answer_by_pipeline(
    model: Path, asked: Sequence[Question], max_tokens: int, result: Path
) -> None:
    """Answer with diffusers' pipeline for models with blocks, likewise.

    It recomputes the whole sequence in every pass, and returns an answer when it is complete.
    """
    from transformers import AutoTokenizer

    from bench import pipeline
    from dllm.models.unmasking.reference import load_model

    config = json.loads((model / "config.json").read_text())
    size, tokenizer = config["block_size"], AutoTokenizer.from_pretrained(model)
    masked = pipeline.BlockMasked(load_model(model), size, config["mask_token_id"])

    def answer(question: Question) -> list[int]:
        chat = [{"role": "user", "content": question.prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        tokens = pipeline.generate(masked, prompt, max_tokens, None)
        end = tokens.index(config["eos_token_id"]) + 1 if config["eos_token_id"] in tokens else None
        return tokens[:end]

    answer(asked[0])
    masked.num_passes = 0
    ends, answers = [time.perf_counter()], []
    for question in asked:
        answers.append(answer(question))
        ends.append(time.perf_counter())
    lengths = [len(tokens) for tokens in answers]
    texts = [tokenizer.decode(one, skip_special_tokens=True) for one in answers]
    counts: dict[str, object] = {
        "denoise_steps": masked.num_passes,
        "blocks": sum(-(-length // size) for length in lengths),
        "forward_passes": masked.num_passes,
    }
    whole = [end - start for start, end in pairwise(ends)]
    _save(result, ends, lengths, texts, whole, counts)


def _save(
    result: Path,
    ends: Sequence[float],
    lengths: Sequence[int],
    texts: Sequence[str],
    first_blocks: Sequence[float],
    counts: dict[str, object],
) -> None:
    """Write what a run of ``vllm bench serve`` would have saved.

    Args:
        ends: seconds: when the first answer began, and when each of them was complete.
        lengths, texts, first_blocks: of each answer: tokens, text, seconds to its first block.
    """
    saved = {
        "completed": len(texts),
        "failed": 0,
        "duration": ends[-1] - ends[0],
        "output_throughput": sum(lengths) / (ends[-1] - ends[0]),
        "output_lens": lengths,
        "generated_texts": texts,
        "ttfts": first_blocks,
        "latencies": [end - start for start, end in pairwise(ends)],
    }
    result.write_text(json.dumps(saved | counts))


def _logged(log: Path, function: Callable[..., None], arguments: Sequence[object]) -> None:
    """Run with everything that is printed in a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    function(*arguments)

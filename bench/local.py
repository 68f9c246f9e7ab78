"""Contestants without a server: ``LLM.chat``, Hugging Face's ``generate``, diffusers' pipeline."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from bench import llada2_pipeline
from bench.runs import ANSWER_TOKENS
from bench.toys.suite import Question
from dllm.models.unmasking.reference import DecodingRule, load_model

REFERENCE, PIPELINE = "transformers", "diffusers"


class Generated(NamedTuple):
    tokens: list[int]
    denoise_steps: int
    blocks: int


Generate = Callable[[list[int]], Generated]  # the answer to a prompt, whole blocks of it


def chat(
    model: str, flags: Sequence[str], asked: Sequence[Question], at_once: int
) -> dict[str, Any]:
    """Answer questions, ``at_once`` in each call of ``LLM.chat``; the first are asked twice.

    ``flags``: of ``vllm serve``. Returns what ``vllm bench serve`` would have found, as far as
    ``runs.figures`` reads it.
    """
    from vllm import LLM, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))
    given.disable_log_stats = True  # as in an ``LLM(...)``
    llm = LLM.from_engine_args(given)
    params = llm.get_default_sampling_params()
    params.max_tokens = ANSWER_TOKENS
    chats = [[{"role": "user", "content": one.prompt}] for one in asked]
    batches = [chats[at : at + at_once] for at in range(0, len(chats), at_once)]
    answers, times = [], []
    for batch in (batches[0], *batches):
        start = time.perf_counter()
        outputs = llm.chat(batch, params, use_tqdm=False)
        times += [time.perf_counter() - start] * len(batch)
        answers += [output.outputs[0] for output in outputs]
    answers, times = answers[len(batches[0]) :], times[len(batches[0]) :]
    lengths = [len(answer.token_ids) for answer in answers]
    return {
        "completed": len(answers),
        "failed": 0,
        "output_throughput": sum(lengths) / sum(times[::at_once]),
        "output_lens": lengths,
        "generated_texts": [answer.text for answer in answers],
        "latencies": times,
    }


def answer_questions(
    whose: str, path: Path, asked: Sequence[Question], at_once: int
) -> dict[str, Any]:
    """As ``chat``, one question after the other; with ``denoise_steps`` and ``blocks``."""
    assert at_once == 1
    generate, stops = {REFERENCE: hugging_face, PIPELINE: pipeline}[whose](path, ANSWER_TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts, lengths, found, times = [], [], [], []
    for one in (asked[0], *asked):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": one.prompt}], add_generation_prompt=True, return_dict=False
        )
        torch.manual_seed(len(found))
        found.append(generate(ids))
        tokens = found[-1].tokens
        end = next((at for at, token in enumerate(tokens) if token in stops), len(tokens))
        texts.append(tokenizer.decode(tokens[:end], skip_special_tokens=True))
        lengths.append(min(end + 1, len(tokens)))
        times.append(time.perf_counter())
    return {
        "completed": len(asked),
        "failed": 0,
        "output_throughput": sum(lengths[1:]) / (times[-1] - times[0]),
        "output_lens": lengths[1:],
        "generated_texts": texts[1:],
        "latencies": [end - start for start, end in pairwise(times)],
        "denoise_steps": sum(one.denoise_steps for one in found[1:]),
        "blocks": sum(one.blocks for one in found[1:]),
    }


class StepCounter:
    """A streamer, which ``generate`` calls."""

    def __init__(self) -> None:
        self.denoise_steps, self.blocks = 0, -1

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then every finished block."""
        self.blocks += 1

    def put_draft(self, value: torch.Tensor) -> None:
        """The argmax canvas after every denoise step."""
        self.denoise_steps += 1

    def end(self) -> None: ...


def hugging_face(path: Path, max_tokens: int) -> tuple[Generate, Collection[int]]:
    """A DiffusionGemma, by its generation_config.json."""
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype="auto").eval()
    stops = model.generation_config.eos_token_id

    def generate(ids: list[int]) -> Generated:
        counter = StepCounter()
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([ids]), max_new_tokens=max_tokens, streamer=counter
            )
        tokens = output.sequences[0, len(ids) :].tolist()
        return Generated(tokens, counter.denoise_steps, counter.blocks)

    return generate, stops if isinstance(stops, list) else [stops]


def pipeline(path: Path, max_tokens: int) -> tuple[Generate, Collection[int]]:
    """A model of masked blocks, in fp32, greedily, by the rule of a server."""
    rule, config = DecodingRule.of_checkpoint(path), json.loads((path / "config.json").read_text())
    size, stop = config["block_size"], config["eos_token_id"]
    model = llada2_pipeline.BlockMasked(load_model(path), size, config["mask_token_id"])
    options = {"eos_token_id": stop, "threshold": rule.threshold}

    def generate(ids: list[int]) -> Generated:
        before = model.num_passes
        tokens = llada2_pipeline.generate(model, ids, max_tokens, rule.editing_threshold, **options)
        last = len(ids) + (tokens.index(stop) if stop in tokens else max_tokens - 1)
        return Generated(tokens, model.num_passes - before, last // size - len(ids) // size + 1)

    return generate, rule.stop_ids

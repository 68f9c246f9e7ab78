"""Contestants without a server: ``LLM.chat``, Hugging Face's ``generate``, diffusers' pipeline.

The set-up has diffusers in a folder of its own, off Python's path (`make test` installs it).
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion, PreTrainedModel

from bench.loops import Generate, plain_loop
from bench.runs import ANSWER_TOKENS
from bench.toys.suite import Question
from dllm.models.unmasking.reference import DecodingRule, Generated, load_model

REFERENCE, PIPELINE, LOOP = "transformers", "diffusers", "loop"
DIFFUSERS = Path(os.environ.get("DLLM_DIFFUSERS", Path(sys.prefix) / "diffusers"))
MISSING = f"needs diffusers in {DIFFUSERS} (make test installs it)"


def chat(
    model: str, flags: Sequence[str], asked: Sequence[Question], at_once: int
) -> dict[str, Any]:
    """Answer questions twice, ``at_once`` in each call of ``LLM.chat``; the second time counts.

    The first time an engine compiles for sizes of batches. ``flags``: of ``vllm serve``.
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
    for batch in (*batches, *batches):
        start = time.perf_counter()
        outputs = llm.chat(batch, params, use_tqdm=False)
        times += [time.perf_counter() - start] * len(batch)
        answers += [output.outputs[0] for output in outputs]
    answers, times = answers[len(asked) :], times[len(asked) :]
    texts, lengths = [one.text for one in answers], [len(one.token_ids) for one in answers]
    return saved(texts, lengths, times, sum(times[::at_once]))


def saved(
    texts: list[str], lengths: list[int], latencies: list[float], seconds: float
) -> dict[str, Any]:
    """What ``vllm bench serve`` would have saved, as far as ``runs.figures`` reads it."""
    return {
        "completed": len(texts),
        "failed": 0,
        "output_throughput": sum(lengths) / seconds,
        "output_lens": lengths,
        "generated_texts": texts,
        "latencies": latencies,
    }


def answer_questions(
    whose: str, path: Path, asked: Sequence[Question], at_once: int
) -> dict[str, Any]:
    """As ``chat``, with ``denoise_steps`` and ``blocks``; only ``LOOP`` takes several at once."""
    ways = {REFERENCE: hugging_face, PIPELINE: pipeline, LOOP: plain_loop}
    generate, stops = ways[whose](path, ANSWER_TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts, lengths, times = [], [], []
    found: list[Generated] = []
    chats = [[{"role": "user", "content": one.prompt}] for one in asked]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    batches = [prompts[at : at + at_once] for at in range(0, len(prompts), at_once)]
    for batch in (batches[0], *batches):
        torch.manual_seed(len(found))
        start = time.perf_counter()
        found.append(generate(batch))
        for tokens in found[-1].answers:
            end = next((at for at, token in enumerate(tokens) if token in stops), len(tokens))
            texts.append(tokenizer.decode(tokens[:end], skip_special_tokens=True))
            lengths.append(min(end + 1, len(tokens)))
        times += [time.perf_counter() - start] * len(batch)
    first = len(batches[0])
    seconds = sum(times[first::at_once])
    return saved(texts[first:], lengths[first:], times[first:], seconds) | {
        "denoise_steps": sum(one.num_steps for one in found[1:]),
        "blocks": sum(one.num_blocks for one in found[1:]),
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

    def generate(prompts: list[list[int]]) -> Generated:
        counter = StepCounter()
        with torch.inference_mode():
            output = model.generate(
                torch.tensor(prompts), max_new_tokens=max_tokens, streamer=counter
            )
        answers = output.sequences[:, len(prompts[0]) :].tolist()
        return Generated(answers, counter.denoise_steps, counter.blocks)

    return generate, stops if isinstance(stops, list) else [stops]


def pipeline(path: Path, max_tokens: int) -> tuple[Generate, Collection[int]]:
    """A model of masked blocks, in fp32, greedily, by the rule of a server."""
    rule, config = DecodingRule.of_checkpoint(path), json.loads((path / "config.json").read_text())
    size, stop = config["block_size"], config["eos_token_id"]
    model = BlockMasked(load_model(path), size, config["mask_token_id"])
    options = {"eos_token_id": stop, "threshold": rule.threshold}

    def generate(prompts: list[list[int]]) -> Generated:
        (ids,), before = prompts, model.num_passes
        tokens = generate_blocks(model, ids, max_tokens, rule.editing_threshold, **options)
        last = len(ids) + (tokens.index(stop) if stop in tokens else max_tokens - 1)
        return Generated([tokens], model.num_passes - before, last // size - len(ids) // size + 1)

    return generate, rule.stop_ids


def is_installed() -> bool:
    return DIFFUSERS.exists()


def diffusers() -> Any:
    if str(DIFFUSERS) not in sys.path:
        sys.path.append(str(DIFFUSERS))
    return importlib.import_module("diffusers")


class BlockMasked(torch.nn.Module):
    """What the pipeline calls: a model that sees everything so far, without a cache.

    The released LLaDA2 makes its block mask by itself; the pipeline passes only which positions are
    padding (0). As in the server, a mask is never an answer.
    """

    def __init__(self, model: PreTrainedModel, block_size: int, mask_token_id: int) -> None:
        super().__init__()
        self.model, self.block_size, self.mask_token_id = model, block_size, mask_token_id
        self.config = SimpleNamespace()
        self.num_passes = 0
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def forward(
        self, ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> SimpleNamespace:
        """Logits ``[1, length, vocab]``."""
        self.num_passes += 1
        block = position_ids[0] // self.block_size
        is_seen = (block[None, :] <= block[:, None]) & (attention_mask[0] != 0)[None, :]
        mask = torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        logits = self.model(
            input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False
        ).logits.float()
        logits[..., self.mask_token_id] = -1e9
        return SimpleNamespace(logits=logits)


def generate_blocks(
    model: BlockMasked,
    prompt: Sequence[int],
    max_tokens: int,
    editing_threshold: float | None,
    **options: Any,
) -> list[int]:
    """``max_tokens`` tokens; greedy unless ``options`` of the pipeline say otherwise."""
    block_size = model.block_size
    pipeline = diffusers().LLaDA2Pipeline(
        model=model,
        scheduler=diffusers().BlockRefinementScheduler(block_length=block_size),
        tokenizer=None,
    )
    pipeline.set_progress_bar_config(disable=True)
    greedy = {"temperature": 0.0, "sampling_method": "greedy", "num_inference_steps": block_size}
    output = pipeline(
        input_ids=torch.tensor([list(prompt)]),
        gen_length=max_tokens,
        block_length=block_size,
        editing_threshold=editing_threshold,
        mask_token_id=model.mask_token_id,
        output_type="seq",
        use_chat_template=False,
        **{**greedy, **options},
    )
    tokens: list[int] = output.sequences[0].tolist()
    return tokens

"""What answers without a server: Hugging Face's ``generate``, and diffusers' LLaDA2Pipeline.

The set-up has diffusers in a folder of its own, off Python's path (`make test` installs it).
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from dllm.tasks.suite import Question

DIFFUSERS = Path(os.environ.get("DLLM_DIFFUSERS", Path(sys.prefix) / "diffusers"))
MISSING = f"needs diffusers in {DIFFUSERS} (make test installs it)"
TRANSFORMERS, PIPELINE = "transformers", "diffusers"  # whose answers


def answer_questions(
    whose: str, model: Path, asked: Sequence[Question], max_tokens: int, result: Path
) -> None:
    """Answer one question after the other, and write what ``vllm bench serve`` would have saved.

    Of that, what ``runs.figures`` reads; beside it ``denoise_steps`` and ``blocks``. The first
    question is asked once more before the clock starts.
    """
    from dllm.tools.eval_reference import Generated, MaskedReference, open_reference

    class Pipeline(MaskedReference):
        """Answers by the pipeline, which recomputes the whole sequence in every pass."""

        def generate(self, ids: list[int], index: int) -> Generated:
            config = json.loads((model / "config.json").read_text())
            masked = BlockMasked(self.model, config["block_size"], config["mask_token_id"])
            tokens = generate(masked, ids, max_tokens, None, eos_token_id=config["eos_token_id"])
            return Generated(tokens, masked.num_passes, -(-len(tokens) // masked.block_size))

    if whose == PIPELINE:
        reference: Any = Pipeline(model, max_tokens, None)
    else:
        reference = open_reference(model, max_tokens)
    reference.answer(asked[:1], lambda: None)
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


# --- diffusers' pipeline on a Hugging Face model: the reference for decoding ----------------------


def is_installed() -> bool:
    """Whether the folder is there."""
    return DIFFUSERS.exists()


def diffusers() -> Any:
    """The package."""
    if str(DIFFUSERS) not in sys.path:
        sys.path.append(str(DIFFUSERS))
    return importlib.import_module("diffusers")


class BlockMasked(torch.nn.Module):
    """What the pipeline calls: a model that sees everything so far, without a cache.

    The released LLaDA2 makes its block mask by itself; the pipeline passes only which positions are
    padding (0). As in the server, a mask is never an answer.

    Attributes:
        num_passes: how often it was called.
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


def generate(
    model: BlockMasked,
    prompt: Sequence[int],
    max_tokens: int,
    editing_threshold: float | None,
    **options: Any,
) -> list[int]:
    """The tokens that the pipeline generates, ``max_tokens`` of them.

    options: of the pipeline; greedy unless they say otherwise.
    """
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

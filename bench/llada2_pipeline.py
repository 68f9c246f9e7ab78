"""diffusers' LLaDA2Pipeline on a Hugging Face model: the reference for decoding.

The set-up has diffusers in a folder of its own, off Python's path (`make test` installs it). The
benchmark of serving has it as a contestant, too.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

DIFFUSERS = Path(os.environ.get("DLLM_DIFFUSERS", Path(sys.prefix) / "diffusers"))
MISSING = f"needs diffusers in {DIFFUSERS} (make test installs it)"


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


def generate(
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

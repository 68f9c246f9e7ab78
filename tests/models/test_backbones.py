"""vLLM's backbones of families with masks compute what transformers' do, in every denoise step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from dllm.models.unmasking.reference import DecodingRule, load_model
from tests.support.engine_harness import DenoiseStep, get_engine, relative_error
from tests.support.family_checkpoints import (
    A2D_QWEN2,
    A2D_QWEN3,
    FAST_DLLM,
    LLADA2,
    NEMOTRON,
    SDAR,
    SDAR_MOE,
    STABLE_DIFFCODER,
    write,
)
from tests.support.masked_pass import logits_of

# Of the largest logit. Sums of 64 to 96 fp32 products in another order differ by less than this;
# a head that sees one token less than its block differs by more than 1e-2.
TOLERANCE = 1e-4

KINDS: dict[str, dict[str, Any]] = {
    "llada2": LLADA2,
    "llada2-4": LLADA2 | {"block_size": 4, "topk_group": 4},
    "sdar-moe": SDAR_MOE | {"block_size": 8},
    "sdar-4": SDAR,
    "sdar-32": SDAR | {"block_size": 32},
    "sdar-tied": SDAR | {"tie_word_embeddings": True},
    "a2d-0.6b": A2D_QWEN3,
    "a2d-0.5b": A2D_QWEN2,
    "diffcoder": STABLE_DIFFCODER,
    "fast-dllm-8": FAST_DLLM | {"bd_size": 8},
    "nemotron-32": NEMOTRON,
}


def worst(
    model: Any, prompt: list[int], tokens: list[int], steps: list[DenoiseStep], rule: DecodingRule
) -> float:
    """Largest difference over all steps of a request, in units of the largest logit."""
    found = 0.0
    for step in steps:
        start = step.canvas_start
        ids = (prompt + tokens)[:start] + step.canvas
        theirs = logits_of(model, ids, start, rule.block_size, rule.is_shifted)[start:]
        theirs[:, rule.mask_token_id] = -torch.inf  # as served
        found = max(found, relative_error(step.logits, theirs))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_denoise_step(kind: str, tmp_path: Path) -> None:
    """Prompts in chunks and with tails, canvases behind them, and blocks that were emitted."""
    path = write(tmp_path / "model", KINDS[kind], seed=3)
    model = load_model(path)
    rule = DecodingRule.of_checkpoint(path)
    size = rule.canvas_length
    engine = get_engine(path, max_num_batched_tokens=4 * size + 64)
    generator = torch.Generator().manual_seed(0)
    lengths = (1, size - 1, size, 2 * size + 3, 150)
    prompts = [torch.randint(10, 800, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(max_tokens=2 * size + 3, temperature=0, ignore_eos=True)
    with engine.watch(keep_logits=True) as watched:
        outputs = engine.outputs(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        steps = watched[output.request_id]
        tokens = list(output.outputs[0].token_ids)
        assert len({step.canvas_start for step in steps}) >= 2, "one block tests no commit"
        assert worst(model, prompt, tokens, steps, rule) < TOLERANCE

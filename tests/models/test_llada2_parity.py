"""Served answers against diffusers' LLaDA2Pipeline, token for token, on random weights in fp32.

The model of the reference is Hugging Face's own (Glm4Moe for LLaDA2, Qwen3 for SDAR); the pipeline
recomputes the whole sequence in every pass, while the server has a KV cache, reads the prompt in
blocks and commits each block with the next canvas.
"""

import functools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from bench import local
from dllm.models.unmasking.reference import load_model
from tests.support import family_checkpoints
from tests.support.engine_harness import Engine, get_engine
from tests.support.llada2_pipeline import AllVisible
from tests.support.masked_pass import random_prompts

pytestmark = pytest.mark.skipif(not local.is_installed(), reason=local.MISSING)
# Every length modulo 4; with blocks of 32 those around their ends.
LENGTHS = {4: [1, 2, 3, 4, 41, 42, 43, 44], 32: [1, 17, 31, 32, 33, 47, 63, 64, 65]}
THRESHOLD = 0.4


class Pair:
    """One checkpoint, served and in the pipeline."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        family_checkpoints.write(path, config)
        self.block_size = config["block_size"]
        self.engine: Engine = get_engine(path, max_num_batched_tokens=256)
        self.reference = local.BlockMasked(
            load_model(path), self.block_size, family_checkpoints.MASK
        )
        self._generate = functools.cache(partial(local.generate_blocks, self.reference))

    def expected(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
        """What the pipeline gives, asked once: most tests want the same answers."""
        options = {"threshold": THRESHOLD, "eos_early_stop": False, "eos_token_id": None} | options
        return self._generate(tuple(prompt), max_tokens, **options)

    def served(self, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
        return self.all_served([prompt], [max_tokens], **options)[0]

    def all_served(
        self, prompts: list[list[int]], max_tokens: list[int], **options: Any
    ) -> list[list[int]]:
        """Answers of these lengths, from a server with an empty prefix cache."""
        extra = {"diffusion_threshold": THRESHOLD} | options.pop("extra_args", {})
        greedy = dict(temperature=0, ignore_eos=True, extra_args=extra)
        params = [SamplingParams(max_tokens=most, **greedy, **options) for most in max_tokens]
        self.engine.reset_prefix_cache()
        return self.engine.generate(prompts, params)


@pytest.fixture(scope="module", params=sorted(LENGTHS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    config = family_checkpoints.LLADA2 | {"block_size": request.param}
    return Pair(tmp_path_factory.mktemp("llada2") / "model", config)


def prompts(block_size: int) -> list[list[int]]:
    return random_prompts(LENGTHS[block_size], seed=block_size)


@pytest.mark.parametrize("editing_threshold", [None, 0.3])
def test_decoding_is_that_of_diffusers(pair: Pair, editing_threshold: float | None) -> None:
    editing = {"diffusion_editing": 0} if editing_threshold is None else {
        "diffusion_editing": 1, "diffusion_editing_threshold": editing_threshold,
    }  # fmt: skip
    given = prompts(pair.block_size)
    lengths = [3 * pair.block_size - len(prompt) % pair.block_size for prompt in given]
    answers = pair.all_served(given, lengths, extra_args=editing)
    for prompt, num_tokens, answer in zip(given, lengths, answers, strict=True):
        expected = pair.expected(prompt, num_tokens, editing_threshold=editing_threshold)
        assert answer == expected, len(prompt)


@pytest.mark.parametrize("editing_threshold", [None, 0.3])
def test_it_ends_where_diffusers_ends(pair: Pair, editing_threshold: float | None) -> None:
    """`eos_early_stop`: a block ends when no mask is left in front of an end-of-sequence token."""
    editing = {"diffusion_editing": 0} if editing_threshold is None else {
        "diffusion_editing": 1, "diffusion_editing_threshold": editing_threshold,
    }  # fmt: skip
    for prompt in prompts(pair.block_size)[::2]:
        num_tokens = 3 * pair.block_size - len(prompt) % pair.block_size
        whole = pair.expected(prompt, num_tokens, editing_threshold=editing_threshold)
        stop = next(token for token in whole[num_tokens // 2 :] if token not in prompt)
        expected = pair.expected(
            prompt, num_tokens, editing_threshold=editing_threshold,
            eos_early_stop=True, eos_token_id=stop,
        )  # fmt: skip
        served = pair.served(prompt, num_tokens, extra_args=editing, stop_token_ids=[stop])
        if stop in expected:
            expected = expected[: expected.index(stop) + 1]
        assert served == expected, len(prompt)


def test_fewer_steps_are_spread_as_in_diffusers(pair: Pair) -> None:
    for steps in (1, 2, 3):
        prompt = prompts(pair.block_size)[-1]
        num_tokens = 3 * pair.block_size - len(prompt) % pair.block_size
        expected = pair.expected(
            prompt, num_tokens, editing_threshold=None, num_inference_steps=steps, threshold=1.0
        )
        extra = {"diffusion_max_steps": steps, "diffusion_threshold": 1.0}
        assert pair.served(prompt, num_tokens, extra_args=extra) == expected, steps


def test_a_length_that_ends_within_a_block_is_the_start_of_the_whole_block(pair: Pair) -> None:
    """Where the pipeline differs: it hides what follows the asked length from attention.

    The last block of a shorter answer then sees less. With everything visible, as the released
    model's own `generate` has it, the shorter answer is the start of the longer one, here and in
    the pipeline.
    """
    visible = AllVisible(pair.reference)
    for prompt in prompts(pair.block_size)[1::3]:
        num_tokens = 3 * pair.block_size - len(prompt) % pair.block_size
        short = num_tokens - pair.block_size // 2 + 1
        options = dict(threshold=THRESHOLD, eos_early_stop=False, eos_token_id=None)
        expected = local.generate_blocks(visible, prompt, short, None, **options)
        assert pair.served(prompt, short) == expected
        assert pair.served(prompt, num_tokens)[:short] == expected


@pytest.mark.parametrize("block_size", [4, 32])
@pytest.mark.parametrize("config", ["SDAR", "SDAR_MOE"])
def test_sdar_is_the_same_rule_without_editing(
    config: str, block_size: int, tmp_path: Path
) -> None:
    """`low_confidence_dynamic`, on Qwen3 and Qwen3-MoE."""
    fields = getattr(family_checkpoints, config) | {"block_size": block_size}
    pair = Pair(tmp_path / "model", fields)
    for prompt in prompts(block_size)[::3]:
        num_tokens = 2 * block_size - len(prompt) % block_size
        expected = pair.expected(prompt, num_tokens, editing_threshold=None)
        assert pair.served(prompt, num_tokens) == expected, len(prompt)

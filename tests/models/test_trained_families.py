"""The trained models of masks: an engine and the plain loop give the same answers."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from vllm import SamplingParams

from bench.toys.suite import FAMILIES, questions
from dllm.models.unmasking.reference import DecodingRule, generate_blocks, load_model
from tests.support.engine_harness import get_engine
from tests.support.toy_prompts import encode_prompt

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"


# LLaDA2 first: vLLM makes the process group of experts with the first engine only.
@pytest.mark.parametrize("size", [32, 4])
@pytest.mark.parametrize("name", ["tiny-llada2", "tiny-sdar", "tiny-nemotron"])
def test_served_tokens_are_those_of_the_plain_loop(name: str, size: int) -> None:
    """Greedy, in fp32, every family; LLaDA2 edits."""
    path = CHECKPOINTS / name
    rule = DecodingRule.of_checkpoint(path)
    is_causal = rule.block_size == 1
    rule = replace(rule, block_size=1 if is_causal else size, canvas_length=size)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    asked = [q for family in FAMILIES for q in questions([family], "heldout", 3)]
    prompts = [encode_prompt(tokenizer, question.prompt) for question in asked]
    engine = get_engine(path, hf_overrides={"block_size": size}, max_num_batched_tokens=256)
    served = engine.generate(prompts, SamplingParams(max_tokens=128, temperature=0))
    expected = generate_blocks(load_model(path), prompts, rule, 128).answers
    for tokens, whole in zip(served, expected, strict=True):
        assert tokens == whole[: len(tokens)]
        assert tokens[-1] in rule.stop_ids

"""Tiny-A2D and Stable-DiffCoder, token for token, against plain loops on transformers' own classes.

Random weights in fp32, the released names, and nothing asked for but greedy answers. The loops are
written after the references: ``BD3LMSampler`` of ZHZisZZ/dllm, and ``generate_block`` of
Stable-DiffCoder's remote code. They compute the whole sequence in every step, under a 4-D mask.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams

from dllm.models.unmasking.reference import load_model
from tests.support import family_checkpoints as families
from tests.support.engine_harness import Engine, get_engine
from tests.support.masked_pass import Answer, Choose, decoded, random_prompts, sure, surest


class Kind(NamedTuple):
    """A model, and how its reference decodes it."""

    config: dict[str, Any]
    backbone: str
    size: int
    mask: int
    choose: Choose
    lengths: list[int]


# Tiny-A2D: so many of the surest in each step. Stable-DiffCoder: all that are sure.
ONE_BY_ONE = surest([1] * 32)
# Tied, unlike the released one: embeddings of this size give probabilities around the threshold.
DIFFCODER = families.STABLE_DIFFCODER | {"tie_word_embeddings": True}
# Every length modulo 4; with blocks of 32 those around their ends.
SHORT, LONG = [1, 2, 3, 4, 41, 42, 43, 44], [1, 17, 31, 32, 33, 64]
KINDS = {
    "a2d-0.6b": Kind(families.A2D_QWEN3, "Qwen3", 32, families.MASK, ONE_BY_ONE, LONG),
    "a2d-0.5b": Kind(families.A2D_QWEN2, "Qwen2", 32, families.MASK, ONE_BY_ONE, LONG),
    "diffcoder": Kind(DIFFCODER, "Llama", 4, 5, sure(0.95), SHORT),
}


class Pair:
    """One checkpoint, served and in transformers."""

    def __init__(self, kind: Kind, path: Path) -> None:
        families.write(path, kind.config)
        self.kind = kind
        self.engine: Engine = get_engine(path, max_num_batched_tokens=256)
        self.model = load_model(path)
        assert type(self.model).__name__ == f"{kind.backbone}ForCausalLM"
        self.prompts = random_prompts(kind.lengths, seed=kind.size)

    def expected(self, prompt: list[int], choose: Choose | None = None) -> Answer:
        """Two blocks behind the prompt; the first may be the rest of the prompt's last block."""
        size, mask, own = self.kind.size, self.kind.mask, self.kind.choose
        return decoded(self.model, [prompt], size, mask, choose or own, block_size=size)[0]

    def served(self, prompt: list[int], **extra: Any) -> list[int]:
        """The same number of tokens; ``extra`` are arguments of the request."""
        num_tokens = 2 * self.kind.size - len(prompt) % self.kind.size
        params = SamplingParams(
            max_tokens=num_tokens, temperature=0, ignore_eos=True, extra_args=extra
        )
        self.engine.reset_prefix_cache()
        return self.engine.generate([prompt], params)[0]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(KINDS[request.param], tmp_path_factory.mktemp(request.param) / "model")


def test_tokens_are_those_of_the_reference(pair: Pair) -> None:
    for prompt in pair.prompts:
        assert pair.served(prompt) == pair.expected(prompt).tokens, len(prompt)


def test_a_threshold_replaces_several_masks_in_a_step(pair: Pair) -> None:
    """Stable-DiffCoder's rule, which a request may ask the others for, too."""
    expected = [pair.expected(prompt, sure(0.4)) for prompt in pair.prompts]
    assert sum(answer.steps for answer in expected) < sum(len(a.tokens) for a in expected)
    for prompt, answer in zip(pair.prompts, expected, strict=True):
        assert pair.served(prompt, diffusion_threshold=0.4) == answer.tokens, len(prompt)


def test_fewer_steps_are_spread_as_in_the_reference(pair: Pair) -> None:
    """Tiny-A2D's rule, which a request may ask the other for, too. Whole blocks: 11, 11, 10."""
    size = pair.kind.size
    counts = [size // 3 + (step < size % 3) for step in range(3)]
    prompt = next(prompt for prompt in pair.prompts if len(prompt) % size == 0)
    expected = pair.expected(prompt, surest(counts))
    assert expected.steps == 6
    assert pair.served(prompt, diffusion_max_steps=3, diffusion_threshold=1.0) == expected.tokens

"""The product that skips tiles of the vocabulary: its bound on real logits, and what it costs.

On rows of every kind: ``test_soft_embedding.py``. The kernels are held to its definition in
``tile_product_kernel_suite.py``.
"""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.toys.suite import FAMILIES, questions
from dllm.ops.soft_embedding import Shard, exact_product, skipped_mass
from dllm.ops.tile_product import (
    TILE,
    least_mass,
    tile_product,
    tiles_of_groups,
    without_light_tiles,
)
from tests.ops.test_soft_embedding import error_of, stats_of, table
from tests.support.made_logits import make_logits
from tests.support.toy_prompts import encode_prompt
from tests.support.watched_device import DeviceWatch, off_device, on_device

RELEASED = 262_144
CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"


@pytest.mark.parametrize("profile", ["settled", "open", "flat"])
def test_the_bound_holds_for_the_released_vocabulary(profile: str) -> None:
    """And a sure row keeps next to nothing, a flat one everything."""
    logits = made_logits(4, profile)
    weight = table(RELEASED, torch.bfloat16)
    t, budget = torch.full((4,), 0.6), skipped_mass(torch.bfloat16)
    ours = tile_product(logits, t, stats_of(logits, t), Shard(weight, 0, RELEASED), budget)
    probs = torch.softmax(logits.double() / t.double()[:, None], -1)
    exact = exact_product(probs.bfloat16(), Shard(weight, 0, RELEASED))
    # Both round the probabilities and the result, by a unit each; ours leaves out one unit more.
    unit = budget
    assert (error_of(exact, probs, weight) <= 2.01 * unit).all()
    assert (error_of(ours, probs, weight) <= 3.01 * unit).all()
    share = kept_share(probs.float(), budget)
    assert share == 1 if profile == "flat" else share < (1e-3 if profile == "settled" else 0.9)


def made_logits(rows: int, profile: str) -> Tensor:
    if profile == "flat":
        return make_logits(rows, RELEASED, "open") / 30
    return make_logits(rows, RELEASED, profile)


def kept_share(probs: Tensor, budget: float) -> float:
    """The share of tiles that rows keep."""
    mass = probs.unflatten(1, (-1, TILE)).sum(-1)
    return float((mass > least_mass(probs.shape[1], budget)).float().mean())


@pytest.mark.parametrize("name", ["tiny-dllm", "tiny-decisions", "tiny-tools"])
def test_the_bound_holds_for_trained_models(name: str) -> None:
    """The probabilities of whole answers, from the reference, in steps sure and unsure."""
    from tests.support.hf_reference import generate_with_noise, load_hf

    path = CHECKPOINTS / name
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    (question,) = questions([next(iter(FAMILIES))], "heldout", 1)
    model = load_hf(path)
    steps = generate_with_noise(model, encode_prompt(tokenizer, question.prompt), 1, seed=5).probs
    probs = torch.cat([step for block in steps for step in block])
    weight = model.get_input_embeddings().weight.detach().bfloat16()
    budget = skipped_mass(torch.bfloat16)
    kept = without_light_tiles(probs, budget)
    left_out = probs.double().sum(-1) - kept.double().sum(-1)
    assert (left_out <= budget).all()
    assert (error_of(kept.double() @ weight.double(), probs, weight) <= budget).all()
    assert (kept == 0).float().mean() > 0.5  # trained models are sure of most tokens


def test_groups_multiply_what_any_of_their_rows_keeps() -> None:
    is_used = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.int8)
    with DeviceWatch() as watch:
        tiles, counts = tiles_of_groups(on_device(is_used))
    assert not watch.findings
    tiles, counts = off_device((tiles, counts))
    found = [row[:count].tolist() for row, count in zip(tiles, counts, strict=True)]
    assert found == [[1, 3, 4], [], [0, 1, 2, 3, 4]]

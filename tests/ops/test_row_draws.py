"""What rows of logits draw: the definition by plain loops, its distribution, and rows without."""

import math

import pytest
import torch
from torch import Tensor

from dllm.ops import noise, row_stats_cpu
from dllm.ops.dispatch import row_stats
from dllm.ops.row_stats import FIRST_TILE, reference_row_stats, tile_width
from tests.ops.test_noise import assert_drawn_from
from tests.ops.test_row_stats import assert_identical, keys_for

INF = math.inf


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("vocab_size", [30, 300, 5000])
def test_the_sample_is_a_token_of_a_drawn_tile(vocab_size: int, spread: float) -> None:
    """In float64, by plain loops; all noise at spread 0, all logits at 30."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(200, vocab_size, generator=generator) * spread
    temperature, keys = torch.linspace(0.2, 1.5, 200), keys_for(200)
    ours = row_stats(logits, temperature, keys, None)
    assert ours.probs is None
    num_clear = 0
    for r in range(200):
        scaled = logits[r].double() / temperature[r].double()
        tiles = scaled.split(tile_width(vocab_size))
        tile, is_clear = best(
            torch.stack([tile.logsumexp(0) for tile in tiles]), keys[r], FIRST_TILE
        )
        first = tile * tile_width(vocab_size)
        place, is_clear_too = best(tiles[tile], keys[r], first)
        if is_clear and is_clear_too:
            num_clear += 1
            assert ours.sample[r] == first + place
    assert num_clear > 190
    definition = reference_row_stats(logits, temperature, keys, None)
    assert torch.equal(ours.sample, definition.sample)


def best(values: Tensor, key: Tensor, first_id: int) -> tuple[int, bool]:
    """The place of the largest noisy value, and whether it is the largest by more than rounding."""
    bits = noise.token_bits(key, first_id + torch.arange(len(values)))
    noisy = values + noise.gumbel_from_bits(bits).double()
    ordered = noisy.sort(descending=True).values
    return int(noisy.argmax()), len(values) == 1 or bool(ordered[0] - ordered[1] > 1e-4)


def with_rare_as_one(counts: Tensor, probs: Tensor) -> list[Tensor]:
    """Tokens that are expected less than 20 times count as one. All are [V]."""
    is_likely = probs * counts.sum() > 20
    return [torch.cat([each[is_likely], each[~is_likely].sum()[None]]) for each in (counts, probs)]


@pytest.mark.parametrize(
    ("vocab_size", "num_draws", "spread"),
    [
        (2, 2**17, 0.5),
        (24, 2**18, 3.0),
        (32, 2**18, 2.0),
        (100, 2**18, 2.0),  # the last of four tiles has 4 tokens
        (1000, 2**16, 1.5),
        (1100, 2**14, 2.0),  # wide tiles
        (40_000, 2**12, 4.0),
        (262_144, 2**12, 3.0),
    ],
)
def test_samples_have_the_distribution_of_the_logits(
    vocab_size: int, num_draws: int, spread: float
) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(4)) * spread
    logits[vocab_size // 3] = -INF
    probs = torch.softmax(logits.double() / 0.7, 0)
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    at_once = max(2**22 // vocab_size, 8)
    for keys in keys_for(num_draws, seed=vocab_size).split(at_once):
        t = torch.full((len(keys),), 0.7)
        sample = row_stats(logits.expand(len(keys), -1), t, keys, None).sample
        counts += torch.bincount(sample, minlength=vocab_size)
    assert not counts[vocab_size // 3]
    assert_drawn_from(*with_rare_as_one(counts, probs))
    # And of the tiles: as if each were a token.
    width = tile_width(vocab_size)
    both = [torch.stack([tile.sum() for tile in part.split(width)]) for part in (counts, probs)]
    assert_drawn_from(*with_rare_as_one(*both))


@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_rows_without_a_key_get_their_argmax(vocab_size: int) -> None:
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(4))
    temperature, keys = torch.full((6,), 0.7), keys_for(6)
    drawn = row_stats(logits, temperature, keys, torch.float32)
    keys[::2] = noise.NO_KEY
    ours = row_stats(logits, temperature, keys, torch.float32)
    assert torch.equal(ours.sample[::2], logits.argmax(-1)[::2])
    assert torch.equal(ours.sample[1::2], drawn.sample[1::2])
    assert (drawn.sample != logits.argmax(-1)).any()
    assert_identical(ours._replace(sample=drawn.sample), drawn)


def test_no_noise_is_computed_where_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, 5000)
    keys = torch.full((6, 2), noise.NO_KEY)
    monkeypatch.setattr(row_stats_cpu, "drawn_tokens", lambda *_: pytest.fail("noise is computed"))
    ours = row_stats(logits, torch.ones(6), keys, None)
    assert torch.equal(ours.sample, logits.argmax(-1))

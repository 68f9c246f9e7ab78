"""Both products that leave tokens out: error bounds, shards. And what the sparse one leaves out.

What tiles cost is in ``test_tile_product.py``.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dllm.ops import noise, row_stats_cpu, soft_embedding
from dllm.ops.dispatch import row_stats, uses_sparse_product
from dllm.ops.filters import RowFilters
from dllm.ops.row_stats import RowStats
from dllm.ops.soft_embedding import (
    Shard,
    exact_product,
    heaviest_tiles,
    sparse_product,
    tokens_that_count,
)
from dllm.ops.tile_product import tile_product
from dllm.settings.server import SoftEmbedding

VOCAB = 5000  # 4.9 tiles
HIDDEN = 24
INF = math.inf
Product = Callable[..., Tensor]


def table(vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Embeddings: [vocab, HIDDEN]."""
    return torch.randn(vocab, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def rows_of_every_kind(vocab: int) -> Tensor:
    """Rows of logits, ``[13, vocab]``, of six kinds.

    Nearly equal logits, widely spread ones, a few tokens far above the rest, one certain token, all
    but five tokens at -inf, and all equal.
    """
    generator = torch.Generator().manual_seed(2)
    noise_rows = torch.randn(12, vocab, generator=generator)
    sure = noise_rows[:4] * 2 - 12
    sure.scatter_(1, torch.randint(vocab, (4, 6), generator=generator), 4.0)
    certain = noise_rows[4:6] - 200
    certain[:, 17] = 3.0
    excluded = noise_rows[6:8].clone()
    excluded[:, 5:] = -INF
    equal = torch.full((1, vocab), 2.5)
    return torch.cat([noise_rows[8:10] * 0.1, noise_rows[10:] * 5, sure, certain, excluded, equal])


def stats_of(logits: Tensor, temperature: Tensor, filters: RowFilters | None = None) -> RowStats:
    zero = torch.tensor([0])
    keys = noise.row_keys(zero, zero, zero, len(logits), noise.STREAM_GUMBEL)[0]
    return row_stats(logits, temperature, keys, torch.float32, filters)


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, RowStats, Shard]:
    """Rows of every kind at temperature 0.6, as a product takes them."""
    logits = rows_of_every_kind(VOCAB)
    t = torch.full((len(logits),), 0.6)
    return logits, t, stats_of(logits, t), Shard(table(VOCAB, dtype), 0, VOCAB)


def error_of(ours: Tensor, probs: Tensor, weight: Tensor) -> Tensor:
    """Per row, in units of the largest embedding: [N] fp64."""
    exact = probs.double() @ weight.double()
    return (ours.double() - exact).norm(dim=-1) / weight.double().norm(dim=-1).max()


# fp32: a probability is off by 3e-5 of itself (test_row_stats), a sum of VOCAB terms by less.
ROUNDING = 4e-5
each_product = pytest.mark.parametrize("product", [sparse_product, tile_product])


@each_product
@pytest.mark.parametrize("budget", [0.0, 1e-6, 2**-9, 0.1, 0.7])
@pytest.mark.parametrize("temperature", [0.05, 0.6, 2.0])
def test_the_error_is_at_most_the_skipped_mass_times_the_largest_norm(
    temperature: float, budget: float, product: Product
) -> None:
    logits = rows_of_every_kind(VOCAB)
    t = torch.full((len(logits),), temperature)
    probs = torch.softmax(logits.double() / t.double()[:, None], -1)
    for weight in (table(VOCAB), 1 + 0.1 * table(VOCAB)):  # what is left out cancels, or does not
        ours = product(logits, t, stats_of(logits, t), Shard(weight, 0, VOCAB), budget)
        assert (error_of(ours, probs, weight) <= budget + ROUNDING).all()


def test_the_budget_is_spent() -> None:
    """A row that is sure of itself keeps its few tokens: the bound does not hold by keeping all."""
    logits = rows_of_every_kind(VOCAB)[2:10]
    t = torch.full((len(logits),), 0.6)
    kept = tokens_that_count(logits, t, stats_of(logits, t), 2**-9)
    counts = torch.bincount(kept.row, minlength=len(logits))
    assert counts[2:].tolist() == [6, 6, 6, 6, 1, 1]
    for r in range(2):  # spread: most tokens are left out
        ordered = torch.softmax(logits[r].double() / 0.6, -1).sort(descending=True).values
        fewest = int((ordered.cumsum(0) < 1 - 2**-9).sum()) + 1
        assert fewest <= counts[r] <= VOCAB / 25


def test_summing_many_equal_probabilities_spends_no_more_than_the_budget() -> None:
    """Each of 9,296 equal terms would round up in an fp32 sum, which then hides 3% of the budget.

    The other tokens have 1.03 budgets together, and each too little for the last rung.
    """
    vocab, num_likely, budget = 2**15, 9296, 2**-8
    rest = 1.03 * budget
    unlikely = math.log(rest / (vocab - num_likely)) - math.log((1 - rest) / num_likely)
    logits = torch.full((1, vocab), unlikely)
    logits[0, :num_likely] = 0.0
    t = torch.ones(1)
    kept = tokens_that_count(logits, t, stats_of(logits, t), budget)
    p = torch.softmax(logits.double(), -1)[0]
    assert 1 - p[kept.token].sum() <= budget


@pytest.mark.parametrize("budget", [0.0, 0.25, 0.5, 1.0])
def test_heaviest_tiles_leave_out_as_many_as_the_budget_allows(budget: float) -> None:
    mass = torch.tensor([[0.5, 0.0, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0], [0.125, 0.25, 0.375, 0.25]])
    kept = heaviest_tiles(mass, budget)
    for r in range(len(mass)):
        left_out = mass[r][~kept[r]]
        assert left_out.sum() <= budget
        lightest_kept = mass[r][kept[r]].min() if kept[r].any() else INF
        assert left_out.sum() + lightest_kept > budget


@pytest.mark.parametrize("share", [0.0, 2.0])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in a bag, bit for bit; all in a product, up to its rounding, which knows its size."""
    monkeypatch.setattr(soft_embedding, "LARGEST_SHARE", share)
    logits, t, stats, shard = case()
    together = sparse_product(logits, t, stats, shard, 0.01)
    for r in range(len(logits)):
        row = slice(r, r + 1)
        alone = sparse_product(
            logits[row], t[row], RowStats(*(part[row] for part in stats)), shard, 0.01
        )
        exactly = 0.0 if share else 1e-6
        torch.testing.assert_close(alone, together[row], rtol=exactly, atol=exactly)


def test_bags_and_the_product_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for share in (0.0, 0.5, 2.0):
        monkeypatch.setattr(soft_embedding, "LARGEST_SHARE", share)
        results.append(sparse_product(*case(), 0.0))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0], results[2], rtol=1e-5, atol=1e-6)


def test_row_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = sparse_product(*case(), 0.01)
    monkeypatch.setattr(row_stats_cpu, "WORKSPACE_LOGITS", 2 * VOCAB)
    assert torch.equal(sparse_product(*case(), 0.01), at_once)


@each_product
def test_filters_and_rows_without_a_distribution(product: Product) -> None:
    logits, weight = rows_of_every_kind(VOCAB), table(VOCAB)
    logits[0], logits[1, 9] = -INF, math.nan
    n = len(logits)
    t = torch.full((n,), 0.6)
    filters = RowFilters(
        torch.full((n,), 3, dtype=torch.int32), torch.full((n,), 0.9), torch.zeros(n)
    )
    stats = stats_of(logits, t, filters)
    assert stats.probs is not None
    ours = product(logits, t, stats, Shard(weight, 0, VOCAB), 2**-9)
    assert (ours[:2] == 0).all()
    assert (error_of(ours, stats.probs, weight) <= 2**-9 + ROUNDING).all()


@each_product
@pytest.mark.parametrize("budget", [0.0, 0.01])
def test_shards_sum_to_the_whole(budget: float, product: Product) -> None:
    *given, whole = case()
    padding = torch.full((3, HIDDEN), math.nan)  # vLLM pads the last shard
    cuts = [(0, 1100), (1100, 1101), (1101, VOCAB)]
    parts = [Shard(torch.cat([whole.weight[a:b], padding]), a, b) for a, b in cuts]
    total = sum(product(*given, part, budget) for part in parts)
    torch.testing.assert_close(total, product(*given, whole, budget), rtol=1e-5, atol=1e-6)


def test_in_bf16_it_is_as_close_as_the_exact_product() -> None:
    """The default budget is what rounding the probabilities costs anyway."""
    logits, t, stats, shard = case(torch.bfloat16)
    assert stats.probs is not None
    unit = soft_embedding.skipped_mass(torch.bfloat16)
    assert unit == 2**-8
    exact = exact_product(stats.probs.bfloat16(), shard)
    ours = sparse_product(logits, t, stats, shard, unit)
    # Each rounds the probabilities and the result, by a unit; ours leaves out one unit more.
    assert (error_of(exact, stats.probs, shard.weight) <= 2.01 * unit).all()
    assert (error_of(ours, stats.probs, shard.weight) <= 3.01 * unit).all()


@pytest.mark.parametrize(
    ("option", "vocab_size", "is_sparse"),
    [
        ("auto", 262_144, True),
        ("sparse", 262_144, True),
        ("exact", 262_144, False),
        ("auto", 512, False),
        ("sparse", 512, False),
    ],
)
def test_what_is_sparse(option: SoftEmbedding, vocab_size: int, is_sparse: bool) -> None:
    assert uses_sparse_product(option, vocab_size, is_batch_invariant=False) == is_sparse


def test_where_no_row_may_depend_on_others_all_tokens_are_summed() -> None:
    assert not uses_sparse_product("auto", 262_144, is_batch_invariant=True)
    assert uses_sparse_product("sparse", 262_144, is_batch_invariant=True)

"""The kernels of row statistics; tests/test_kernel_suites.py runs this.

Compared with the CPU version, which test_row_stats.py holds to float64: the same argmax, sample and
kept tokens; entropies and probabilities within the rounding of fp32 sums in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm.engine.kernel_checks import compare_statistics
from dllm.ops import noise, row_stats_gpu
from dllm.ops.dispatch import row_stats
from dllm.ops.filters import RowFilters
from dllm.ops.row_stats import RowStats
from dllm.ops.row_stats_gpu import row_stats_kernels
from tests.ops.test_row_stats import hostile_rows, keys_for
from tests.support.interpreter import DEVICE, speed_up

speed_up()
INF = math.inf


def kernel_stats(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None = torch.float32,
    filters: RowFilters | None = None,
    are_read: Tensor | None = None,
    cap: float | None = None,
) -> RowStats:
    on_device = (part.to(DEVICE) for part in (logits, temperature, keys))
    if filters is not None:
        filters = RowFilters(*(part.to(DEVICE) for part in filters))
    parts = row_stats_kernels(
        *on_device, probs_dtype, filters, None if are_read is None else are_read.to(DEVICE), cap
    )
    return RowStats._make([part.cpu() for part in parts])


def assert_same(ours: RowStats, expected: RowStats) -> None:
    """Also that ids of rows without a distribution are harmless."""
    compare_statistics(ours, expected, 3e-5)  # that of test_row_stats.py
    assert ours.probs is not None
    for ids in (ours.argmax, ours.sample):
        assert (ids >= 0).all() and (ids < ours.probs.shape[1]).all()
    has_distribution = expected.entropy < INF
    assert torch.equal(ours.peak[has_distribution], expected.peak[has_distribution])


@pytest.mark.parametrize("temperature", [1e-30, 0.4, 1.0, 50.0])
@pytest.mark.parametrize("vocab_size", [11, 256, 300])
def test_statistics_of_hostile_rows(vocab_size: int, temperature: float) -> None:
    rows = hostile_rows(vocab_size)
    no_distribution = rows["random"].repeat(3, 1)
    no_distribution[0], no_distribution[1] = -INF, math.nan
    no_distribution[2, vocab_size // 2] = math.nan
    logits = torch.stack([*rows.values(), *no_distribution])
    t, keys = torch.full((len(logits),), temperature), keys_for(len(logits))
    ours = kernel_stats(logits, t, keys)
    assert_same(ours, row_stats(logits, t, keys, torch.float32))
    assert (ours.entropy[-3:] == INF).all()


@pytest.mark.parametrize("filtered", [False, True])
def test_rows_without_a_key_get_their_argmax(filtered: bool) -> None:
    logits = torch.randn(9, 1100, generator=torch.Generator().manual_seed(4))
    t, keys = torch.linspace(0.2, 1.5, 9), keys_for(9)
    few = RowFilters(torch.full((9,), 50), torch.full((9,), 0.9), torch.zeros(9))
    filters = few if filtered else None
    drawn = kernel_stats(logits, t, keys, filters=filters)
    keys[::2] = noise.NO_KEY
    ours = kernel_stats(logits, t, keys, filters=filters)
    assert_same(ours, row_stats(logits, t, keys, torch.float32, filters))
    assert torch.equal(ours.sample[::2], logits.argmax(-1)[::2])
    assert torch.equal(ours.sample[1::2], drawn.sample[1::2])


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(20, 60), (700, 30), (1024, 20), (3000, 60)])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0])
def test_samples_are_those_of_the_definition(spread: float, vocab_size: int, num_rows: int) -> None:
    """Whatever decides: all noise at spread 0, all logits at 30. The last tile may be short."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(2)) * spread
    t, keys = torch.linspace(0.2, 1.5, num_rows), keys_for(num_rows)
    assert_same(kernel_stats(logits, t, keys), row_stats(logits, t, keys, torch.float32))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(7, 1.0, 0.0), (1, 1.0, 0.0), (None, 0.8, 0.0), (None, 1.0, 0.05), (40, 0.7, 0.01)],
)
def test_filters(top_k: int | None, top_p: float, min_p: float) -> None:
    logits = torch.randn(12, 300, generator=torch.Generator().manual_seed(8)) * 3
    logits[1] *= 10
    logits[2] = 1.5  # nothing but ties
    logits[3] = logits[3].round()  # many ties
    logits[4, 5:] = -INF
    logits[5] = -INF
    logits[6, 9] = math.nan
    n = len(logits)
    filters = RowFilters(
        torch.full((n,), top_k or 300, dtype=torch.int32),
        torch.full((n,), top_p),
        torch.full((n,), min_p),
    )
    filters.top_k[7], filters.top_p[7], filters.min_p[7] = 300, 1.0, 0.0  # a row without
    t, keys = torch.full((n,), 0.7), keys_for(n)
    ours = kernel_stats(logits, t, keys, filters=filters)
    expected = row_stats(logits, t, keys, torch.float32, filters)
    assert_same(ours, expected)
    possible = (logits > -INF) & (expected.entropy < INF)[:, None]
    kept = [(logits >= stats.cutoff[:, None]) & possible for stats in (ours, expected)]
    assert torch.equal(*kept)
    assert ours.cutoff[7] == -INF


def test_bf16_logits_and_probabilities() -> None:
    logits = (torch.randn(6, 300, generator=torch.Generator().manual_seed(5)) * 5).bfloat16()
    t, keys = torch.full((6,), 0.5), keys_for(6)
    ours = kernel_stats(logits, t, keys, torch.bfloat16)
    same = kernel_stats(logits.float(), t, keys)
    assert ours.probs is not None and ours.probs.dtype == torch.bfloat16 and same.probs is not None
    # The interpreter truncates to bf16 where a GPU rounds: one unit in the last place.
    torch.testing.assert_close(ours.probs.float(), same.probs, rtol=2**-7, atol=0)
    assert torch.equal(ours.entropy, same.entropy) and torch.equal(ours.sample, same.sample)


@pytest.mark.parametrize("filtered", [False, True])
def test_nothing_is_computed_of_rows_that_nobody_reads(filtered: bool) -> None:
    """They count as rows without a distribution, whatever their logits; the others are the same."""
    logits = torch.randn(9, 1500, generator=torch.Generator().manual_seed(4)) * 3
    t, keys = torch.linspace(0.2, 1.5, 9), keys_for(9)
    few = RowFilters(torch.full((9,), 50), torch.full((9,), 0.9), torch.zeros(9))
    filters = few if filtered else None
    are_read = torch.arange(9) % 3 != 1
    all_of_them = kernel_stats(logits, t, keys, filters=filters)
    ours = kernel_stats(logits, t, keys, filters=filters, are_read=are_read)
    for name, a, b in zip(RowStats._fields, ours, all_of_them, strict=True):
        assert a is not None and b is not None and torch.equal(a[are_read], b[are_read]), name
    left_out = RowStats._make(part[~are_read] for part in ours)
    assert (left_out.entropy == INF).all() and (left_out.log_z == INF).all()
    assert (left_out.argmax == 0).all() and (left_out.sample == 0).all()
    assert left_out.probs is not None and (left_out.probs == 0).all()
    assert (left_out.tile_mass == 0).all()


@pytest.mark.parametrize("vocab_size", [700, 3000, 2048])
@pytest.mark.parametrize("filtered", [False, True])
def test_raw_logits_are_capped_where_they_are_read(filtered: bool, vocab_size: int) -> None:
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(4)) * 20
    if not filtered:  # of tokens whose tanh saturates, a filter's cutoff is a matter of rounding
        logits[1] *= 100
    logits[2] = 1.5
    logits = logits.bfloat16()
    t, keys = torch.linspace(0.2, 1.5, 9), keys_for(9)
    few = RowFilters(torch.full((9,), 50), torch.full((9,), 0.9), torch.zeros(9))
    filters = few if filtered else None
    ours = kernel_stats(logits, t, keys, filters=filters, cap=30.0)
    expected = row_stats(logits, t, keys, torch.float32, filters, cap=30.0)
    torch.testing.assert_close(ours.peak, expected.peak, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.cutoff, expected.cutoff, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.entropy, expected.entropy, rtol=0, atol=1e-4)
    assert ours.probs is not None and expected.probs is not None
    # A logit is off by 1e-5 at most, which the temperature divides.
    torch.testing.assert_close(ours.probs, expected.probs, rtol=2e-4, atol=1e-30)
    assert torch.equal(ours.sample, expected.sample)
    likeliest = expected.probs.gather(1, ours.argmax[:, None])[:, 0]
    assert torch.equal(likeliest, expected.probs.amax(1))  # of equal tokens any


def test_no_program_of_a_row_writes_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all warps have the same few tiles, nothing makes one wait for another's loads."""
    kernel, are_same = row_stats_gpu._row_kernel, []

    class Watched:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(*given: Any, **options: Any) -> None:
                read = given[6:9]  # the statistics of the tiles
                before = [part.clone() for part in read]
                kernel[grid](*given, **options)
                are_same.append(all(map(torch.equal, before, read)))

            return launch

    monkeypatch.setattr(row_stats_gpu, "_row_kernel", Watched())
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(6))
    kernel_stats(logits, torch.ones(3), keys_for(3))
    assert are_same == [True]


@pytest.mark.skipif(DEVICE == "cuda", reason="counts calls in the interpreter")
@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (None, 0.9)])
def test_cutoffs_are_searched_in_few_tiles(
    top_k: int | None, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sure row. From the smallest float on, about eight passes would read every tile."""
    num_tiles, reads = 40, []
    vocab_size, load = 1024 * num_tiles, row_stats_gpu._kept_logits

    def count(*given: Any) -> Any:
        reads.append(1)
        return load(*given)

    monkeypatch.setattr(row_stats_gpu, "_kept_logits", count)
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(7)) * 3
    logits[0, 5] += 24
    filters = RowFilters(torch.tensor([top_k or vocab_size]), torch.tensor([top_p]), torch.zeros(1))
    kernel_stats(logits, torch.ones(1), keys_for(1), None, filters)
    of_other_kernels = 2 * (num_tiles + 2)
    assert len(reads) - of_other_kernels <= 3 * num_tiles

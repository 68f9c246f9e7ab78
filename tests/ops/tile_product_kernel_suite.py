"""The kernels that skip tiles of the vocabulary; tests/test_kernel_suites.py runs this."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dllm.ops import tile_product_gpu
from dllm.ops.row_stats import RowStats, reference_row_stats, softcap
from dllm.ops.soft_embedding import Shard
from dllm.ops.tile_product import least_mass, tile_product
from dllm.ops.tile_product_gpu import ProductTiles, num_parts, tile_product_kernels
from tests.ops.test_row_stats import keys_for
from tests.ops.test_soft_embedding import rows_of_every_kind, table
from tests.support.interpreter import DEVICE, UNIT_ROUNDOFF, speed_up
from tests.support.made_logits import make_logits
from tests.support.recorded_calls import record_calls

speed_up()
VOCAB, HIDDEN = 1000, 24  # 15.6 tiles
CUT = ProductTiles(rows=16, columns=16, stages=2, num_warps=4, block=256)


def statistics(logits: Tensor, t: Tensor, cutoff: Tensor | None = None) -> RowStats:
    return reference_row_stats(logits, t, keys_for(len(logits)), None, cutoff)


def both(
    logits: Tensor,
    shard: Shard,
    budget: float,
    cut: ProductTiles = CUT,
    is_read: Tensor | None = None,
    **given: Tensor,
) -> tuple[Tensor, Tensor]:
    """(what the kernels compute, what the definition does), both on the CPU.

    is_read: [N, V] bool; the kernels find +inf in the place of the other logits.
    """
    t = torch.linspace(0.4, 0.8, len(logits))
    stats = statistics(logits, t, **given)
    moved = RowStats._make(part if part is None else part.to(DEVICE) for part in stats)
    on_device = Shard(shard.weight.to(DEVICE), *shard[1:])
    found = logits if is_read is None else torch.where(is_read, logits, math.inf)
    ours = tile_product_kernels(found.to(DEVICE), t.to(DEVICE), moved, on_device, budget, cut)
    return ours.cpu(), tile_product(logits, t, stats, shard, budget)


def assert_close(ours: Tensor, expected: Tensor, weight: Tensor) -> None:
    """A row's probabilities sum to 1, each of them and the result is rounded once."""
    unit = UNIT_ROUNDOFF[weight.dtype] + 4e-6
    error = (ours.float() - expected.float()).abs().max() / weight.float().abs().max()
    assert error <= 3 * unit, float(error)


@pytest.mark.parametrize("budget", [0.0, 2**-8, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_compute_the_definition(dtype: torch.dtype, budget: float) -> None:
    logits, weight = rows_of_every_kind(VOCAB), table(VOCAB, dtype)
    logits = torch.cat([logits, logits.flip(1)])  # 26 rows: two groups
    logits[1], logits[14, 9] = -math.inf, math.nan
    ours, expected = both(logits, Shard(weight, 0, VOCAB), budget)
    assert ours.dtype == dtype and (ours[[1, 14]] == 0).all()
    assert_close(ours, expected, weight)


@pytest.mark.parametrize("cut", [CUT, ProductTiles(32, 32, 2, 4, 128), ProductTiles(64, 16, 1, 4)])
def test_cuts_change_nothing_but_the_order_of_sums(cut: ProductTiles) -> None:
    logits, weight = rows_of_every_kind(VOCAB), table(VOCAB)
    assert_close(*both(logits, Shard(weight, 0, VOCAB), 2**-9, cut), weight)


def test_filtered_tokens_are_left_out() -> None:
    logits, weight = rows_of_every_kind(VOCAB), table(VOCAB)
    cutoff = logits.topk(5, dim=1).values[:, -1].contiguous()
    ours, expected = both(logits, Shard(weight, 0, VOCAB), 2**-9, cutoff=cutoff)
    assert_close(ours, expected, weight)


@pytest.mark.parametrize("bounds", [(0, 512), (512, VOCAB), (100, 101), (70, 333)])
def test_shards(bounds: tuple[int, int]) -> None:
    """Behind a shard's tokens is padding, which nobody reads."""
    logits, weight = rows_of_every_kind(VOCAB), table(VOCAB)
    padded = torch.cat([weight[slice(*bounds)], torch.full((3, HIDDEN), math.nan)])
    ours, expected = both(logits, Shard(padded, *bounds), 2**-9)
    assert_close(ours, expected, weight)


def test_the_product_takes_the_steps_of_the_tiles_that_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the rows are sure, and fill a group of their own, wherever they stand."""
    vocab = 8192
    plans = record_calls(monkeypatch, tile_product_gpu, "tiles_of_groups")
    logits = make_logits(32, vocab, "settled")
    logits[::2] = torch.randn(16, vocab, generator=torch.Generator().manual_seed(0)) * 0.1
    weight = table(vocab, torch.bfloat16)
    cut = ProductTiles(16, 32, 2, 4, 2048)
    assert_close(*both(logits, Shard(weight, 0, vocab), 2**-8, cut), weight)
    ((_, (_, counts)),) = plans
    assert counts[0] == 128 and counts[1] <= 3 * 16


def test_of_blocks_without_mass_no_logit_is_read() -> None:
    """Of a sure row most; of a row that is sure of nothing, all are read."""
    vocab, cut = 16384, ProductTiles(16, 32, 2, 4, 2048)
    logits = make_logits(32, vocab, "settled")
    logits[::2] = torch.randn(16, vocab, generator=torch.Generator().manual_seed(0)) * 0.1
    weight = table(vocab, torch.bfloat16)
    probs = (logits / torch.linspace(0.4, 0.8, 32)[:, None]).softmax(1)
    blocks = probs.view(32, -1, cut.block).sum(2)
    is_read = blocks > least_mass(vocab, 2**-8)  # [rows, blocks]
    ours, expected = both(
        logits, Shard(weight, 0, vocab), 2**-8, cut, is_read.repeat_interleave(cut.block, 1)
    )
    assert_close(ours, expected, weight)
    assert is_read[::2].all() and is_read[1::2].sum() <= 2 * 16  # of 8 a row


@pytest.mark.parametrize("num_read", [0, 16])
def test_rows_without_a_distribution_take_no_steps(
    num_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those that nobody reads, wherever they stand in the batch."""
    plans = record_calls(monkeypatch, tile_product_gpu, "tiles_of_groups")
    logits, weight = torch.randn(48, VOCAB) * 0.1, table(VOCAB)
    t = torch.linspace(0.4, 0.8, 48)
    stats = statistics(logits, t)
    is_read = torch.zeros(48, dtype=torch.bool)
    is_read[torch.randperm(48)[:num_read]] = True
    unread = dict.fromkeys(("entropy", "log_z"), torch.tensor(math.inf))
    stats = stats._replace(
        tile_mass=torch.where(is_read[:, None], stats.tile_mass, 0.0),
        **{name: torch.where(is_read, getattr(stats, name), one) for name, one in unread.items()},
    )
    moved = RowStats._make(part if part is None else part.to(DEVICE) for part in stats)
    given = logits.to(DEVICE), t.to(DEVICE), moved, Shard(weight.to(DEVICE), 0, VOCAB)
    ours = tile_product_kernels(*given, 2**-9, CUT).cpu()
    assert_close(ours, tile_product(logits, t, stats, Shard(weight, 0, VOCAB), 2**-9), weight)
    ((_, (_, counts)),) = plans
    assert counts.tolist() == [16 if num_read else 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raw_logits_are_capped_where_they_are_read(dtype: torch.dtype) -> None:
    logits, weight = rows_of_every_kind(VOCAB) * 3, table(VOCAB)
    raw = logits[~logits.isinf().any(1)].to(dtype)
    capped, t = softcap(raw, 30.0), torch.linspace(0.4, 0.8, len(raw))
    stats = statistics(capped, t)
    moved = RowStats._make(part if part is None else part.to(DEVICE) for part in stats)
    shard = Shard(weight.to(DEVICE), 0, VOCAB)
    ours = tile_product_kernels(
        raw.to(DEVICE), t.to(DEVICE), moved, shard, 2**-9, CUT, cap=30.0
    ).cpu()
    expected = tile_product(capped, t, stats, Shard(weight, 0, VOCAB), 2**-9)
    # A logit is off by 1e-5 at most, which the temperature divides.
    assert (ours - expected).abs().max() <= 1e-4 * weight.abs().max()


def test_no_rows() -> None:
    weight = table(VOCAB).to(DEVICE)
    none = torch.empty(0, VOCAB, device=DEVICE)
    stats = RowStats._make(none[:, 0] for _ in RowStats._fields)
    ours = tile_product_kernels(none, none[:, 0], stats, Shard(weight, 0, VOCAB), 0.1, CUT)
    assert ours.shape == (0, HIDDEN)


@pytest.mark.parametrize(("programs", "parts"), [(22, 6), (176, 3), (132, 1), (1, 8), (250, 1)])
def test_parts_fill_the_gpu(programs: int, parts: int) -> None:
    assert num_parts(programs, 132) == parts

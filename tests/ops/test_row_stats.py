"""Row statistics against a float64 reference, on ordinary and on hostile rows."""

import math

import pytest
import torch
from torch import Tensor

from dllm.ops import dispatch, noise, row_stats_cpu
from dllm.ops.dispatch import row_stats
from dllm.ops.filters import RowFilters, _Histogram, cutoffs
from dllm.ops.row_stats import RowStats, reference_row_stats, tile_width
from tests.support.recorded_calls import record_calls
from tests.support.watched_device import DeviceWatch, off_device, on_device

ENTROPY_TOLERANCE = 2e-5  # nats; fp32 over up to 1e3 terms
INF = math.inf


def keys_for(num_rows: int, seed: int = 0) -> Tensor:
    """[num_rows, 2] row keys of one request at step 0."""
    zero = torch.tensor([0])
    return noise.row_keys(torch.tensor([seed]), zero, zero, num_rows, noise.STREAM_GUMBEL)[0]


def stats(
    logits: Tensor, temperature: float, dtype: torch.dtype | None = torch.float32
) -> RowStats:
    """`row_stats` with one temperature for every row."""
    num_rows = logits.shape[0]
    return row_stats(logits, torch.full((num_rows,), temperature), keys_for(num_rows), dtype)


def reference(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Entropy and probabilities in float64, straight from the definitions."""
    x = logits.double()
    p = torch.softmax((x - x.amax(-1, keepdim=True)) / float(torch.tensor(temperature)), -1)
    return -torch.special.xlogy(p, p).sum(-1), p


def hostile_rows(vocab_size: int) -> dict[str, Tensor]:
    """Rows that break naive formulas, each [vocab_size] fp32."""
    random = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0))
    one_finite = torch.full((vocab_size,), -INF)
    one_finite[vocab_size // 2] = -7.0
    two_finite = one_finite.clone()
    two_finite[3] = -7.0
    near_tie = random.clone()
    near_tie[5], near_tie[9] = 8.0, 8.0 - 1e-6
    half_excluded = random.clone()
    half_excluded[::2] = -INF
    half_excluded[: vocab_size // 3] = -INF  # whole blocks
    return {
        "random": random,
        "capped": 30 * torch.tanh(random * 3),
        "all equal": torch.full((vocab_size,), 3.7),
        "all zero": torch.zeros(vocab_size),
        "huge": random * 1e30,
        "huge negative": random - 1e30,
        "largest floats": torch.where(random > 0, 3.4e38, -1e38),
        "one finite": one_finite,
        "two finite": two_finite,
        "near tie": near_tie,
        "half excluded": half_excluded,
        "denormal differences": random * 1e-40,
    }


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 0.4, 0.8, 1.0, 50.0])
@pytest.mark.parametrize("vocab_size", [11, 1024, 2500])  # 0.3, 32 and 2.4 tiles
def test_statistics_equal_float64(vocab_size: int, temperature: float) -> None:
    rows = hostile_rows(vocab_size)
    logits = torch.stack(list(rows.values()))
    ours = stats(logits, temperature)
    entropy, probs = reference(logits, temperature)
    assert ours.probs is not None
    for r, name in enumerate(rows):
        assert ours.argmax[r] == logits[r].argmax(), name
        assert ours.entropy[r].item() >= 0, name
        assert abs(ours.entropy[r].item() - entropy[r].item()) < ENTROPY_TOLERANCE, name
        torch.testing.assert_close(
            ours.probs[r].double(), probs[r], rtol=3e-5, atol=1e-30, msg=name
        )
        assert logits[r, ours.sample[r]] > -INF, name
        mass = [part.sum() for part in probs[r].split(tile_width(vocab_size))]
        torch.testing.assert_close(ours.tile_mass[r].double(), torch.stack(mass), msg=name)
        scaled = (logits[r].double() - ours.peak[r]) / float(torch.tensor(temperature))
        torch.testing.assert_close(
            torch.exp(scaled - ours.log_z[r]), probs[r], rtol=3e-5, atol=1e-30, msg=name
        )


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0], [-INF, -INF, 0.0, 0.0]])
    assert stats(logits, 0.5).argmax.tolist() == [1, 0, 2]


def test_a_row_with_one_token_has_zero_entropy_and_one_sample() -> None:
    logits = torch.full((64, 100), -INF)
    logits[:, 42] = 3.0
    ours = stats(logits, 0.7)
    assert (ours.entropy == 0).all() and (ours.sample == 42).all() and (ours.argmax == 42).all()
    assert ours.probs is not None and (ours.probs.sum(-1) == 1).all()


def test_a_row_without_a_distribution_is_marked_and_harmless() -> None:
    good = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    logits = torch.cat([good, torch.full((1, 50), -INF), torch.full((1, 50), math.nan)])
    logits = torch.cat([logits, good[:1]])
    logits[5, 7] = math.nan
    ours = stats(logits, 0.5)
    alone = row_stats(good, torch.full((3,), 0.5), keys_for(6)[:3], torch.float32)
    assert ours.probs is not None and alone.probs is not None
    assert (ours.entropy[3:] == INF).all() and (ours.probs[3:] == 0).all()
    assert ((ours.sample >= 0) & (ours.sample < 50) & (ours.argmax < 50)).all()
    assert torch.equal(ours.entropy[:3], alone.entropy)
    assert torch.equal(ours.probs[:3], alone.probs)


def test_row_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: at once, two rows at a time, and cut unevenly."""
    logits = torch.randn(37, 2500, generator=torch.Generator().manual_seed(7)) * 4
    temperature, keys = torch.linspace(0.2, 1.5, 37), keys_for(37)
    filters = some_filters(37, 2500)
    at_once = row_stats(logits, temperature, keys, torch.bfloat16, filters)
    for workspace in (1, 5 * 2500, 20 * 2500):
        monkeypatch.setattr(row_stats_cpu, "WORKSPACE_LOGITS", workspace)
        assert_identical(at_once, row_stats(logits, temperature, keys, torch.bfloat16, filters))


@pytest.mark.parametrize(
    ("num_rows", "workspace"), [(1, 1), (2, 1), (3, 1), (37, 60), (512, 10**9)]
)
def test_row_tiles_cover_every_row_once(
    num_rows: int, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_stats_cpu, "WORKSPACE_LOGITS", workspace)
    slices = list(row_stats_cpu.row_slices(num_rows, 10))
    rows = [row for part in slices for row in range(num_rows)[part]]
    assert rows == list(range(num_rows))
    sizes = {part.stop - part.start for part in slices}
    assert max(sizes) <= max(workspace // 10, 3) and (min(sizes) > 1 or num_rows == 1)


def test_bf16_logits_and_probabilities() -> None:
    logits = (torch.randn(8, 700, generator=torch.Generator().manual_seed(5)) * 5).bfloat16()
    ours = stats(logits, 0.5, torch.bfloat16)
    same = stats(logits.float(), 0.5)
    assert ours.probs is not None and ours.probs.dtype == torch.bfloat16
    assert same.probs is not None and torch.equal(ours.probs, same.probs.bfloat16())
    assert ours.entropy.dtype == torch.float32 and torch.equal(ours.entropy, same.entropy)
    assert torch.equal(ours.argmax, same.argmax) and torch.equal(ours.sample, same.sample)


@pytest.mark.parametrize("vocab_size", [300, 2500])
def test_raw_logits_have_the_statistics_of_soft_capped_ones(vocab_size: int) -> None:
    raw = (torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(5)) * 20).bfloat16()
    t, keys, filters = torch.linspace(0.2, 1.5, 12), keys_for(12), some_filters(12, vocab_size)
    ours = row_stats(raw, t, keys, torch.float32, filters, cap=30.0)
    capped = 30 * torch.tanh(raw.float() / 30)
    assert_identical(ours, row_stats(capped, t, keys, torch.float32, filters))


def some_filters(num_rows: int, vocab_size: int) -> RowFilters:
    """Every combination of filters, in turn; every fourth row has none."""
    turn = torch.arange(num_rows)
    return RowFilters(
        top_k=torch.where(turn % 4 == 1, 1 + turn, vocab_size).to(torch.int32),
        top_p=torch.where((turn % 4 == 2) | (turn % 8 == 1), 0.1 + 0.9 * turn / num_rows, 1.0),
        min_p=torch.where((turn % 4 == 3) | (turn % 16 == 1), 0.3 * turn / num_rows, 0.0),
    )


def filtered_by_sorting(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """The kept tokens of one row in float64, [V] bool: a full sort, from the definitions."""
    _, (probs,) = reference(logits[None], temperature)
    kept = (probs >= min_p * probs.max()) & (
        logits >= logits.sort(descending=True).values[top_k - 1]
    )
    rest = torch.where(kept, probs, 0.0) / probs[kept].sum()
    ordered = rest.sort(descending=True).values
    in_front = ordered.cumsum(0) - ordered
    nucleus = ordered[in_front < top_p][-1] if top_p < 1 else 0.0
    return kept & (rest >= nucleus)


FILTERS = {
    "top-k": (7, 1.0, 0.0),
    "top-k of one": (1, 1.0, 0.0),
    "top-p": (None, 0.8, 0.0),
    "small top-p": (None, 1e-6, 0.0),
    "min-p": (None, 1.0, 0.05),
    "min-p of one": (None, 1.0, 1.0),
    "all": (40, 0.7, 0.01),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab_size", [300, 2500])
def test_filters_equal_a_full_sort(vocab_size: int, name: str) -> None:
    top_k, top_p, min_p = FILTERS[name]
    top_k = vocab_size if top_k is None else top_k
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(40, vocab_size, generator=generator) * 3
    logits[1] *= 10  # below what the histogram resolves
    logits[2] = 1.5  # nothing but ties
    logits[3] = logits[3].round()  # many ties
    logits[4, 5:] = -INF
    logits[5] *= 1e-3
    n, temperature = len(logits), 0.7
    filters = RowFilters(
        torch.full((n,), top_k, dtype=torch.int32), torch.full((n,), top_p), torch.full((n,), min_p)
    )
    t, keys = torch.full((n,), temperature), keys_for(n)
    ours = row_stats(logits, t, keys, torch.float32, filters)
    drawn = reference_row_stats(logits, t, keys, None, ours.cutoff).sample
    assert ours.probs is not None and torch.equal(ours.sample, drawn)
    for r in range(n):
        kept = filtered_by_sorting(logits[r], temperature, top_k, top_p, min_p)
        possible = logits[r] > -INF
        assert torch.equal((logits[r] >= ours.cutoff[r]) & possible, kept & possible), r
        entropy, probs = reference(torch.where(kept, logits[r], -INF)[None], temperature)
        torch.testing.assert_close(ours.probs[r].double(), probs[0], rtol=3e-5, atol=1e-30)
        assert abs(ours.entropy[r] - entropy[0]) < ENTROPY_TOLERANCE
        assert ours.argmax[r] == logits[r].argmax() and kept[ours.sample[r]]


def test_a_mass_that_rounding_never_reaches_keeps_every_token() -> None:
    x = torch.zeros(1, 64)
    histogram = _Histogram.of_rows(x, x.amax(dim=-1), torch.ones(1))
    assert histogram.largest_with(torch.tensor([64.01]), is_count=False) == -torch.inf


def test_a_row_without_filters_is_the_same_beside_filtered_ones() -> None:
    logits = torch.randn(24, 1500, generator=torch.Generator().manual_seed(9)) * 3
    logits[12:20] = torch.tensor([-INF, math.nan]).repeat(4)[:, None]  # filters cannot crash these
    temperature, keys = torch.linspace(0.2, 1.5, 24), keys_for(24)
    ours = row_stats(logits, temperature, keys, torch.float32, some_filters(24, 1500))
    plain = row_stats(logits, temperature, keys, torch.float32)
    unfiltered = torch.arange(24) % 4 == 0
    for a, b in zip(ours, plain, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a[unfiltered], b[unfiltered], rtol=0, atol=0, equal_nan=True)
    assert (ours.entropy[12:20] == INF).all()


def assert_identical(a: RowStats, b: RowStats) -> None:
    for name, x, y in zip(RowStats._fields, a, b, strict=True):
        assert x is not None and y is not None and torch.equal(x, y), name


def test_compiled_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(row_stats, dynamic=True, fullgraph=True)
        for vocab_size in (512, 2500):
            logits = torch.stack(list(hostile_rows(vocab_size).values()))
            no_distribution = torch.tensor([[-INF], [math.nan]]).expand(-1, vocab_size)
            logits = torch.cat([logits, no_distribution])
            temperature = torch.linspace(0.4, 0.8, len(logits))
            keys = keys_for(len(logits))
            filters = some_filters(len(logits), vocab_size)
            ours = compiled(logits, temperature, keys, torch.float32, filters)
            eager = row_stats(logits, temperature, keys, torch.float32, filters)
            assert torch.equal(ours.argmax, eager.argmax)
            assert torch.equal(ours.sample, eager.sample)
            torch.testing.assert_close(ours.entropy, eager.entropy, rtol=0, atol=ENTROPY_TOLERANCE)
            torch.testing.assert_close(ours.probs, eager.probs, rtol=3e-5, atol=1e-30)
            with monkeypatch.context() as patch:  # two rows at a time: bit for bit the same
                patch.setattr(row_stats_cpu, "WORKSPACE_LOGITS", 1)
                tiled = compiled(logits, temperature, keys, torch.float32, filters)
            for a, b in zip(ours, tiled, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_raw_logits_are_capped_in_a_compiled_step() -> None:
    """As a step on a GPU is, where nobody needs whole rows: with their cap, and without filters."""
    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(row_stats, dynamic=True, fullgraph=True)
        for vocab_size in (512, 2500):
            logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(2))
            logits = (20 * logits).bfloat16()
            given = logits, torch.linspace(0.4, 0.8, 6), keys_for(6), None, None, None, 30.0
            ours, eager = compiled(*given), row_stats(*given)
            assert torch.equal(ours.argmax, eager.argmax)
            assert torch.equal(ours.sample, eager.sample)
            torch.testing.assert_close(ours.entropy, eager.entropy, rtol=0, atol=ENTROPY_TOLERANCE)


@pytest.mark.parametrize("num_filtered", [0, 1])
def test_cutoffs_are_searched_only_where_a_row_is_filtered(
    num_filtered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = record_calls(monkeypatch, dispatch, "cutoffs")
    logits, off = torch.randn(3, 50), torch.tensor([50, 50, 50])
    filters = RowFilters(off.clone(), torch.ones(3), torch.zeros(3))
    filters.top_k[:num_filtered] = 2
    found = row_stats(logits, torch.ones(3), keys_for(3), None, filters)
    assert len(searched) == num_filtered
    assert (found.cutoff > -INF).sum() == num_filtered


def test_filters_of_the_definition_run_on_a_gpu() -> None:
    """There they serve in the place of a kernel that computes something else."""
    logits, filters = torch.randn(3, 50), some_filters(3, 50)
    temperature = torch.ones(3)
    given = on_device((logits, temperature, *filters))
    with DeviceWatch() as watch:
        found = cutoffs(*given[:2], RowFilters(*given[2:]), 50)
    assert not [finding for finding in watch.findings if finding.kind == "mixed"]
    assert torch.equal(off_device(found), cutoffs(logits, temperature, filters, 50))

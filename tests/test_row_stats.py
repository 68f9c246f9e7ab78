"""Row statistics against a float64 reference, on ordinary and on hostile rows."""

import math

import pytest
import torch
from torch import Tensor

from dllm import noise
from dllm.row_stats import RowStats, row_stats

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
@pytest.mark.parametrize("vocab_size", [11, 512, 1000])
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


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(1)) * 4
    temperature = torch.linspace(0.1, 2.0, 20)
    keys = keys_for(20)
    together = row_stats(logits, temperature, keys, torch.float32)
    pick = torch.tensor([13, 2, 19])
    alone = row_stats(logits[pick], temperature[pick], keys[pick], torch.float32)
    for a, b in zip(together, alone, strict=True):
        assert a is not None and b is not None and torch.equal(a[pick], b)


def test_the_sample_is_the_gumbel_max_of_the_scaled_logits() -> None:
    logits = torch.randn(500, 300, generator=torch.Generator().manual_seed(2)) * 3
    temperature = torch.linspace(0.2, 1.5, 500)
    keys = keys_for(500)
    noisy = logits.double() / temperature.double()[:, None] + noise.gumbel(keys, 300).double()
    best = noisy.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-4
    ours = row_stats(logits, temperature, keys, None)
    assert ours.probs is None
    assert clear.sum() > 490 and torch.equal(ours.sample[clear], noisy.argmax(-1)[clear])


def test_samples_follow_the_distribution() -> None:
    """Chi-square over 2^17 draws with error probability 1e-6."""
    num_draws, temperature = 2**17, 0.6
    row = torch.randn(24, generator=torch.Generator().manual_seed(4))
    row[7] = -INF
    ours = stats(row.expand(num_draws, -1), temperature, None)
    counts = torch.bincount(ours.sample, minlength=24).double()
    expected = num_draws * reference(row[None], temperature)[1][0]
    assert counts[7] == 0
    keep = expected > 0
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    tail = torch.special.gammaincc(torch.tensor(22 / 2, dtype=torch.float64), statistic / 2)
    assert tail > 1e-6, (statistic, tail)


def test_bf16_logits_and_probabilities() -> None:
    logits = (torch.randn(8, 700, generator=torch.Generator().manual_seed(5)) * 5).bfloat16()
    ours = stats(logits, 0.5, torch.bfloat16)
    same = stats(logits.float(), 0.5)
    assert ours.probs is not None and ours.probs.dtype == torch.bfloat16
    assert same.probs is not None and torch.equal(ours.probs, same.probs.bfloat16())
    assert ours.entropy.dtype == torch.float32 and torch.equal(ours.entropy, same.entropy)
    assert torch.equal(ours.argmax, same.argmax) and torch.equal(ours.sample, same.sample)


def test_entropy_and_argmax_equal_the_hugging_face_ones() -> None:
    """HF takes Categorical(logits / T).entropy() and argmax(logits / T)."""
    logits = 30 * torch.tanh(torch.randn(200, 400, generator=torch.Generator().manual_seed(6)))
    logits[:50, ::3] = -INF
    ours = stats(logits, 0.55)
    scaled = logits / 0.55
    expected = torch.distributions.Categorical(logits=scaled).entropy()
    torch.testing.assert_close(ours.entropy, expected, rtol=0, atol=ENTROPY_TOLERANCE)
    assert torch.equal(ours.argmax, scaled.argmax(-1))


def test_compiled_equals_eager() -> None:
    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(row_stats, dynamic=True, fullgraph=True)
        for vocab_size in (512, 1000):
            logits = torch.stack(list(hostile_rows(vocab_size).values()))
            no_distribution = torch.tensor([[-INF], [math.nan]]).expand(-1, vocab_size)
            logits = torch.cat([logits, no_distribution])
            temperature = torch.linspace(0.4, 0.8, len(logits))
            keys = keys_for(len(logits))
            ours = compiled(logits, temperature, keys, torch.float32)
            eager = row_stats(logits, temperature, keys, torch.float32)
            assert torch.equal(ours.argmax, eager.argmax)
            assert torch.equal(ours.sample, eager.sample)
            torch.testing.assert_close(ours.entropy, eager.entropy, rtol=0, atol=ENTROPY_TOLERANCE)
            torch.testing.assert_close(ours.probs, eager.probs, rtol=3e-5, atol=1e-30)

"""The counter-based noise: exact bits, independence of the batch, and statistical quality.

Statistical tests use fixed seeds and a chi-square bound with error probability 1e-6 each: with
new seeds, a correct generator would fail one of them once in about 50,000 runs of this file.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dllm.ops import noise

MASK = 0xFFFFFFFF
ERROR_PROBABILITY = 1e-6


def philox_python(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as in the paper, on Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def token_bits_python(key: tuple[int, int], token: int) -> int:
    """triple32 with the two key words xor-ed in, on Python integers."""
    x = token ^ key[0]
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) & MASK
    x ^= key[1]
    x = ((x ^ (x >> 11)) * 0xAC4C1B51) & MASK
    x = ((x ^ (x >> 15)) * 0x31848BAB) & MASK
    return x ^ (x >> 14)


def assert_drawn_from(counts: Tensor, probs: Tensor, num_tests: int = 1, what: object = "") -> None:
    """Pearson's chi-square test of how often each was drawn, [V], against its probability, [V]."""
    assert not counts[probs == 0].any(), "what is excluded was drawn"
    counts, probs = counts[probs > 0].double(), probs[probs > 0].double()
    if len(counts) > 1:
        expected = probs * counts.sum()
        statistic = ((counts - expected) ** 2 / expected).sum()
        half = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
        tail = torch.special.gammaincc(half, statistic / 2).item()
        assert tail > ERROR_PROBABILITY / num_tests, (what, tail)


def uniform(size: int) -> Tensor:
    return torch.full((size,), 1 / size, dtype=torch.float64)


def random_keys(num: int, seed: int) -> Tensor:
    """[num, 2] row keys as the engine makes them: one request, successive canvas positions."""
    one = torch.tensor([0])
    return noise.row_keys(torch.tensor([seed]), one, one, num, noise.STREAM_GUMBEL)[0]


# Random123's known-answer tests (kat_vectors, philox4x32 10)
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox_python(counter, key) == expected
    assert noise.philox4x32(torch.tensor(counter), torch.tensor(key)).tolist() == expected


WORD = st.integers(0, MASK)


@settings(max_examples=50, derandomize=True)
@given(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2))
def test_philox_equals_python(counter: list[int], key: list[int]) -> None:
    result = noise.philox4x32(torch.tensor(counter), torch.tensor(key))
    assert result.tolist() == philox_python(counter, key)


@settings(max_examples=50, derandomize=True)
@given(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, MASK),
    st.integers(0, MASK),
    st.integers(1, 2**31 - 1),
)
def test_row_keys_and_tokens_follow_their_definition(
    seed: int, canvas_start: int, step: int, vocab_size: int
) -> None:
    place = (torch.tensor([seed]), torch.tensor([canvas_start]), torch.tensor([step]))
    keys = noise.row_keys(*place, 5, noise.STREAM_GUMBEL)
    tokens = noise.random_tokens(*place, 5, vocab_size, noise.STREAM_RENOISE)
    seed_words = [seed & MASK, (seed >> 32) & MASK]
    for position in range(5):
        words = philox_python([position, step, canvas_start, noise.STREAM_GUMBEL], seed_words)
        assert keys[0, position].tolist() == words[:2]
        words = philox_python([position, step, canvas_start, noise.STREAM_RENOISE], seed_words)
        assert tokens[0, position].item() == words[0] * vocab_size >> 32


@settings(max_examples=100, derandomize=True)
@given(WORD, WORD, st.lists(WORD, min_size=1, max_size=8))
def test_token_bits_equal_uint32_arithmetic(first: int, second: int, ids: list[int]) -> None:
    bits = noise.token_bits(torch.tensor([first, second]), torch.tensor(ids))
    assert bits.tolist() == [token_bits_python((first, second), token) for token in ids]


def test_a_request_draws_the_same_alone_and_in_any_batch() -> None:
    seeds = torch.tensor([3, -(2**62), 2**63 - 1, 0])
    starts = torch.tensor([0, 17, 4096, 2**31])
    steps = torch.tensor([0, 1, 47, 5])
    batch = noise.step_noise(seeds, starts, steps, 24, 1000)
    canvas = noise.initial_canvas(seeds, starts, 24, 1000)
    for r in range(4):
        row = (seeds[r : r + 1], starts[r : r + 1], steps[r : r + 1])
        alone = noise.step_noise(*row, 9, 1000)  # a shorter canvas: same positions
        assert torch.equal(alone.keys[0], batch.keys[r, :9])
        assert torch.equal(alone.renoise_tokens[0], batch.renoise_tokens[r, :9])
        assert torch.equal(noise.initial_canvas(*row[:2], 9, 1000)[0], canvas[r, :9])


def test_step_noise_is_its_two_streams() -> None:
    place = (torch.tensor([3, 9]), torch.tensor([40, 7]), torch.tensor([2, 0]))
    step = noise.step_noise(*place, 6, 300)
    tokens = noise.random_tokens(*place, 6, 300, noise.STREAM_RENOISE)
    assert torch.equal(step.keys, noise.row_keys(*place, 6, noise.STREAM_GUMBEL))
    assert torch.equal(step.renoise_tokens, tokens)


def test_every_part_of_the_place_changes_every_key() -> None:
    def keys(seed: int, start: int, step: int, stream: int) -> Tensor:
        place = (torch.tensor([seed]), torch.tensor([start]), torch.tensor([step]))
        return noise.row_keys(*place, 64, stream)

    base = keys(5, 6, 7, 1)
    high_seed = 5 + 2**32
    for other in ((4, 6, 7, 1), (high_seed, 6, 7, 1), (5, 7, 7, 1), (5, 6, 8, 1), (5, 6, 7, 2)):
        assert (keys(*other) != base).all()
    assert torch.unique(base[0], dim=0).shape[0] == 64


def test_gumbel_is_finite_and_accurate_to_both_ends() -> None:
    bits = torch.tensor([0, 1, 2, 1000, 2**20 + 1, 2**31, 2**32 - 2**10, 2**32 - 1])
    value = noise.gumbel_from_bits(bits)
    assert value.dtype == torch.float32 and value.isfinite().all()
    v = ((bits.double() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    exact = -torch.log(-torch.log1p(-v))
    torch.testing.assert_close(value[:6].double(), exact[:6], rtol=2e-7, atol=2e-7)
    assert value[0] == pytest.approx(33 * math.log(2), abs=1e-5)
    assert value[-1] == pytest.approx(-math.log(24 * math.log(2)), abs=1e-5)


def test_bits_of_a_row_are_distinct_and_uniform() -> None:
    for seed in range(8):
        bits = noise.token_bits(random_keys(1, seed)[0], torch.arange(2**16))
        assert torch.unique(bits).numel() == 2**16
        for shift in (24, 12, 0):
            counts = torch.bincount((bits >> shift) & 255, minlength=256)
            assert_drawn_from(counts, uniform(256), 24, (seed, shift))


def test_neighbouring_positions_and_tokens_are_independent() -> None:
    bits = noise.token_bits(random_keys(2**10, seed=1), torch.arange(2**9)) >> 28
    pairs = {
        "token, next token": (bits[:, :-1:2], bits[:, 1::2]),
        "position, next position": (bits[:-1:2], bits[1::2]),
        "token, token + 256": (bits[:, :256], bits[:, 256:]),
    }
    for name, (a, b) in pairs.items():
        counts = torch.bincount((a * 16 + b).flatten(), minlength=256)
        assert_drawn_from(counts, uniform(256), 3, name)


@pytest.mark.parametrize("stride", [1, 257, 2**10, 2**13])
def test_gumbel_max_draws_from_the_softmax(stride: int) -> None:
    """Also for ids that differ by powers of two, where a two-multiplication mixer fails this."""
    num_draws, num_tokens = 2**20, 16
    logits = torch.randn(num_tokens, generator=torch.Generator().manual_seed(stride))
    counts = torch.zeros(num_tokens, dtype=torch.float64)
    for keys in random_keys(num_draws, stride).split(2**16):
        bits = noise.token_bits(keys, torch.arange(num_tokens) * stride)
        drawn = (logits + noise.gumbel_from_bits(bits)).argmax(dim=-1)
        counts += torch.bincount(drawn, minlength=num_tokens)
    assert_drawn_from(counts, torch.softmax(logits.double(), 0), 4, stride)


def test_random_tokens_are_uniform_over_a_vocabulary_that_is_no_power_of_two() -> None:
    seeds = torch.arange(512)
    tokens = noise.random_tokens(seeds, seeds * 0 + 64, seeds * 0, 256, 1000, 0)
    assert_drawn_from(torch.bincount(tokens.flatten(), minlength=1000), uniform(1000))


def test_compiled_bits_are_the_same_at_every_shape() -> None:
    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(noise.step_noise, dynamic=True, fullgraph=True)
        for num_rows, width in ((1, 8), (3, 8), (5, 12)):
            seeds = torch.arange(num_rows) * 7919 - 2**40
            place = (seeds, torch.arange(num_rows) + 100, torch.arange(num_rows))
            for ours, eager in zip(
                compiled(*place, width, 517),
                noise.step_noise(*place, width, 517),
                strict=True,
            ):
                assert torch.equal(ours, eager)

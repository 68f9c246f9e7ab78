"""Sampling with drafts has the target's distribution: the first three tokens, jointly.

The target is a table of conditional probabilities over three tokens, so the joint distribution is
known exactly. Drafts are verified by vLLM's own rejection sampler, which runs the CPU kernels here.
A chi-square test at level 1e-3; so many samples that an error of 1% in total variation is found
with probability 0.9: the noncentrality is at least n (2 TV)^2 = 50, for 26 degrees of freedom.
"""

import itertools

import numpy as np
import pytest
import torch
from engine_harness import Engine  # noqa: F401  sets vLLM's environment first

from dllm import seams
from dllm.seams_cpu import register_cpu_kernels

VOCAB, LENGTH = 3, 3
NUM_SAMPLES = 125_000
LEVEL = 1e-3


@pytest.fixture(scope="module")
def rejection_sample():
    seams.install(serve_with_dllm=True)
    register_cpu_kernels(include_sampling=True)
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    return rejection_sampler_utils.rejection_sample


def conditional_logits() -> list[np.ndarray]:
    """Logits behind every prefix of 0, 1 and 2 tokens: ``[3 ** length, 3]``."""
    rng = np.random.default_rng(1)
    return [rng.normal(0, 1, (VOCAB**length, VOCAB)).astype(np.float32) for length in range(LENGTH)]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def joint(tables: list[np.ndarray]) -> np.ndarray:
    """Probabilities of the 27 sequences, in the order of their number in base 3."""
    probabilities = np.ones(1)
    for table in tables:
        probabilities = (probabilities[:, None] * softmax(table)).reshape(-1)
    return probabilities


def prefix_number(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The first ``lengths`` tokens of each row, as a number in base 3."""
    number = np.zeros(len(tokens), dtype=np.int64)
    for place in range(tokens.shape[1]):
        number = np.where(place < lengths, number * VOCAB + tokens[:, place], number)
    return number


def draft(kind: str, tables: list[np.ndarray], tokens: np.ndarray, length: int, count: int):
    """``count`` drafts behind the first ``length`` tokens of each row: ``[rows, count]``."""
    rng = np.random.default_rng(length)
    drafted = tokens.copy()
    for place in range(length, length + count):
        logits = tables[place][prefix_number(drafted, np.full(len(tokens), place))]
        drafted[:, place] = {
            "good": logits.argmax(-1),
            "bad": rng.integers(0, VOCAB, len(tokens)),
            "adversarial": logits.argmin(-1),
        }[kind]
    return drafted[:, length : length + count]


def generate(rejection_sample, kind: str, num_samples: int) -> np.ndarray:
    """Three tokens of each sample, drafted at widths 0, 1 and 2 in turn and verified until full."""
    tables = conditional_logits()
    tokens = np.zeros((num_samples, LENGTH), dtype=np.int64)
    lengths = np.zeros(num_samples, dtype=np.int64)
    widths = np.arange(num_samples) % LENGTH
    seeds = torch.arange(num_samples)
    temperatures = torch.ones(num_samples)
    while (lengths < LENGTH).any():
        for length, width in itertools.product(range(LENGTH), range(LENGTH)):
            rows = np.flatnonzero((lengths == length) & (widths == width))
            if not len(rows):
                continue
            count = min(width, LENGTH - 1 - length)
            drafts = draft(kind, tables, tokens[rows], length, count)
            whole = tokens[rows].copy()
            whole[:, length : length + count] = drafts
            logits = np.stack(
                [
                    tables[length + place][prefix_number(whole, np.full(len(rows), length + place))]
                    for place in range(count + 1)
                ],
                axis=1,
            )
            given = np.concatenate([np.zeros((len(rows), 1), dtype=np.int64), drafts], axis=1)
            slots = torch.from_numpy(rows)
            sampled, num_sampled = rejection_sample(
                torch.from_numpy(logits.reshape(-1, VOCAB)),
                None,
                torch.from_numpy(given.reshape(-1)).int(),
                torch.arange(len(rows) + 1, dtype=torch.int32) * (count + 1),
                torch.arange(length, length + count + 1).repeat(len(rows)),
                slots,
                slots.repeat_interleave(count + 1),
                torch.arange(count + 1, dtype=torch.int32).repeat(len(rows)),
                temperatures,
                seeds,
                LENGTH - 1,
            )
            for place in range(count + 1):
                is_new = num_sampled.numpy() > place
                tokens[rows[is_new], length + place] = sampled.numpy()[is_new, place]
            lengths[rows] += num_sampled.numpy()
    return tokens


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Of a chi-square test of sequences of three tokens.

    Those with fewer than five expected samples count as one.
    """
    number = prefix_number(tokens, np.full(len(tokens), LENGTH))
    observed = np.bincount(number, minlength=len(expected))
    counts = expected * len(tokens)
    is_rare = counts < 5
    if is_rare.any():
        observed = np.append(observed[~is_rare], observed[is_rare].sum())
        counts = np.append(counts[~is_rare], counts[is_rare].sum())
    assert len(counts) > 9, "too few samples"
    statistic = ((observed - counts) ** 2 / counts).sum()
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["good", "bad", "adversarial"])
def test_the_first_three_tokens_have_the_targets_distribution(rejection_sample, kind):
    tokens = generate(rejection_sample, kind, NUM_SAMPLES)
    assert p_value(tokens, joint(conditional_logits())) > LEVEL


def test_the_test_finds_an_error_of_one_percent():
    """Samples of a distribution 1% away, as far from it in chi-square as the least visible one."""
    expected = joint(conditional_logits())
    sign = np.where(np.arange(len(expected)) % 2 == 0, 1.0, -1.0)
    sign[1::2] *= expected[::2].sum() / expected[1::2].sum()
    wrong = expected * (1 + sign * 0.02 / np.abs(expected * sign).sum())
    assert np.abs(wrong - expected).sum() / 2 == pytest.approx(0.01)
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(50):
        number = rng.choice(len(wrong), NUM_SAMPLES, p=wrong / wrong.sum())
        tokens = np.stack([number // 9, number // 3 % 3, number % 3], axis=1)
        found += p_value(tokens, expected) <= LEVEL
    assert found >= 45, found

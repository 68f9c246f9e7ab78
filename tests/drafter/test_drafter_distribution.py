"""Sampling with drafts has the target's distribution: the first three tokens, for every policy.

The target is a table of conditional probabilities, so the joint distribution of three tokens behind
each of three prompts is known exactly. Requests come and go in a batch as in the engine; the
policies are the real ones, told what the speculator tells them, and drafts are verified by vLLM's
own rejection sampler, which runs the CPU kernels here.

A chi-square test at level 1e-3. It has 3 * 26 degrees of freedom, so 99.9% of exact samplers stay
below 122. An error of 1% in total variation adds at least n (2 TV)^2 to the mean of 78 (least if it
is a fixed share of every probability), which is 72 for 180,000 samples: mean 150, deviation
sqrt(2 (78 + 2 * 72)) = 21, and 0.9 of such samplers are found.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dllm.cpu.ragged import spread
from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.costs import CostTable
from dllm.drafter.widths.pilot import Pilot, PilotConfig, PilotWidth
from dllm.drafter.widths.policy import FixedWidth, VerifiedStep, WidthPolicy
from dllm.drafter.widths.survival import NUM_BINS
from dllm.patches.cpu import register_cpu_kernels
from dllm.patches.install import install
from tests.support.engine_harness import Engine  # noqa: F401  sets vLLM's environment first

VOCAB, LENGTH, NUM_PROMPTS, NUM_DRAFTS = 3, 3, 3, 3
NUM_SAMPLES = 180_000
LEVEL = 1e-3
NUM_SLOTS = 600
PROMPT_LENGTH = 10

Verify = Callable[..., tuple[np.ndarray, np.ndarray]]  # of a Step


# --- the target -----------------------------------------------------------------------------------

# A prefix is a number: the prompt's, then a digit for each token. Logits behind all prefixes of
# ``length`` tokens are the rows ``prompt + ...`` from OFFSETS[length] on; drafts reach beyond the
# third token.
SIZES = NUM_PROMPTS * VOCAB ** np.arange(LENGTH + NUM_DRAFTS)
OFFSETS = SIZES.cumsum() - SIZES
LOGITS = np.random.default_rng(1).normal(0, 1, (SIZES.sum(), VOCAB)).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def joint(probabilities: np.ndarray) -> np.ndarray:
    """Of three tokens behind each prompt, ``[prompts, 27]``, from those behind every prefix."""
    product = np.ones(NUM_PROMPTS)
    for size, offset in zip(SIZES[:LENGTH], OFFSETS, strict=False):
        product = (product[:, None] * probabilities[offset : offset + size]).reshape(-1)
    return product.reshape(NUM_PROMPTS, -1)


# --- a step of the target -------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What is verified together.

    Attributes:
        slots, requests: ``[rows]`` which request, and the slot that it has.
        lengths: ``[rows]`` tokens so far.
        numbers: ``[rows, N + 1]`` the prefix of those, and of those and 1, 2, ..., N drafts.
        drafts: ``[rows, N]``.
        widths: ``[rows]`` how many of them are verified.
    """

    slots: np.ndarray
    requests: np.ndarray
    lengths: np.ndarray
    numbers: np.ndarray
    drafts: np.ndarray
    widths: np.ndarray

    def in_order(self, order: np.ndarray) -> "Step":
        return Step(*(each[order] for each in vars(self).values()))


@pytest.fixture(scope="module")
def verify() -> Verify:
    """vLLM's rejection sampler: tokens ``[rows, N + 1]``, and how many of them there are."""
    install(serve_with_dllm=True)
    register_cpu_kernels(include_sampling=True)
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    def verify(
        step: Step, forgets_places: bool = False, by_block: bool = False, fresh_noise: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        starts = np.concatenate(([0], (step.widths + 1).cumsum()))
        rows, places = spread(starts)
        prefixes = step.numbers[rows, places]
        given = np.where(places > 0, step.drafts[rows, places - 1], 0)
        positions = PROMPT_LENGTH + step.lengths[rows] + places
        seeds = np.zeros(NUM_SLOTS, dtype=np.int64)
        seeds[step.slots] = step.requests * 16 + step.lengths * fresh_noise
        sampled, num_sampled = rejection_sampler_utils.rejection_sample(
            torch.from_numpy(LOGITS[OFFSETS[step.lengths[rows] + places] + prefixes]),
            None,
            torch.from_numpy(given).int(),
            torch.from_numpy(starts).int(),
            torch.from_numpy(positions * (not forgets_places)),
            torch.from_numpy(step.slots),
            torch.from_numpy(step.slots[rows]),
            torch.from_numpy(places).int(),
            torch.ones(NUM_SLOTS),
            torch.from_numpy(seeds),
            NUM_DRAFTS,
            use_block_verification=by_block,
        )
        return sampled.numpy(), num_sampled.numpy()

    return verify


# --- drafters -------------------------------------------------------------------------------------


def draft(kind: str, lengths: np.ndarray, numbers: np.ndarray, rng: np.random.Generator):
    """Drafts ``[rows, N]``, the prefixes behind them ``[rows, N + 1]``, how sure the drafter is.

    A good one says what is likeliest and how likely it is; a bad one knows nothing; an adversarial
    one says what is least likely and is the surer, the less likely it is.
    """
    drafts, sure = [], []
    prefixes = [numbers]
    for place in range(NUM_DRAFTS):
        known = softmax(LOGITS[OFFSETS[lengths + place] + prefixes[-1]])
        if kind == "bad":
            drafts.append(rng.integers(0, VOCAB, len(numbers)))
            sure.append(rng.random(len(numbers)))
        else:
            drafts.append(known.argmax(-1) if kind == "good" else known.argmin(-1))
            sure.append(known.max(-1) if kind == "good" else 1 - known.min(-1))
        prefixes.append(prefixes[-1] * VOCAB + drafts[-1])
    return np.stack(drafts, 1), np.stack(prefixes, 1), np.stack(sure, 1)


# --- policies -------------------------------------------------------------------------------------


POLICIES, DRAFTERS = ("fixed", "pilot", "adaptive"), ("good", "bad", "adversarial")
PILOT_SEED = 30  # of a random network that chooses 0, 1 and 2 behind the three prompts


def make(kind: str, drafter: str) -> WidthPolicy:
    """A real policy; the pilot's widths differ between prompts, the adaptive ones all the time."""
    if kind == "pilot":
        torch.manual_seed(PILOT_SEED)
        config = PilotConfig(tuple(range(NUM_DRAFTS + 1)), VOCAB, "raw", hidden_size=8)
        return PilotWidth(NUM_DRAFTS, NUM_SLOTS, Pilot(config))
    if kind == "adaptive":
        policy = AdaptiveWidth(NUM_DRAFTS, NUM_SLOTS, clock=lambda: 0.0)
        # What full width costs, if no width costs 1: so much that it depends on each request
        # whether a draft is worth it. Plain steps are dear, so that drafting never stops.
        dear = {"good": 1.8, "bad": 1.5, "adversarial": 1.1}[drafter]
        policy.costs = CostTable(
            np.array([1]),
            np.array([0, NUM_DRAFTS]),
            np.array([[1.0, dear]]),
            np.array([3.0]),
        )
        teach(policy, {"good": 0.6, "bad": 1 / 3, "adversarial": 0.1}[drafter])
        return policy
    return FixedWidth(NUM_DRAFTS, 2)


def teach(policy: AdaptiveWidth, rate: float) -> None:
    """Let it see requests one at a time; from hundreds at once it learns too much at first."""
    rng, slot = np.random.default_rng(0), np.zeros(1, dtype=np.int64)
    for _ in range(300):
        accepted = (rng.random((1, NUM_DRAFTS)) < rate).cumprod(axis=1).sum(axis=1)
        bins = rng.integers(0, NUM_BINS, (1, NUM_DRAFTS))
        policy.survival.reset(slot)
        policy.survival.observe(slot, slot + NUM_DRAFTS, accepted, bins)


# --- serving --------------------------------------------------------------------------------------


def serve(verify: Verify, policy: WidthPolicy, drafter: str, num_samples: int):
    """Requests 0, 1, 2, ..., each with the next prompt; every slot always has one.

    Runs until all of the first ``num_samples`` have three tokens, so that none counts for being
    fast.

    Returns:
        ``[prompts, 27]`` how often each three tokens came, and ``[N + 1]`` how often each width was
        chosen for a request that went on.
    """
    rng = np.random.default_rng(0)
    slots, drafts = (
        np.arange(NUM_SLOTS),
        np.zeros((NUM_SLOTS, NUM_DRAFTS), dtype=np.int64),
    )
    prompts = np.tile(slots % NUM_PROMPTS, (NUM_DRAFTS + 1, 1)).T
    step = Step(slots, slots, 0 * slots, prompts, drafts, 0 * slots)
    found, chosen = np.full(num_samples, -1), np.zeros(NUM_DRAFTS + 1, dtype=np.int64)
    while step.requests.min() < num_samples:
        step = step.in_order(rng.permutation(NUM_SLOTS))  # a row is not a slot
        sampled, num_sampled = verify(step)
        if policy.reads_outcomes:
            policy.observe(outcome(step, num_sampled))
        numbers, lengths = step.numbers[:, 0], step.lengths
        for place in range(NUM_DRAFTS + 1):
            is_new = place < num_sampled
            numbers = np.where(is_new, numbers * VOCAB + sampled[:, place], numbers)
            lengths = lengths + is_new
            counts = is_new & (lengths == LENGTH) & (step.requests < num_samples)
            found[step.requests[counts]] = numbers[counts]
        # The speculator does not know yet which requests are over, and drafts for all.
        is_over = lengths >= LENGTH
        requests = step.requests.copy()
        requests[is_over] = requests.max() + 1 + np.arange(is_over.sum())
        numbers = np.where(is_over, requests % NUM_PROMPTS, numbers)
        lengths = np.where(is_over, 0, lengths)
        drafts, numbers, sure = draft(drafter, lengths, numbers, rng)
        widths = 0 * lengths
        if policy.limit(step.slots):
            sure_of = sure if policy.reads_confidence else None
            widths = policy.widths(step.slots, sure_of, before_end(drafts))
        chosen += np.bincount(widths[~is_over], minlength=NUM_DRAFTS + 1)
        widths = np.where(is_over, 0, widths)  # a new request begins with its prompt
        step = Step(step.slots, requests, lengths, numbers, drafts, widths)
    return np.bincount(found, minlength=SIZES[LENGTH]).reshape(NUM_PROMPTS, -1), chosen


def before_end(drafts: np.ndarray) -> np.ndarray:
    """``[rows]``, as if token 0 ended an answer: widths then depend on the drafts themselves."""
    ends = drafts == 0
    return np.where(ends.any(axis=1), ends.argmax(axis=1), NUM_DRAFTS)


def outcome(step: Step, num_sampled: np.ndarray) -> VerifiedStep:
    """What the speculator tells a policy of a step."""
    in_prompt = step.lengths == 0
    accepted = np.where(step.widths > 0, num_sampled - 1, 0)
    logits = torch.from_numpy(LOGITS[step.numbers[in_prompt, 0]])
    everyone = np.ones_like(in_prompt)
    return VerifiedStep(step.slots, in_prompt, everyone, step.widths, accepted, logits)


# --- the test -------------------------------------------------------------------------------------


def p_value(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """Of a chi-square test of counts ``[rows, cells]``; each row's probabilities sum to 1.

    Cells of a row with fewer than five expected samples count as one.
    """
    statistic, freedom = 0.0, 0
    for found, expected in zip(
        observed, probabilities * observed.sum(-1, keepdims=True), strict=True
    ):
        is_rare = expected < 5
        if is_rare.any():
            found = np.append(found[~is_rare], found[is_rare].sum())
            expected = np.append(expected[~is_rare], expected[is_rare].sum())
        assert len(expected) > 9, "too few samples"
        statistic += ((found - expected) ** 2 / expected).sum()
        freedom += len(expected) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", POLICIES)
def test_the_first_three_tokens_have_the_targets_distribution(verify, kind, drafter):
    observed, chosen = serve(verify, make(kind, drafter), drafter, NUM_SAMPLES)
    assert observed.sum() == NUM_SAMPLES
    assert p_value(observed, joint(softmax(LOGITS))) > LEVEL
    if kind != "fixed":
        assert (chosen[:3] > 1000).all(), chosen  # width 0 among them


# --- it would find an error -----------------------------------------------------------------------


def peeking(verify: Verify, share: float) -> Verify:
    """Cuts the widths of a share of the requests to what was kept: the rejected draft is forgotten.

    Its place then gets a token from the whole distribution, the draft's included.
    """

    def verify_twice(step: Step) -> tuple[np.ndarray, np.ndarray]:
        kept = verify(step)[1] - 1
        peeks = (step.requests + 0.5) * (5**0.5 - 1) / 2 % 1 < share
        return verify(dataclasses.replace(step, widths=np.where(peeks, kept, step.widths)))

    return verify_twice


def peeked_probabilities() -> np.ndarray:
    """Behind every prefix, if all peek at good drafts: kept, or anything."""
    known = softmax(LOGITS)
    likeliest = known.max(-1, keepdims=True)
    peeked = (known == likeliest) * likeliest + (1 - likeliest) * known
    return np.where(np.arange(len(known))[:, None] < OFFSETS[1], known, peeked)


def test_a_width_that_knows_what_was_kept_is_found(verify):
    """An error of exactly 1%: the least that the test is to find."""
    right, wrong = joint(softmax(LOGITS)), joint(peeked_probabilities())
    variation = np.abs(wrong - right).sum() / 2 / NUM_PROMPTS
    policy = make("fixed", "good")
    observed, _ = serve(peeking(verify, share=1), policy, "good", NUM_SAMPLES // 10)
    assert p_value(observed, wrong) > LEVEL > p_value(observed, right)
    observed, _ = serve(peeking(verify, 0.01 / variation), policy, "good", NUM_SAMPLES)
    assert p_value(observed, right) < LEVEL


def test_noise_that_repeats_is_found(verify):
    """Every token alone has the right distribution, but not beside those before it."""
    observed, _ = serve(
        functools.partial(verify, forgets_places=True),
        make("fixed", "bad"),
        "bad",
        NUM_SAMPLES // 10,
    )
    right = joint(softmax(LOGITS))
    first = observed.reshape(NUM_PROMPTS, VOCAB, -1).sum(-1)
    assert np.abs(first / first.sum(1, keepdims=True) - softmax(LOGITS[:NUM_PROMPTS])).max() < 0.02
    assert p_value(observed, right) < LEVEL


def test_block_verification_is_not_exact_because_noise_repeats(verify):
    """Why ``pair`` refuses it: vLLM's noise is a function of seed and position.

    Block verification keeps drafts through the last whose number is low enough, so that the numbers
    behind are known to be high. The next step looks at the same ones again. With other numbers in
    every step it is exact.
    """
    right = joint(softmax(LOGITS))
    for fresh_noise in (False, True):
        block = functools.partial(verify, by_block=True, fresh_noise=fresh_noise)
        observed, _ = serve(block, make("fixed", "good"), "good", NUM_SAMPLES // 40)
        assert (p_value(observed, right) > LEVEL) is fresh_noise


def test_an_error_of_one_percent_is_found():
    """Samples of a distribution 1% away, as far from it in chi-square as the least visible one."""
    right = joint(softmax(LOGITS))
    sign = np.tile(np.where(np.arange(right.shape[1]) % 2 == 0, 1.0, -1.0), (NUM_PROMPTS, 1))
    sign[:, 1::2] *= right[:, ::2].sum(1, keepdims=True) / right[:, 1::2].sum(1, keepdims=True)
    wrong = right * (1 + sign * 0.02 / np.abs(right * sign).sum(1, keepdims=True))
    assert np.abs(wrong - right).sum(1) / 2 == pytest.approx(0.01)
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(50):
        observed = rng.multinomial(NUM_SAMPLES // NUM_PROMPTS, wrong)
        found += p_value(observed, right) <= LEVEL
    assert found >= 45, found

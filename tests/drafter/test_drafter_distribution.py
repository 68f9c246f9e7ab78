"""Sampling with drafts has the target's distribution: the first three tokens, for every policy.

The target is a table of conditional probabilities, so the joint distribution of three tokens behind
each of three prompts is known exactly. Requests come and go in a batch as in the engine; the
policies are the real ones, told what the speculator tells them, and drafts are verified by our
rule. More than the distribution holds: the tokens are those that plain decoding draws.

A chi-square test at level 1e-3. It has 3 * 26 degrees of freedom, so 99.9% of exact samplers stay
below 122. An error of 1% in total variation adds at least n (2 TV)^2 to the mean of 78 (least if it
is a fixed share of every probability), which is 72 for 180,000 samples: mean 150, deviation
sqrt(2 (78 + 2 * 72)) = 21, and 0.9 of such samplers are found.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dllm.cpu.ragged import spread
from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.pilot import Pilot, PilotConfig, PilotWidth
from dllm.drafter.widths.policy import FixedWidth, VerifiedStep, WidthPolicy
from dllm.drafter.widths.survival import NUM_BINS
from dllm.patches.cpu import register_cpu_kernels
from dllm.patches.install import install
from tests.support.drafter_harness import FixedCosts
from tests.support.engine_harness import Engine  # noqa: F401  sets vLLM's environment first

VOCAB, LENGTH, NUM_PROMPTS, NUM_DRAFTS = 3, 3, 3, 3
NUM_SAMPLES = 180_000
LEVEL = 1e-3
NUM_SLOTS = 600
PROMPT_LENGTH = 10
END = 0  # the token that ends an answer, for policies; answers go on for three tokens all the same

Verify = Callable[["Step"], tuple[np.ndarray, np.ndarray]]


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


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels() -> None:
    """vLLM's sampling functions run without Triton."""
    install(serve_with_dllm=True)
    register_cpu_kernels(include_sampling=True)


def gumbel(logits: np.ndarray, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """vLLM's sampler at temperature 1, ``[rows]`` tokens; a request's number is its seed."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    seeds, rows = np.unique(requests, return_inverse=True)
    return gumbel_sample(
        torch.from_numpy(logits),
        torch.from_numpy(rows),
        torch.ones(len(seeds)),
        torch.from_numpy(seeds),
        torch.from_numpy(positions),
        apply_temperature=True,
        is_drafting=False,
    ).numpy()


def verify(step: Step, position: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Our rule: tokens ``[rows, N + 1]``, and how many of them there are.

    Args:
        position: at 0 every place gets the same random numbers, which is wrong.
    """
    from dllm.drafter.verification import keep_own_tokens

    starts = np.concatenate(([0], (step.widths + 1).cumsum()))
    rows, places = spread(starts)
    lengths = step.lengths[rows] + places
    logits = LOGITS[OFFSETS[lengths] + step.numbers[rows, places]]
    own = gumbel(logits, step.requests[rows], (PROMPT_LENGTH + lengths) * position)
    given = np.where(places > 0, step.drafts[rows, places - 1], 0)
    tokens, num_emitted = keep_own_tokens(
        torch.from_numpy(own), torch.from_numpy(given), torch.from_numpy(starts), NUM_DRAFTS
    )
    return tokens.numpy(), num_emitted.numpy()


# --- drafters -------------------------------------------------------------------------------------


def draft(kind: str, requests: np.ndarray, lengths: np.ndarray, numbers: np.ndarray):
    """Drafts ``[rows, N]``, what they were drawn from, and the prefixes behind them.

    A good drafter says what is likeliest; a bad one knows nothing; an adversarial one says what is
    least likely; a sampling one draws from a distribution that is near the target's.
    """
    drafts, logits, prefixes = [], [], [numbers]
    rng = np.random.default_rng(requests.sum() + lengths.sum())
    for place in range(NUM_DRAFTS):
        known = LOGITS[OFFSETS[lengths + place] + prefixes[-1]]
        guessed = {
            "good": known,
            "bad": rng.normal(0, 1, known.shape).astype(np.float32),
            "adversarial": -known,
            # Of the tokens so far, which a parallel drafter knows; not of the drafts.
            "sampled": 0.8 * LOGITS[OFFSETS[lengths + place] + numbers * VOCAB**place] + 0.3,
        }[kind].astype(np.float32)
        chosen = guessed.argmax(-1)
        if kind == "sampled":
            chosen = gumbel(guessed, requests, PROMPT_LENGTH + lengths + place)
        drafts.append(chosen)
        logits.append(guessed)
        prefixes.append(prefixes[-1] * VOCAB + chosen)
    return np.stack(drafts, 1), np.stack(logits, 1), np.stack(prefixes, 1)


def confidence(logits: np.ndarray) -> np.ndarray:
    """``[rows, N]``, as the speculator stores it."""
    probabilities = softmax(logits)
    return np.where(probabilities.argmax(-1) == END, 0, probabilities.max(-1))


# --- policies -------------------------------------------------------------------------------------


POLICIES, DRAFTERS = ("fixed", "pilot", "adaptive"), ("good", "bad", "adversarial", "sampled")
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
        dear = {"good": 1.5, "bad": 1.25, "adversarial": 1.1, "sampled": 1.3}[drafter]
        policy.costs = FixedCosts(NUM_DRAFTS, plain=3.0, drafting=1.0, per_block=dear - 1.0)
        rate = {"good": 0.6, "bad": 1 / 3, "adversarial": 0.1, "sampled": 0.4}[drafter]
        teach(policy, rate)
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


def serve(
    policy: WidthPolicy,
    drafter: str,
    num_samples: int,
    verify: Verify = verify,
    peeks: bool = False,
):
    """Requests 0, 1, 2, ..., each with the next prompt; every slot always has one.

    Runs until all of the first ``num_samples`` have three tokens, so that none counts for being
    fast.

    Args:
        verify: the rule.
        peeks: widths are cut in front of a draft that ends the answer. A policy is not told.

    Returns:
        ``[num_samples]`` the number of each request's three tokens behind its prompt, and
        ``[N + 1]`` how often each width was chosen for a request that went on.
    """
    rng = np.random.default_rng(0)
    slots = np.arange(NUM_SLOTS)
    drafts = np.zeros((NUM_SLOTS, NUM_DRAFTS), dtype=np.int64)
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
        drafts, draft_logits, numbers = draft(drafter, requests, lengths, numbers)
        widths = 0 * lengths
        if policy.wants_drafts(step.slots):
            sure = confidence(draft_logits) if policy.reads_confidence else None
            widths = policy.widths(step.slots, sure)
        if peeks:
            widths = np.minimum(widths, before_end(drafts))
        chosen += np.bincount(widths[~is_over], minlength=NUM_DRAFTS + 1)
        widths = np.where(is_over, 0, widths)  # a new request begins with its prompt
        step = Step(step.slots, requests, lengths, numbers, drafts, widths)
    return found, chosen


def counts(found: np.ndarray) -> np.ndarray:
    """``[prompts, 27]``: how often each three tokens came behind each prompt."""
    return np.bincount(found, minlength=SIZES[LENGTH]).reshape(NUM_PROMPTS, -1)


def before_end(drafts: np.ndarray) -> np.ndarray:
    """``[rows]``: drafts before the first that ends the answer."""
    ends = drafts == END
    return np.where(ends.any(axis=1), ends.argmax(axis=1), NUM_DRAFTS)


def outcome(step: Step, num_sampled: np.ndarray) -> VerifiedStep:
    """What the speculator tells a policy of a step."""
    in_prompt = step.lengths == 0
    accepted = np.where(step.widths > 0, num_sampled - 1, 0)
    accepted = np.minimum(accepted, before_end(step.drafts))
    logits = torch.from_numpy(LOGITS[step.numbers[in_prompt, 0]])
    everyone = np.ones_like(in_prompt)
    return VerifiedStep(step.slots, in_prompt, everyone, step.widths, accepted, logits)


def decode(num_samples: int) -> np.ndarray:
    """Plain decoding of the same requests: ``[num_samples]`` numbers as in ``serve``."""
    requests = np.arange(num_samples)
    numbers = requests % NUM_PROMPTS
    for length in range(LENGTH):
        positions = np.full(num_samples, PROMPT_LENGTH + length)
        tokens = gumbel(LOGITS[OFFSETS[length] + numbers], requests, positions)
        numbers = numbers * VOCAB + tokens
    return numbers


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


RIGHT = joint(softmax(LOGITS))


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    return decode(NUM_SAMPLES)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", POLICIES)
def test_the_first_three_tokens_have_the_targets_distribution(plain, kind, drafter):
    found, chosen = serve(make(kind, drafter), drafter, NUM_SAMPLES)
    assert p_value(counts(found), RIGHT) > LEVEL
    np.testing.assert_array_equal(found, plain)
    if kind != "fixed":
        assert (chosen[:3] > 1000).all(), chosen  # width 0 among them


def test_not_even_a_width_that_reads_sampled_drafts_changes_a_token(plain):
    found, chosen = serve(make("fixed", "sampled"), "sampled", NUM_SAMPLES, peeks=True)
    assert (chosen[:3] > 1000).all(), chosen
    np.testing.assert_array_equal(found, plain)


def test_sampled_drafts_share_the_targets_random_numbers():
    """So that more of them are kept than of independent ones."""
    rng = np.random.default_rng(0)
    rows, positions = np.arange(20_000), np.zeros(20_000, dtype=np.int64)
    target = np.tile(rng.normal(0, 2, (1, 8)).astype(np.float32), (len(rows), 1))
    guess = target + np.float32(0.3) * rng.normal(0, 1, (1, 8)).astype(np.float32)
    own, shared = gumbel(target, rows, positions), gumbel(guess, rows, positions)
    distance = np.abs(softmax(target[0]) - softmax(guess[0])).sum() / 2
    assert (own == shared).mean() > (1 - distance) / (1 + distance) - 0.01  # 3 deviations
    assert (own == gumbel(guess, rows, positions + 1)).mean() < 0.7 * (own == shared).mean()


# --- it would find an error -----------------------------------------------------------------------


def test_noise_that_repeats_is_found():
    """Every token alone has the right distribution, but not beside those before it."""
    found, _ = serve(
        make("fixed", "bad"), "bad", NUM_SAMPLES // 10, verify=lambda step: verify(step, 0)
    )
    observed = counts(found)
    first = observed.reshape(NUM_PROMPTS, VOCAB, -1).sum(-1)
    assert np.abs(first / first.sum(1, keepdims=True) - softmax(LOGITS[:NUM_PROMPTS])).max() < 0.02
    assert p_value(observed, RIGHT) < LEVEL


def test_an_error_of_one_percent_is_found():
    """Samples of a distribution 1% away, as far from it in chi-square as the least visible one."""
    sign = np.tile(np.where(np.arange(RIGHT.shape[1]) % 2 == 0, 1.0, -1.0), (NUM_PROMPTS, 1))
    sign[:, 1::2] *= RIGHT[:, ::2].sum(1, keepdims=True) / RIGHT[:, 1::2].sum(1, keepdims=True)
    wrong = RIGHT * (1 + sign * 0.02 / np.abs(RIGHT * sign).sum(1, keepdims=True))
    assert np.abs(wrong - RIGHT).sum(1) / 2 == pytest.approx(0.01)
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(50):
        observed = rng.multinomial(NUM_SAMPLES // NUM_PROMPTS, wrong)
        found += p_value(observed, RIGHT) <= LEVEL
    assert found >= 45, found


# --- the rule alone -------------------------------------------------------------------------------


def test_own_tokens_are_kept_up_to_the_first_that_differs():
    from dllm.drafter.verification import keep_own_tokens

    own = torch.tensor([7, 8, 9, 1, 5, 6, 4])
    inputs = torch.tensor([0, 7, 8, 3, 2, -1, 6])  # -1: must not be kept
    starts = torch.tensor([0, 3, 4, 7])
    tokens, num_emitted = keep_own_tokens(own, inputs, starts, 3)
    assert num_emitted.tolist() == [3, 1, 1] and num_emitted.dtype == torch.int32
    emitted = [row[:count] for row, count in zip(tokens.tolist(), num_emitted, strict=True)]
    assert emitted == [[7, 8, 9], [1], [5]]
    assert tokens.shape == (3, 4)

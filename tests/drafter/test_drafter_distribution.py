"""Sampling with drafts draws the tokens that plain decoding draws, for every policy and drafter.

The target is a table of conditional probabilities. Requests come and go in a batch as in the
engine; the policies are the real ones, told what the speculator tells them, and drafts are verified
by our rule. So the distribution of plain decoding, which is tested once, is everybody's.
"""

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
NUM_SAMPLES = 36_000
NUM_SLOTS = 600
PROMPT_LENGTH = 10
END = 0  # the token that ends an answer, for policies; answers go on for three tokens all the same


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
    register_cpu_kernels()


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


def verify(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """Our rule: tokens ``[rows, N + 1]``, and how many of them there are."""
    from dllm.drafter.verification import keep_own_tokens

    starts = np.concatenate(([0], (step.widths + 1).cumsum()))
    rows, places = spread(starts)
    lengths = step.lengths[rows] + places
    logits = LOGITS[OFFSETS[lengths] + step.numbers[rows, places]]
    own = gumbel(logits, step.requests[rows], PROMPT_LENGTH + lengths)
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


def serve(policy: WidthPolicy, drafter: str, peeks: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Requests 0, 1, 2, ..., each with the next prompt; every slot always has one.

    Args:
        peeks: widths are cut in front of a draft that ends the answer. A policy is not told.

    Returns:
        ``[NUM_SAMPLES]`` the number of each request's three tokens behind its prompt, and
        ``[N + 1]`` how often each width was chosen for a request that went on.
    """
    rng = np.random.default_rng(0)
    slots = np.arange(NUM_SLOTS)
    drafts = np.zeros((NUM_SLOTS, NUM_DRAFTS), dtype=np.int64)
    prompts = np.tile(slots % NUM_PROMPTS, (NUM_DRAFTS + 1, 1)).T
    step = Step(slots, slots, 0 * slots, prompts, drafts, 0 * slots)
    found, chosen = np.full(NUM_SAMPLES, -1), np.zeros(NUM_DRAFTS + 1, dtype=np.int64)
    while step.requests.min() < NUM_SAMPLES:
        step = step.in_order(rng.permutation(NUM_SLOTS))  # a row is not a slot
        sampled, num_sampled = verify(step)
        if policy.reads_outcomes:
            policy.observe(outcome(step, num_sampled))
        numbers, lengths = step.numbers[:, 0], step.lengths
        for place in range(NUM_DRAFTS + 1):
            is_new = place < num_sampled
            numbers = np.where(is_new, numbers * VOCAB + sampled[:, place], numbers)
            lengths = lengths + is_new
            counts = is_new & (lengths == LENGTH) & (step.requests < NUM_SAMPLES)
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
    """Plain decoding of the same requests: ``[NUM_SAMPLES]`` numbers as in ``serve``."""
    requests = np.arange(num_samples)
    numbers = requests % NUM_PROMPTS
    for length in range(LENGTH):
        positions = np.full(num_samples, PROMPT_LENGTH + length)
        tokens = gumbel(LOGITS[OFFSETS[length] + numbers], requests, positions)
        numbers = numbers * VOCAB + tokens
    return numbers


# --- the tests ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    return decode(NUM_SAMPLES)


def test_plain_decoding_has_the_targets_distribution():
    """Of three tokens behind each of three prompts: chi-square with 3 * 26 degrees of freedom.

    99.9% of exact samplers stay below 122. An error of 1% in total variation adds at least
    n (2 TV)^2 to the mean of 78 (least if it is a fixed share of every probability), which is 72
    for 180,000 samples: mean 150, deviation sqrt(2 (78 + 2 * 72)) = 21; 0.9 of them are found.
    """
    expected = np.full(NUM_PROMPTS, 60_000.0)
    for size, offset in zip(SIZES[:LENGTH], OFFSETS, strict=False):
        expected = (expected[:, None] * softmax(LOGITS[offset : offset + size])).reshape(-1)
    observed = np.bincount(decode(180_000), minlength=SIZES[LENGTH])
    assert expected.min() > 5
    assert ((observed - expected) ** 2 / expected).sum() < 122


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", POLICIES)
def test_tokens_are_those_of_plain_decoding(plain, kind, drafter):
    found, chosen = serve(make(kind, drafter), drafter)
    np.testing.assert_array_equal(found, plain)
    if kind != "fixed":
        assert (chosen[:3] > 200).all(), chosen  # width 0 among them


def test_not_even_a_width_that_reads_sampled_drafts_changes_a_token(plain):
    found, chosen = serve(make("fixed", "sampled"), "sampled", peeks=True)
    assert (chosen[:3] > 200).all(), chosen
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

"""Policies as functions: what they learn, what a step costs, which widths earn most."""

import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from dllm.drafter.widths import adaptive as module
from dllm.drafter.widths.adaptive import (
    FIRST_TRIAL,
    LAST_TRIAL,
    TIMED_ONE_IN,
    AdaptiveWidth,
    best_widths,
)
from dllm.drafter.widths.costs import StepCosts
from dllm.drafter.widths.make import make_policy, may_skip_passes
from dllm.drafter.widths.policy import FixedWidth, VerifiedStep
from dllm.drafter.widths.survival import Survival, bins_of
from dllm.settings.drafting import DrafterOptions, always_verifies_all
from tests.support.clock import Clock
from tests.support.drafter_harness import FixedCosts

N = 5


def draw_accepted(rng: np.random.Generator, conditional: np.ndarray) -> np.ndarray:
    """Drafts kept of each row: ``conditional [rows, N]``, given that those before it were."""
    return (rng.random(conditional.shape) < conditional).cumprod(axis=1).sum(axis=1)


def test_a_policy_that_prices_nothing_waits_and_never_verifies_more_than_its_width():
    policy = FixedWidth(N, 3)
    policy.note_wait(1.0)
    policy.note_wait(None)
    assert policy.worth_ms(np.arange(2)) == float("inf")
    assert policy.most == 3 and FixedWidth(N).most == N


@pytest.mark.parametrize(
    ("replicas", "prompt_ranks", "is_moe", "may_skip"),
    [(1, 1, True, True), (2, 1, False, True), (2, 1, True, False), (1, 2, False, False)],
)
def test_a_pass_that_others_take_part_in_is_not_skipped(replicas, prompt_ranks, is_moe, may_skip):
    parallel = SimpleNamespace(
        data_parallel_size=replicas, prefill_context_parallel_size=prompt_ranks
    )
    model = SimpleNamespace(is_moe=is_moe)
    config = SimpleNamespace(parallel_config=parallel, model_config=model)
    assert may_skip_passes(config) is may_skip


def test_the_policy_of_the_options():
    adaptive = DrafterOptions(policy="adaptive")
    assert isinstance(make_policy(adaptive, 7, 4), AdaptiveWidth)
    assert not always_verifies_all(adaptive, 7)
    slots = np.array([4, 0, 2])
    for width, expected in ((None, 7), (3, 3), (0, 0)):
        options = DrafterOptions(width=width)
        policy = make_policy(options, 7, num_slots=5)
        assert policy.wants_drafts(slots) is (expected > 0)
        assert policy.widths(slots, None).tolist() == [expected] * 3
        assert always_verifies_all(options, 7) == (expected == 7)


# --- survival -------------------------------------------------------------------------------------


def test_a_new_request_is_expected_to_do_as_all_of_them_did():
    truth = np.array([0.9, 0.8, 0.85, 0.6, 0.7])
    rng, survival = np.random.default_rng(0), Survival(40, N)
    slots = np.arange(32)
    for _ in range(200):
        survival.reset(slots)
        accepted = draw_accepted(rng, np.tile(truth, (32, 1)))
        survival.observe(slots, np.full(32, N), accepted)
    estimate = survival.of(np.array([39]))[0]
    # The last 256 rows weigh most: three standard errors of a rate of so many.
    assert np.abs(estimate - truth.cumprod()).max() < 3 * 0.5 / np.sqrt(256)
    assert (np.diff(estimate) <= 0).all()


def test_a_request_comes_to_be_known_by_its_own_record():
    """Of two kinds of requests, whose hazards differ by a factor, each gets its own estimate."""
    base = np.array([0.8, 0.75, 0.7, 0.7, 0.7])
    kinds = np.where(np.arange(32) % 2 == 0, 0.2, 3.0)  # times the hazard: easy and hard
    conditional = base ** kinds[:, None]
    rng, survival = np.random.default_rng(1), Survival(32, N)
    slots = np.arange(32)
    estimates = []
    for step in range(400):
        accepted = draw_accepted(rng, conditional)
        survival.observe(slots, np.full(32, N), accepted)
        if step >= 200:
            estimates.append(survival.of(slots))
    mean = np.mean(estimates, axis=0)
    for kind in (0, 1):
        truth = conditional[kind].cumprod()
        assert np.abs(mean[kind::2].mean(axis=0) - truth).max() < 0.06  # shrunk towards the average


def test_the_drafters_confidence_tells_drafts_apart():
    sure, unsure = bins_of(np.array([0.999, 0.2]))
    conditional = np.where(np.arange(32)[:, None] % 2 == 0, 0.98, 0.4) * np.ones((32, N))
    bins = np.where(np.arange(32)[:, None] % 2 == 0, sure, unsure) * np.ones((32, N), dtype=int)
    rng, survival = np.random.default_rng(2), Survival(32, N)
    slots = np.arange(32)
    for _ in range(200):
        survival.reset(slots)  # nothing is known but how sure the drafter is
        survival.observe(slots, np.full(32, N), draw_accepted(rng, conditional), bins)
    survival.reset(slots)
    estimate = survival.of(slots[:2], bins[:2])
    assert abs(estimate[0, 0] - 0.98) < 0.03
    assert abs(estimate[1, 0] - 0.4) < 0.1
    assert estimate[0, -1] > 5 * estimate[1, -1]


def test_what_is_not_verified_is_expected_to_be_like_what_is():
    survival = Survival(1, N)
    slots = np.zeros(1, dtype=int)
    for _ in range(300):
        survival.observe(slots, np.array([1]), np.array([1]))  # the first draft only, always kept
    survival.reset(slots)
    assert survival.of(slots)[0, -1] > 0.9
    before = survival.of(slots)
    survival.observe(slots, np.array([0]), np.array([0]))  # nothing verified, nothing learned
    np.testing.assert_array_equal(survival.of(slots), before)


# --- costs ----------------------------------------------------------------------------------------

TRUTH = np.array([6.0, 0.4, 0.1, 2.0, 0.2])  # ms: a step, a request, a draft, a pass, a row of it


def step_ms(num_rows: int, num_verified: int, drafts: bool, truth: np.ndarray = TRUTH) -> float:
    return float(truth @ [1, num_rows, num_verified, drafts, drafts * num_rows])


def learn(costs: StepCosts, rng: np.random.Generator, num_steps: int, speed: float = 1.0) -> None:
    """Steps of all kinds, each measured with an error of a fifth, some of them disturbed."""
    for _ in range(num_steps):
        rows, drafts = int(rng.integers(1, 9)), bool(rng.random() < 0.5)
        verified = int(rng.integers(0, rows * N + 1))
        ms = speed * step_ms(rows, verified, drafts) * rng.lognormal(0, 0.2)
        costs.observe(rows, verified, drafts, ms * (30 if rng.random() < 0.02 else 1))


def test_costs_are_learned_from_noisy_times():
    """Within 20 %: 5 % too high because of the disturbed steps, and three deviations of 5 %."""
    rng, costs = np.random.default_rng(0), StepCosts(N)
    learn(costs, rng, 400)
    for rows in (1, 4, 8):
        drafting = costs.drafting(rows)
        assert drafting.shape == (rows * N + 1,)
        estimates = [costs.plain(rows), drafting[0], drafting[-1]]
        truth = [step_ms(rows, *kind) for kind in ((0, False), (0, True), (rows * N, True))]
        assert estimates == pytest.approx(truth, rel=0.2)


def test_a_machine_that_becomes_slower_changes_all_costs_alike():
    """Also of the kind of step that is not taken: plain ones are not seen at the new speed."""
    rng, costs = np.random.default_rng(1), StepCosts(N)
    learn(costs, rng, 300)
    for _ in range(100):
        costs.observe(2, N, True, 3 * step_ms(2, N, True) * rng.lognormal(0, 0.2))
    assert costs.plain(2) == pytest.approx(3 * step_ms(2, 0, False), rel=0.25)


def test_the_proportions_are_corrected_by_rare_trials():
    """A draft pass becomes twice as dear; one step in 64 is plain."""
    rng, costs = np.random.default_rng(2), StepCosts(N)
    learn(costs, rng, 300)
    dear = TRUTH * [1, 1, 1, 2, 1]
    ratios = [costs.drafting(1)[0] / costs.plain(1)]
    for step in range(64 * 40):
        drafts = step % 64 != 0
        costs.observe(1, 3, drafts, step_ms(1, 3, drafts, dear) * rng.lognormal(0, 0.2))
        ratios.append(costs.drafting(1)[0] / costs.plain(1))
    truth = step_ms(1, 0, True, dear) / step_ms(1, 0, False)  # 1.66; it was 1.34
    assert ratios[0] < 1.45 and np.mean(ratios[-640:]) == pytest.approx(truth, rel=0.1)


def test_costs_stay_positive_and_grow_with_the_work():
    costs = StepCosts(N)
    for index in range(200):  # the more work, the faster: no machine is like that
        costs.observe(1 + index % 8, index % 4, True, 10.0 - index % 8)
    for rows in (1, 8):
        assert 0 < costs.plain(rows) < costs.drafting(rows)[0]
        assert (np.diff(costs.drafting(rows)) > 0).all()


# --- the best widths ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_best_widths_are_those_of_trying_all(seed):
    rng = np.random.default_rng(seed)
    rows, drafts = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    survival = rng.random((rows, drafts)).cumprod(axis=1)
    survival[0] *= rng.random() < 0.8  # a row that is still in its prompt
    base = float(rows)
    cost = np.cumsum(rng.random(rows * drafts + 1) * rng.choice([0.05, 0.5])) + rng.random() * 3
    widths, rate = best_widths(survival, base, cost)
    best = max(
        (base + sum(survival[row, :width].sum() for row, width in enumerate(tried)))
        / cost[sum(tried)]
        for tried in itertools.product(range(drafts + 1), repeat=rows)
    )
    assert rate == pytest.approx(best)
    gained = sum(survival[row, :width].sum() for row, width in enumerate(widths))
    assert (base + gained) / cost[widths.sum()] == pytest.approx(best)


# --- adaptive -------------------------------------------------------------------------------------


class Traffic:
    """Requests that go through a policy, whose drafts are kept with given probabilities.

    Args:
        plain_ms, drafting_ms: of a step that verifies nothing, without and with a draft pass.
        per_draft_ms: what each verified draft adds.
        reply_ms: drafts come from another process, so long after they are asked for. In place of
            the draft pass a step waits, until they are there, DEADLINE_MS are over, or longer than
            the policy says that they are worth.
    """

    def __init__(
        self,
        policy: AdaptiveWidth,
        num_rows: int,
        plain_ms: float = 10.0,
        drafting_ms: float = 15.0,
        per_draft_ms: float = 0.5,
        reply_ms: float | None = None,
    ) -> None:
        self.policy, self.num_rows, self.reply_ms = policy, num_rows, reply_ms
        self.num_tokens, self.waits_ms = 0, []
        self.plain_ms, self.pass_ms = plain_ms, drafting_ms - plain_ms
        self.per_draft_ms = per_draft_ms
        self.rng = np.random.default_rng(0)
        self.slots = np.arange(num_rows)
        self.last = self.late = np.zeros(num_rows, dtype=int)
        self.drafted: list[bool] = []
        self.has_passed = False  # a draft pass, or a wait, is part of the time of the next step

    def arrive(self) -> None:
        """New requests take all slots."""
        self.last = self.late = np.zeros(self.num_rows, dtype=int)
        self._observe(np.ones(self.num_rows, dtype=bool), self.last)
        self._choose()

    def _observe(self, in_prompt: np.ndarray, accepted: np.ndarray) -> None:
        tried = self.last + self.late  # a draft that is late is as good as one that is wrong
        step = VerifiedStep(self.slots, in_prompt, tried, accepted, self.has_passed)
        self.policy.observe(step)

    def step(self, conditional: np.ndarray) -> np.ndarray:
        """One step of the target; returns the widths chosen for the next."""
        self.policy.clock.now += (self.plain_ms + self.per_draft_ms * self.last.sum()) / 1e3
        accepted = draw_accepted(self.rng, np.broadcast_to(conditional, (self.num_rows, N)))
        accepted = np.minimum(accepted, self.last)
        self._observe(np.zeros(self.num_rows, dtype=bool), accepted)
        self.num_tokens += self.num_rows + int(accepted.sum())
        return self._choose()

    def steps(self, count: int, conditional: np.ndarray) -> np.ndarray:
        """``[count, rows]``: the widths chosen in so many steps."""
        return np.array([self.step(conditional) for _ in range(count)])

    @property
    def is_drafting(self) -> bool:
        return self.policy.is_drafting

    def _choose(self) -> np.ndarray:
        self.last = self.late = np.zeros(self.num_rows, dtype=int)
        self.drafted.append(self.policy.wants_drafts(self.slots))
        self.has_passed = self.drafted[-1] or not self.policy.may_skip
        if self.has_passed:
            is_late = self._get_drafts()
            widths = self.policy.widths(self.slots, None)
            if is_late:
                self.late = (widths > 0).astype(int)
            else:
                self.last = widths
        return self.last

    def _get_drafts(self) -> bool:
        """Let the draft pass run, or wait; returns whether drafts are late."""
        if self.reply_ms is None:
            self.policy.clock.now += self.pass_ms / 1e3
            return False
        longest_ms = max(0.0, min(DEADLINE_MS, self.policy.worth_ms(self.slots)))
        self.waits_ms.append(min(self.reply_ms, longest_ms))
        self.policy.clock.now += self.waits_ms[-1] / 1e3
        self.policy.note_wait(self.waits_ms[-1] / 1e3)
        return self.reply_ms > longest_ms


def adaptive(num_rows: int) -> AdaptiveWidth:
    return AdaptiveWidth(N, num_rows, reads_confidence=False, clock=Clock())


def served(num_rows: int, policy: AdaptiveWidth | None = None, **times: float) -> Traffic:
    """Traffic of so many requests, which have arrived."""
    traffic = Traffic(policy or adaptive(num_rows), num_rows, **times)
    traffic.arrive()
    return traffic


GOOD, BAD = np.full(N, 0.9), np.full(N, 0.05)
DEADLINE_MS = 50.0


def test_drafting_stops_where_it_does_not_pay_and_is_taken_up_again():
    traffic = served(1)
    widths = traffic.steps(100, BAD)
    assert widths[0] > 0
    assert not traffic.is_drafting and widths[-1] == 0
    traffic.arrive()
    widths = traffic.steps(1000, GOOD)
    assert traffic.is_drafting and widths[-1] == N


def test_a_drafter_with_other_weights_is_tried_at_once():
    traffic = served(1)
    traffic.steps(1000, BAD)
    assert not traffic.is_drafting
    traffic.policy.forget_drafter()
    widths = traffic.steps(20, GOOD)
    assert all(traffic.drafted[-20 : -20 + FIRST_TRIAL - 1]) and np.median(widths) == N


@pytest.mark.parametrize("conditional", [np.zeros(N), np.ones(N)])
def test_trials_become_rare_while_they_change_nothing(conditional):
    """Where drafts are never kept, trials draft; where they always are, trials do not."""
    traffic = served(1)
    traffic.steps(5000, conditional)
    usual = traffic.is_drafting
    assert usual is bool(conditional.any())
    trials = np.flatnonzero(np.array(traffic.drafted[1000:]) != usual)
    assert (np.diff(trials) == LAST_TRIAL).all() and len(trials) >= 30
    assert traffic.drafted.count(usual) > 0.95 * 5000


def test_after_hard_traffic_a_full_batch_drafts_again():
    """However much is known of the hard traffic, trials of a few requests each outweigh it."""
    traffic = served(32, plain_ms=3.0, drafting_ms=4.0, per_draft_ms=5 / 160)
    traffic.steps(1000, BAD)
    assert sum(traffic.drafted[500:]) <= 10
    easy = traffic.steps(8 * LAST_TRIAL, GOOD).sum(axis=1)
    assert traffic.is_drafting and np.median(easy[-50:]) > 32


@pytest.mark.parametrize("num_rows", [1, 4])
def test_where_texts_become_easy_drafting_is_taken_up_soon(num_rows):
    """Behind one trial that pays the next ones are near."""
    traffic = served(num_rows, plain_ms=3.0, drafting_ms=4.0, per_draft_ms=0.02)
    traffic.steps(1000, BAD)
    assert not traffic.is_drafting
    num_steps = 0
    while not traffic.is_drafting and num_steps < 1000:
        traffic.step(GOOD)
        num_steps += 1
    assert num_steps <= 2 * LAST_TRIAL


def test_behind_a_trial_that_paid_but_waited_the_next_is_far(monkeypatch):
    """As far as WAITING_SHARE asks: waits stay a small share of the time."""
    monkeypatch.setattr(module, "HYSTERESIS", 9.0)  # one trial is not enough to draft again
    policy = adaptive(1)
    traffic = served(1, policy, plain_ms=10.0, per_draft_ms=0.1, reply_ms=5.0)
    traffic.steps(500, BAD)
    assert not traffic.is_drafting
    num_waits = len(traffic.waits_ms)
    while len(traffic.waits_ms) == num_waits:
        traffic.step(np.ones(N))
    traffic.step(np.ones(N))  # verifies the trial's drafts
    assert not traffic.is_drafting
    num_steps, num_waits = 1, len(traffic.waits_ms)
    while len(traffic.waits_ms) == num_waits:
        traffic.step(BAD)
        num_steps += 1
    assert num_steps >= 40


def test_drafting_of_which_nothing_is_verified_is_stopped():
    """A draft pass that costs less than the margin, and drafts that cost more than they earn."""
    traffic = served(1, plain_ms=10.0, drafting_ms=10.1, per_draft_ms=4.0)
    traffic.steps(100, BAD)
    assert not traffic.is_drafting


def test_unsure_drafts_are_not_taken_for_average_ones():
    """If the drafter is never sure, its drafts are as bad before they are seen as behind it."""
    survival, slots = Survival(1, N), np.zeros(1, dtype=int)
    bins = np.zeros((1, N), dtype=int)
    rng = np.random.default_rng(3)
    for _ in range(400):
        survival.reset(slots)
        survival.observe(slots, np.array([N]), draw_accepted(rng, np.full((1, N), 0.1)), bins)
    survival.reset(slots)
    np.testing.assert_allclose(survival.of(slots), survival.of(slots, bins), rtol=0.02)
    assert survival.of(slots)[0, 0] < 0.2


def test_a_hopeless_request_is_tried_again_in_time():
    survival, slots = Survival(2, N), np.arange(2)
    for _ in range(50):
        survival.observe(slots, np.array([N, N]), np.array([N, 0]))
    hopeless = survival.of(slots)[1, 0]
    for _ in range(100):
        survival.observe(slots, np.array([N, 0]), np.array([N, 0]))
    easy, again = survival.of(slots)[:, 0]
    assert hopeless < 0.1 and again > 0.4 and easy > 0.9


def test_a_trial_verifies_one_request_that_was_tried_least():
    chosen = served(4).steps(3000, np.zeros(N))
    trials = [widths for widths in chosen[200:] if widths.any()]
    assert trials and all(sorted(widths) == [0, 0, 0, N] for widths in trials)
    assert len({int(widths.argmax()) for widths in trials[:4]}) > 1


@pytest.mark.parametrize("is_drafting", [True, False])
def test_between_start_and_stop_there_is_a_margin(is_drafting, monkeypatch):
    """Where neither is better by a fifth, both go on; beyond that they change places."""
    monkeypatch.setattr(module, "HYSTERESIS", 0.2)
    policy = adaptive(1)
    policy.costs = FixedCosts(N, plain=10.0, drafting=15.0, per_block=2.5)
    traffic = served(1, policy)
    policy.is_drafting = is_drafting
    first = 0.55  # of one draft: (1 + 0.55) / 15.5 is as much as 1 / 10
    monkeypatch.setattr(
        policy.survival, "of", lambda slots, bins=None: np.array([[first, 0, 0, 0, 0]])
    )
    for first, expected in ((0.55, is_drafting), (0.05 if is_drafting else 0.95, not is_drafting)):  # noqa: B007  read by `of`
        traffic.arrive()
        assert policy.is_drafting is expected


@pytest.mark.parametrize("answer_steps", [20, 10**9], ids=["short answers", "one answer"])
@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize(
    ("reply_ms", "conditional"),
    [
        *((reply_ms, BAD) for reply_ms in (0.3, 1.0, 3.0, 20.0)),
        (30.0, GOOD),
        (float("inf"), GOOD),
    ],
)
def test_a_worker_that_is_of_no_use_costs_three_percent(
    reply_ms, conditional, num_rows, answer_steps
):
    """Whether its drafts are wrong or late: from two seconds of traffic on."""
    traffic = served(num_rows, plain_ms=3.0, per_draft_ms=0.1, reply_ms=reply_ms)
    clock, began = traffic.policy.clock, None
    for step in range(4000):
        if step and step % answer_steps == 0:  # their prompts take a step, which gives a token, too
            clock.now += 3.0 / 1e3
            traffic.num_tokens += num_rows
            traffic.arrive()
        traffic.step(conditional)
        if began is None and clock.now >= 2.0:
            began, before = clock.now, traffic.num_tokens
            traffic.waits_ms.clear()
    ms = 1e3 * (clock.now - began)
    assert 3.0 * (traffic.num_tokens - before) / num_rows >= 0.97 * ms
    # Nobody waits longer than all drafts are worth, each as much as a step; times are known by now.
    assert max(traffic.waits_ms) <= 1.1 * N * 3.0


def test_a_slow_worker_that_becomes_quick_is_used():
    traffic = served(1, plain_ms=3.0, per_draft_ms=0.1, reply_ms=float("inf"))
    traffic.steps(2000, GOOD)
    assert not traffic.is_drafting
    traffic.reply_ms = 1.0
    widths = traffic.steps(2000, GOOD)
    assert traffic.is_drafting and np.median(widths[-100:]) == N


def test_widths_differ_between_requests():
    traffic = served(2, plain_ms=11.0, drafting_ms=12.0, per_draft_ms=2.0)
    widths = traffic.steps(60, np.stack([np.full(N, 0.97), np.full(N, 0.3)]))
    assert widths[20:, 0].mean() > widths[20:, 1].mean() + 2


def test_nobody_is_drafted_for_while_all_read_their_prompts():
    """Steps of which nobody can use drafts bring no trial nearer."""
    policy = adaptive(2)
    nothing, in_prompt = np.zeros(2, dtype=int), np.array([True, True])
    for _ in range(2 * FIRST_TRIAL):
        policy.observe(VerifiedStep(np.arange(2), in_prompt, nothing, nothing, False))
        assert not policy.wants_drafts(nothing[:0])
    assert policy.wants_drafts(np.array([1]))
    assert policy.widths(np.array([1]), None) > 0


def test_another_request_in_a_slot_is_an_average_one():
    policy = adaptive(2)
    slots, tried = np.arange(2), np.full(2, N)
    for _ in range(20):
        policy.observe(VerifiedStep(slots, tried < 0, tried, np.array([N, 0]), True))
    before = policy.survival.of(slots)[1, 0]
    policy.forget_requests(slots[1:])
    assert policy.survival.of(slots)[1, 0] > before + 0.2


@pytest.mark.parametrize(
    ("plain_ms", "drafting_ms", "pays"), [(10.0, 40.0, False), (4.0, 15.0, False), (20, 22, True)]
)
def test_what_steps_really_cost_decides(plain_ms, drafting_ms, pays):
    """Drafts are kept half of the time, which the first guess of the costs takes for a gain."""
    traffic = served(1, plain_ms=plain_ms, drafting_ms=drafting_ms, per_draft_ms=0.1)
    traffic.steps(1000, np.full(N, 0.5))
    share = np.mean(traffic.drafted[500:])
    assert share > 0.9 if pays else share < 0.1


def test_an_idle_server_is_not_a_slow_one():
    """The time before a request arrives is nobody's step."""
    policy = adaptive(1)
    traffic = Traffic(policy, 1)
    for _ in range(20):
        policy.clock.now += 60.0
        traffic.arrive()
        traffic.steps(20, GOOD)
    assert policy.costs.drafting(1)[N] == pytest.approx(15 + 0.5 * N, rel=0.1)


def test_short_answers_stop_the_drafting_that_is_worth_nothing():
    """Every draft is kept, but the first one ends the answer: `accepted` does not count it."""
    traffic = Traffic(adaptive(1), 1)
    for _ in range(100):
        traffic.arrive()
        traffic.step(np.zeros(N))
    assert traffic.drafted[0] and sum(traffic.drafted[-100:]) <= 10

    # Then long answers arrive, and their trials show it.
    for _ in range(40):
        traffic.arrive()
        traffic.steps(20, GOOD)
    assert np.mean(traffic.drafted[-200:]) > 0.9


def test_a_drafting_step_costs_little_python(monkeypatch):
    """Of steps of the same kind one in four is timed; so are all trials, which are of another."""
    policy, timed = adaptive(1), []
    monkeypatch.setattr(policy.costs, "observe", lambda *step: timed.append(step[2]))
    choose = Mock(wraps=policy._best_widths)
    monkeypatch.setattr(policy, "_best_widths", choose)
    traffic = served(1, policy)
    traffic.steps(400, np.ones(N))
    num_trials = traffic.drafted.count(False)
    assert num_trials and timed.count(False) == num_trials
    # Widths are chosen in each step that drafts, and what it depends on is decided in few.
    assert len(timed) <= 400 / TIMED_ONE_IN + 2 * num_trials
    assert choose.call_count <= 400 * (1 + 1 / TIMED_ONE_IN) + 2 * num_trials


# --- a drafter that always runs -------------------------------------------------------------------


def test_where_the_drafter_always_runs_whole_steps_are_timed(monkeypatch):
    """As steps with a pass, also those for which the policy says no."""
    policy = adaptive(4)
    policy.may_skip = False
    timed: list[tuple[int, bool, float]] = []
    monkeypatch.setattr(policy.costs, "observe", lambda num_rows, *observed: timed.append(observed))
    traffic = served(4, policy)
    for _ in range(100):
        traffic.step(np.full(N, 1e-4))
        assert traffic.drafted[-1] or not traffic.last.any()
    assert np.mean(traffic.drafted[-50:]) < 0.1
    assert len(timed) == 100 // TIMED_ONE_IN
    for num_verified, drafts, ms in timed:
        assert drafts and ms == pytest.approx(15.0 + 0.5 * num_verified)


@pytest.mark.parametrize("may_skip", [True, False])
def test_a_pass_that_is_made_in_any_case_costs_nothing(may_skip):
    """1.2 tokens in 15.5 ms: worse than 1 in 10 ms, better than 1 in 15 ms.

    Nothing is verified in the steps for which the policy says no.
    """
    policy = adaptive(4)
    policy.may_skip = may_skip
    traffic, num_verifying = served(4, policy), []
    for _ in range(400):
        num_verifying.append(bool(traffic.step(np.full(N, 0.2)).any()))
        assert traffic.drafted[-1] or not num_verifying[-1]
    assert (np.mean(num_verifying[-200:]) > 0.8) is not may_skip

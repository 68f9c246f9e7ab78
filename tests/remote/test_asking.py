"""A target and its workers on a clock of their own: deadlines, fail-over, widths.

The text is right in every test: ``finish`` checks it.
"""

import numpy as np
import pytest

from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.policy import FixedWidth
from dllm.remote import client as asking
from dllm.remote.client import MAX_RESETS, DraftRequest, choose
from dllm.remote.link import RECONNECT_S, State
from tests.support.oracle import VOCAB, plain
from tests.support.remote_harness import Clock, Net, Target, link_to, simulated, worker

STEP_S, DEADLINE_S = 0.01, 0.05
NUM_TOKENS = 200


def begin(target: Target, count: int = 2, num_tokens: int = NUM_TOKENS, first: int = 0) -> None:
    for number in range(first, first + count):
        target.add(str(number), [number % VOCAB, 3, 7], num_tokens)


def finish(target: Target, num_tokens: int = NUM_TOKENS) -> None:
    """Run to the end; nothing is lost, nothing is wrong, nothing is left over."""
    target.run()
    for name, request in target.finished.items():
        assert request.tokens == plain([int(name) % VOCAB, 3, 7], num_tokens), name
    target.step()
    assert not target.client.sessions


def steps_without_drafts(target: Target) -> int:
    return sum(width == 0 for width in target.widths)


def test_an_ask_has_no_more_rows_than_a_worker_reads(monkeypatch):
    """Sessions that do not fit are told of with a later batch; some that ended are not told of."""
    monkeypatch.setattr(asking, "MAX_ROWS", 2)
    target, net = simulated()
    begin(target, 4, 20)
    finish(target, 20)
    assert max(len(batch.rows) for batch in net.sent) == 2
    assert max(len(batch.over) for batch in net.sent) == 2
    assert target.count("drafts")


def test_a_long_text_is_told_in_parts_and_drafted_for_when_all_of_it_is_told(monkeypatch):
    monkeypatch.setattr(asking, "MAX_DELTA_TOKENS", 50)
    target, net = simulated()
    prompt = [place % VOCAB for place in range(180)]
    target.add("long", prompt, 20)
    target.run()
    assert target.finished["long"].tokens == plain(prompt, 20)
    rows = [row for batch in net.sent for row in batch.rows]
    assert [len(row.tokens) for row in rows[:4]] == [50, 50, 50, 33]  # 3 steps meanwhile
    assert [row.want > 0 for row in rows[:4]] == [False, False, False, True]
    assert target.count("drafts") > 10


def test_connections_are_looked_at_ten_times_a_second_while_nobody_drafts():
    target, net = simulated(policy=FixedWidth(4, 0))
    begin(target, 1)
    reads, read = [], net.read
    net.read = lambda: (reads.append(target.clock.now), read())[1]
    finish(target)
    assert len(reads) == pytest.approx(sum(target.steps) / RECONNECT_S, abs=2)
    assert not net.sent


def test_what_is_told_is_what_is_new():
    target, net = simulated()
    begin(target, 3)
    finish(target)
    told = sum(len(row.tokens) for batch in net.sent for row in batch.rows)
    assert 3 * NUM_TOKENS - 3 * 5 <= told <= 3 * (3 + NUM_TOKENS)


def test_a_step_behind_which_no_draft_is_of_use_is_a_plain_one(monkeypatch):
    """Others take as long without their wait."""
    target, _ = simulated(policy=adaptive)
    drafter, timed = target.drafter, []
    costs = drafter.driver.policy.costs
    monkeypatch.setattr(costs, "observe", lambda *step: timed.append(step[-2:]))
    for want in (4, 0, 4, 4):
        in_prompt, none = np.array([False]), np.array([0])
        drafter.follow({"a": DraftRequest([1, 2, 1, 2], want)}, in_prompt, none, none)
        _, (drafts,) = drafter.take()
        assert bool(drafts) == bool(want)
        target.clock.now += STEP_S
    waited = 1e3 * target.counts["drafting_seconds", ""]
    assert [drafted for drafted, _ in timed] == [True, False, False, True, False]
    for drafted, ms in timed:
        assert ms == pytest.approx(1e3 * STEP_S, abs=drafted * waited + 1e-6)


def test_a_right_worker_saves_four_of_five_steps():
    target, _ = simulated()
    begin(target)
    finish(target)
    # The prompt's step has none; the drafts for the one behind it were asked for at admission.
    assert len(target.steps) - 1 == pytest.approx(NUM_TOKENS / 5, abs=2)
    assert steps_without_drafts(target) <= 2
    assert target.count("misses") == 0


def test_prompts_are_sent_at_admission_so_that_first_drafts_wait_for_nothing():
    target, net = simulated(step_s=STEP_S)
    net.draft_s = STEP_S / 8
    begin(target, 1)
    target.step()
    assert target.steps[0] == pytest.approx(STEP_S)  # it did not wait
    target.step()
    assert target.widths == [0, 4]


def test_a_killed_worker_costs_no_step_more_than_its_time():
    """The connection breaks, which is seen at once."""
    target, net = simulated()
    begin(target)
    target.step(5)
    net.kill()
    target.step(10)
    assert max(target.steps[5:]) < STEP_S + 1e-9
    assert target.widths[7:15] == [0] * 8
    net.restart(worker(target.clock))
    up = target.clock.now
    while not target.widths[-1]:
        target.step()
    assert target.clock.now - up < RECONNECT_S + 4 * STEP_S
    finish(target)
    assert target.links[0].num_ups == 2 and target.count("misses") == 0


def test_a_hung_worker_costs_one_deadline():
    target, net = simulated(deadline_s=DEADLINE_S)
    begin(target, num_tokens=2000)
    target.step(5)
    net.is_hung = True
    target.step(50)
    late = [step for step in target.steps[5:] if step > STEP_S + 1e-9]
    assert late == pytest.approx([STEP_S + DEADLINE_S])
    assert target.links[0].is_out and target.count("misses") == 1
    net.is_hung = False
    back = target.clock.now
    before = len(target.steps)
    while not target.widths[-1]:
        target.step()
    assert target.clock.now - back < 4 * STEP_S
    assert max(target.steps[before:]) < STEP_S + DEADLINE_S / 2
    finish(target, 2000)


@pytest.mark.parametrize(
    ("delay_s", "draft_s"),
    [(2 * DEADLINE_S, 1e-4), (0.0, 2 * DEADLINE_S)],
    ids=["late", "in time with nothing"],
)
def test_a_worker_without_use_is_given_up_by_the_policy(delay_s, draft_s):
    """The second one's model is too slow: it answers in time, before its draft has begun."""
    between = {"delay_s": delay_s, "draft_s": draft_s}
    target, _ = simulated(between=between, deadline_s=DEADLINE_S, policy=adaptive)
    begin(target, 1, 5000)
    finish(target, 5000)
    waited = sum(target.steps) - STEP_S * len(target.steps)
    assert waited < 0.1 * sum(target.steps)
    assert target.count("replies") > 3
    assert (target.count("misses") > 0) == (delay_s > 0)


@pytest.mark.parametrize("full", [0.0, 0.1])
def test_delay_jitter_and_asks_that_cannot_be_sent(full):
    target, _ = simulated(0.8, between={"delay_s": 0.002, "jitter_s": 0.02, "full": full})
    begin(target, 6)
    finish(target)
    assert target.count("drafts") > 100
    assert target.count("misses") == 0


def test_aborted_requests_leave_nothing_behind():
    target, net = simulated(num_slots=4)
    for number in range(20):
        begin(target, 3, 50, first=3 * number)
        target.step()
        target.step()
        target.abort(str(3 * number))
        target.run()
    finish(target, 50)
    assert net.worker.num_sessions == 0 and not net.worker._drafts.runs


def run_ahead(alpha: float, ahead: int) -> list[float]:
    """Seconds that steps with a request behind its prompt waited; a draft takes 1 ms."""
    target, _ = simulated(alpha, ahead, {"draft_s": 0.001})
    begin(target, 1, 3000)
    finish(target, 3000)
    return [step - STEP_S for step in target.steps[2:-5]]  # at the end fewer are asked for


def test_running_ahead_has_drafts_ready_when_all_were_right():
    """With probability alpha^(K + 1): the K drafts, and the token behind them."""
    alpha, num_drafts = 0.8, 4
    behind, ahead = (run_ahead(alpha, count) for count in (0, num_drafts + 1))
    assert min(behind) > 0.002  # drafting begins when the target's tokens are known
    hits = np.mean([wait < 1e-6 for wait in ahead])
    # About 900 steps: a deviation of 0.016.
    assert hits == pytest.approx(alpha ** (num_drafts + 1), abs=4 * 0.016)
    assert np.mean(ahead) < 0.75 * np.mean(behind)
    assert max(run_ahead(1.0, num_drafts + 1)) < 1e-6


def test_nobody_waits_for_an_answer_that_will_not_come():
    """A session that the worker forgot too often is not asked for; its neighbour's end is told."""
    target, _ = simulated()
    begin(target, 1, 100)
    begin(target, 1, 3, first=1)
    target.step()
    target.client.sessions["0"].resets = MAX_RESETS + 1
    target.client.sessions["0"].draft = []
    finish_steps = len(target.steps)
    target.run()
    assert target.count("misses") == 0
    assert max(target.steps[finish_steps:]) < 2 * STEP_S


# --- pools ----------------------------------------------------------------------------------------


def pool(clock: Clock, count: int = 3, **how) -> list[Net]:
    return [
        Net(worker(clock), clock, address=f"unix:///{number}", **how) for number in range(count)
    ]


def test_sessions_spread_over_the_workers_and_stay():
    clock = Clock()
    nets = pool(clock)
    target = Target(nets, clock, num_slots=60)
    begin(target, 60, 40)
    finish(target, 40)
    told = [{row.session for batch in net.sent for row in batch.rows if row.tokens} for net in nets]
    assert not (told[0] & told[1] or told[0] & told[2] or told[1] & told[2])
    assert min(map(len, told)) >= 10  # 60 in 3; 10 or fewer has a probability of 1%
    assert steps_without_drafts(target) <= 2


def test_a_worker_that_goes_moves_its_own_sessions_only():
    links = [link_to(net, DEADLINE_S) for net in pool(Clock(), 4)]
    before = {key: choose(links, key) for key in range(1000)}
    links[2].state = State.DOWN
    for key, link in before.items():
        if link is not links[2]:
            assert choose(links, key) is link
    moved = [choose(links, key) for key, link in before.items() if link is links[2]]
    assert {*moved} == {links[0], links[1], links[3]}


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_sessions_of_a_worker_that_fails_move_to_another(how):
    clock = Clock()
    nets = pool(clock, 2)
    target = Target(nets, clock, num_slots=8)
    begin(target, 8, 2000)
    target.step(5)
    if how == "killed":
        nets[0].kill()
    else:
        nets[0].is_hung = True
    target.step(10)
    assert target.widths[-1] == 8 * 4  # the other one drafts for all
    assert target.counts["remote_moves", ""] > 0
    assert max(target.steps[-5:]) < 2 * STEP_S
    finish(target, 2000)


def test_a_worker_on_the_target_s_machine_is_preferred_and_others_draft_while_it_is_out():
    clock = Clock()
    near, far = nets = [*pool(clock, 1, is_near=True), *pool(clock, 1)]
    far.address = "tcp://192.0.2.1:5800"
    target = Target(nets, clock)
    begin(target, 8)
    target.step(5)
    assert not far.sent and target.widths[-1] == 8 * 4
    near.kill()
    target.step(5)
    assert far.sent and target.widths[-1] == 8 * 4
    near.restart(worker(clock))
    target.step(20)
    finish(target)
    begin(target, 8, 20, first=8)
    known = len(far.sent)
    target.run()
    assert not [row for batch in far.sent[known:] for row in batch.rows]


# --- widths ---------------------------------------------------------------------------------------


def adaptive(clock: Clock, num_drafts: int = 4) -> AdaptiveWidth:
    return AdaptiveWidth(num_drafts, 8, reads_confidence=False, clock=clock)


def test_no_more_is_asked_for_than_a_fixed_width():
    target, net = simulated(policy=FixedWidth(4, 2))
    begin(target, 1)
    finish(target)
    asked = [row.want for batch in net.sent for row in batch.rows]
    assert asked[0] == 3 and max(asked[1:]) == 2  # the first token is the target's own
    assert max(target.widths) == 2


def test_waiting_that_costs_more_than_it_gains_is_given_up_before_a_trial():
    """A step says what one without the wait would have taken."""
    target, _ = simulated(between={"draft_s": 0.02}, policy=adaptive)
    target.drafter.driver.policy._until_trial = 10**6
    begin(target, 1, 500)
    while target.drafter.driver.policy.is_drafting:
        target.step()
        assert len(target.steps) < 20
    finish(target, 500)


def test_a_deadline_is_what_the_drafts_are_worth():
    target, net = simulated(policy=adaptive, deadline_s=10.0, per_draft_s=0.0005)
    begin(target, 1, 4000)
    target.step(100)
    # 4 right drafts save 4 steps of 10 ms, and verifying them costs 2 ms. Estimates are noisy.
    worth_ms = target.drafter.driver.policy.worth_ms(np.zeros(1, dtype=np.int64))
    assert 20 < worth_ms < 45
    net.is_hung = True
    target.step(5)
    late = [1e3 * step for step in target.steps[100:] if step > 1.5 * STEP_S]
    assert late and max(late) < 12 + 45  # not the 10 s that it may wait
    net.is_hung = False
    finish(target, 4000)

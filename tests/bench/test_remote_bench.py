"""The benchmark of remote drafts: who runs, what happens to workers, other answers, the table."""

import signal
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import remote
from bench.context import GateError, as_text
from bench.known_drafts import KnownDrafts
from bench.remote import AHEAD, AR, HUNG, KILLED, KNOWN_AHEAD, PLAIN, Contestant, Race


class Target:
    """Answers each prompt with itself; forgets the last token where ``wrong`` drafts."""

    def __init__(self, wrong=None):
        self.wrong, self.drafting = wrong, None

    @contextmanager
    def drafted_by(self, contestant, address):
        self.drafting = contestant.name, address
        yield

    def run(self, asked, at_once, accident=lambda: None):
        accident()
        end = -1 if self.drafting[0] == self.wrong else None
        return [prompt[:end] for prompt in asked], {"tokens_per_s": float(at_once)}


class Starts:
    """Starts of workers, and the signals that these got."""

    def __init__(self):
        self.names, self.signals, self.code = [], [], None

    def __call__(self, name, texts):
        number = len(self.names)
        self.names.append(name)
        assert texts == [[1, 2, 1, 2]]
        process = SimpleNamespace(
            send_signal=lambda sent: self.signals.append((number, sent)), poll=lambda: self.code
        )
        return SimpleNamespace(process=process, address=f"address {number}")


def test_only_the_worker_that_shall_be_killed_is_started_for_a_run():
    target, starts = Target(), Starts()
    race = Race(target, starts, [[1, 2]])
    assert race.once(Contestant(PLAIN, None, 0), 1) == {"tokens_per_s": 1.0}
    assert target.drafting == (PLAIN, None)
    for _ in range(2):
        race.once(Contestant("ahead", AHEAD, 4), 1)
    assert target.drafting == ("ahead", "address 0") and not starts.signals
    race.once(Contestant("hangs", AHEAD, None, accident=HUNG), 1)
    assert starts.signals == [(0, signal.SIGSTOP), (0, signal.SIGCONT)]
    race.once(Contestant("killed", AHEAD, None, accident=KILLED), 1)
    assert starts.names == [AHEAD, AHEAD]
    assert starts.signals[2:] == [(1, signal.SIGKILL)]


def test_other_answers_end_the_race():
    race = Race(Target(wrong="ahead"), Starts(), [[1, 2]])
    with pytest.raises(GateError, match="ahead: answers differ"):
        race.once(Contestant("ahead", AHEAD, 4), 1)


def test_a_worker_that_has_ended_ends_the_race():
    starts = Starts()
    race = Race(Target(), starts, [[1, 2]])
    starts.code = 1
    with pytest.raises(RuntimeError, match="ahead: its draft worker has ended"):
        race.once(Contestant("ahead", AHEAD, 4), 1)


def test_everybody_has_a_name_and_the_first_drafts_nothing():
    everyone = remote.contestants(8)
    assert everyone[0] == Contestant(PLAIN, None, 0)
    assert len({each.name for each in everyone}) == len(everyone)
    assert {each.width for each in everyone} == {0, 2, 8, None}
    assert {each.accident for each in everyone} == {None, HUNG, KILLED}
    texts = Path("texts.json")
    for name, ahead in ((AR, "0"), (AHEAD, "9")):
        given = remote.command(name, 8, texts)
        assert given[given.index("--ahead") + 1] == ahead
    assert remote.command(KNOWN_AHEAD, 8, texts)[-2:] == ["texts.json", "9"]


def test_known_drafts_are_the_rest_of_a_text():
    drafts = KnownDrafts([[1, 2, 3, 4], [1, 5]])
    runs = drafts.start([1, 2], 3), drafts.start([1, 5], 1), drafts.start([7], 1)
    assert drafts.step() == [(runs[0], [3], False), (runs[1], [0], True), (runs[2], [0], True)]
    assert drafts.step() == [(runs[0], [4], False)]
    drafts.stop(runs[0])
    assert drafts.step() == []


def test_the_table_has_ratios_of_the_same_round():
    others = {"tokens_per_step": 2.5, "waited_ms": 1.25, "longest_wait_ms": 40.0, "no_wait": 0.5}
    rows = [
        {"contestant": name, "concurrency": 4, "pair": pair, "tokens_per_s": speed} | others
        for name, speeds in ((AR, (150.0, 400.0)), (PLAIN, (100.0, 200.0)))
        for pair, speed in enumerate(speeds)
    ]
    _, lines = remote.table(as_text(rows))
    assert lines[0] == ["4 at once", AR, "1.75 [1.50 .. 2.00]", "2.50", "1.25", "40", "0.50"]
    assert lines[1][2] == "1.00 [1.00 .. 1.00]"

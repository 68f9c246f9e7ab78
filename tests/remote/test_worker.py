"""The draft worker: what it drafts behind, what it drops, and when it answers."""

import pytest

from dllm.remote import worker
from dllm.remote.wire import Delta, Draft, DraftBatch, Reply
from dllm.remote.worker import DraftWorker
from tests.support.oracle import VOCAB, Oracle, plain
from tests.support.remote_harness import Clock

PROMPT = [1, 2, 3]


class Talk:
    """A worker and one target that talks to it by hand."""

    def __init__(self, ahead: int = 0, max_len: int = 4096) -> None:
        self.clock, self.oracle = Clock(), Oracle(max_len=max_len)
        self.worker = DraftWorker(self.oracle, ahead, self.clock)
        self.step = 0

    def ask(
        self, *rows: Delta, over: tuple[int, ...] = (), peer: int = 1, ms: float = 10.0
    ) -> None:
        self.step += 1
        self.worker.hear(peer, DraftBatch(self.step, int(1e3 * ms), list(rows), list(over)))

    def replies(self) -> list[tuple[int, Reply]]:
        return list(self.worker.replies())

    def draft(self, steps: int = 10) -> list[Draft]:
        """The rows of the one reply that comes within so many steps of the engine."""
        for _ in range(steps):
            self.worker.draft()
            replies = self.replies()
            if replies:
                ((_, reply),) = replies
                assert reply.step == self.step
                return reply.rows
        return []


def test_drafts_follow_the_tokens():
    talk = Talk()
    talk.ask(Delta(7, 0, PROMPT, 4))
    expected = plain(PROMPT, 4)[3:]
    assert talk.draft() == [Draft(7, 3, expected)]
    tokens = plain(PROMPT, 2)
    talk.ask(Delta(7, 3, tokens[3:], 4))  # two of the drafts were kept
    assert talk.draft() == [Draft(7, 5, plain(PROMPT, 6)[5:])]
    talk.ask(Delta(7, 5, [8], 2))  # the third was not
    assert talk.draft() == [Draft(7, 6, plain([*tokens, 8], 2)[6:])]
    assert talk.worker.counts.dropped_runs == 0  # none was still going on


def test_what_runs_behind_contradicted_tokens_is_stopped():
    talk = Talk(ahead=20)
    talk.ask(Delta(7, 0, PROMPT, 2))
    talk.draft()
    assert talk.oracle.runs
    talk.ask(Delta(7, 3, [(plain(PROMPT, 1)[-1] + 1) % VOCAB], 2))
    assert talk.worker.counts.dropped_runs == 1 and len(talk.oracle.runs) == 1
    talk.ask(over=(7,))
    assert not talk.oracle.runs and talk.worker.num_sessions == 0


def test_running_ahead_has_the_next_drafts_ready():
    talk = Talk(ahead=5)
    talk.ask(Delta(7, 0, PROMPT, 4))
    talk.draft()
    for _ in range(5):
        talk.worker.draft()
    talk.ask(Delta(7, 3, plain(PROMPT, 5)[3:], 4))  # all four kept, and the fifth expected
    ((_, reply),) = talk.replies()  # no step of the engine between
    assert reply.rows == [Draft(7, 8, plain(PROMPT, 9)[8:])]


def test_at_seventy_percent_of_the_deadline_it_answers_with_what_it_has():
    talk = Talk()
    talk.ask(Delta(7, 0, PROMPT, 4), ms=10.0)
    talk.worker.draft()
    talk.clock.now = 0.0069
    assert talk.replies() == []
    talk.clock.now = 0.0071
    ((_, reply),) = talk.replies()
    assert reply.rows == [Draft(7, 3, plain(PROMPT, 1)[3:])]
    assert talk.draft(1) == []  # once


def test_only_the_newest_ask_is_answered():
    talk = Talk()
    talk.ask(Delta(7, 0, PROMPT, 4))
    talk.ask(Delta(8, 0, PROMPT, 1))
    assert talk.draft() == [Draft(8, 3, plain(PROMPT, 1)[3:])]


def test_missing_tokens_are_said_to_be_missing():
    talk = Talk()
    talk.ask(Delta(7, 3, [4], 4), Delta(8, 0, PROMPT, 1))
    assert talk.draft() == [Draft(7, 3, [], is_unknown=True), Draft(8, 3, plain(PROMPT, 1)[3:])]
    talk.ask(Delta(8, 9, [4], 4))  # a lost message
    assert talk.draft() == [Draft(8, 9, [], is_unknown=True)]
    talk.ask(Delta(8, 0, PROMPT, 1))
    assert talk.draft() == [Draft(8, 3, plain(PROMPT, 1)[3:])]


def test_a_batch_that_asks_for_no_draft_has_no_reply():
    talk = Talk()
    talk.ask(Delta(7, 0, PROMPT, 0), over=(8,))
    assert talk.replies() == [] and not talk.worker.is_busy


def test_an_ask_that_replaces_another_is_answered_when_that_was_due():
    """Or nobody would be answered whose batches follow each other in less than the deadline."""
    talk = Talk()
    for turn in range(8):
        assert talk.replies() == []
        talk.ask(Delta(7, 0, PROMPT, 4), ms=10.0)
        talk.clock.now = 0.001 * turn
    ((_, reply),) = talk.replies()
    assert reply.step == 8


def test_a_connection_reaches_its_own_sessions_only():
    talk = Talk()
    talk.ask(Delta(7, 0, PROMPT, 4), peer=1)
    talk.draft()
    talk.ask(Delta(7, 3, [], 4), peer=2)
    assert talk.draft() == [Draft(7, 3, [], is_unknown=True)]
    talk.ask(over=(7,), peer=2)
    assert talk.worker.num_sessions == 1


def test_a_connection_that_ends_takes_its_sessions_along():
    talk = Talk()
    for peer in (1, 2):
        talk.ask(Delta(7, 0, PROMPT, 4), peer=peer)
    talk.worker.leave(1)
    assert talk.worker.num_sessions == 1 and len(talk.oracle.runs) == 1
    assert [peer for peer, _ in talk.replies()] == []
    talk.draft(4)


@pytest.mark.parametrize("prompt", [[1, VOCAB], list(range(40))], ids=["unknown token", "too long"])
def test_nothing_is_kept_of_what_the_model_cannot_read(prompt):
    talk = Talk(max_len=30)
    for _ in range(2):
        talk.ask(Delta(7, 0, prompt, 4))
        assert talk.draft() == [Draft(7, len(prompt), [])]
    talk.ask(Delta(7, len(prompt), [1], 4))
    assert talk.draft() == [Draft(7, len(prompt) + 1, [])]
    assert not talk.oracle.runs and talk.worker.num_tokens == 0


def test_drafts_end_where_the_model_does():
    talk = Talk(max_len=5)
    talk.ask(Delta(7, 0, PROMPT, 4))
    assert talk.draft() == [Draft(7, 3, plain(PROMPT, 2)[3:])]
    talk.ask(Delta(7, 3, plain(PROMPT, 2)[3:], 4))
    assert talk.draft() == [Draft(7, 5, [])]


def test_the_sessions_used_longest_ago_make_room(monkeypatch):
    monkeypatch.setattr(worker, "MAX_SESSIONS", 2)
    monkeypatch.setattr(worker, "MAX_TOKENS", 100)
    talk = Talk()
    for number in (1, 2, 3):
        talk.ask(Delta(number, 0, PROMPT, 1))
    assert [*talk.worker._peers[1].sessions] == [2, 3]
    talk.ask(Delta(2, 3, [], 1))
    talk.ask(Delta(4, 0, PROMPT, 1))
    assert [*talk.worker._peers[1].sessions] == [2, 4]
    talk.ask(Delta(5, 0, [1] * 99, 1))
    assert [*talk.worker._peers[1].sessions] == [5]
    assert len(talk.oracle.runs) == 1


def test_who_has_many_sessions_pushes_out_his_own(monkeypatch):
    monkeypatch.setattr(worker, "MAX_SESSIONS", 4)
    monkeypatch.setattr(worker, "MAX_TOKENS", 100)
    talk = Talk()
    talk.ask(Delta(1, 0, PROMPT, 1), peer=2)
    for number in range(1, 9):
        talk.ask(Delta(number, 0, PROMPT, 1))
    assert [len(talk.worker._peers[peer].sessions) for peer in (1, 2)] == [3, 1]
    talk.ask(Delta(9, 0, [1] * 99, 1))
    assert [len(talk.worker._peers[peer].sessions) for peer in (1, 2)] == [0, 1]

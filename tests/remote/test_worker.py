"""The draft worker: what it drafts behind, what it drops, and when it answers."""

import pytest

from dllm.remote.wire import ASK, OVER, REPLY, UNKNOWN, Message, Row
from dllm.remote.worker import DraftWorker, Limits
from tests.support.oracle import VOCAB, Oracle, plain
from tests.support.remote_harness import Clock

PROMPT = [1, 2, 3]


class Talk:
    """A worker and one target that talks to it by hand."""

    def __init__(self, alpha: float = 1.0, **limits) -> None:
        self.clock, self.oracle = Clock(), Oracle(alpha, max_len=limits.pop("max_len", 4096))
        self.worker = DraftWorker(self.oracle, Limits(**limits), self.clock)
        self.step = 0

    def ask(self, *rows: Row, peer: bytes = b"a", incarnation: int = 1, ms: float = 10.0) -> None:
        self.step += 1
        message = Message(ASK, incarnation, self.step, int(1e3 * ms), list(rows))
        self.worker.hear(peer, message)

    def replies(self) -> list[tuple[bytes, Message]]:
        return list(self.worker.replies())

    def draft(self, steps: int = 10) -> list[Row]:
        """The rows of the one reply that comes within so many steps of the engine."""
        for _ in range(steps):
            self.worker.draft()
            replies = self.replies()
            if replies:
                ((_, reply),) = replies
                assert (reply.kind, reply.step) == (REPLY, self.step)
                return reply.rows
        return []


def test_drafts_follow_the_tokens():
    talk = Talk()
    talk.ask(Row(7, 0, PROMPT, 4))
    expected = plain(PROMPT, 4)[3:]
    assert talk.draft() == [Row(7, 3, expected, 0)]
    tokens = plain(PROMPT, 2)
    talk.ask(Row(7, 3, tokens[3:], 4))  # two of the guesses were kept
    assert talk.draft() == [Row(7, 5, plain(PROMPT, 6)[5:], 0)]
    talk.ask(Row(7, 5, [8], 2))  # the third was not
    assert talk.draft() == [Row(7, 6, plain([*tokens, 8], 2)[6:], 0)]
    assert talk.worker.counts.dropped_runs == 0  # none was still going on


def test_what_runs_behind_contradicted_tokens_is_stopped():
    talk = Talk(ahead=20)
    talk.ask(Row(7, 0, PROMPT, 2))
    talk.draft()
    assert talk.oracle.runs
    talk.ask(Row(7, 3, [(plain(PROMPT, 1)[-1] + 1) % VOCAB], 2))
    assert talk.worker.counts.dropped_runs == 1 and len(talk.oracle.runs) == 1
    talk.ask(Row(7, 0, [], OVER))
    assert not talk.oracle.runs and talk.worker.num_sessions == 0


def test_running_ahead_has_the_next_drafts_ready():
    talk = Talk(ahead=5)
    talk.ask(Row(7, 0, PROMPT, 4))
    talk.draft()
    for _ in range(5):
        talk.worker.draft()
    talk.ask(Row(7, 3, plain(PROMPT, 5)[3:], 4))  # all four kept, and the fifth guessed
    ((_, reply),) = talk.replies()  # no step of the engine between
    assert reply.rows == [Row(7, 8, plain(PROMPT, 9)[8:], 0)]


def test_at_seventy_percent_of_the_deadline_it_answers_with_what_it_has():
    talk = Talk()
    talk.ask(Row(7, 0, PROMPT, 4), ms=10.0)
    talk.worker.draft()
    talk.clock.now = 0.0069
    assert talk.replies() == []
    talk.clock.now = 0.0071
    ((_, reply),) = talk.replies()
    assert reply.rows == [Row(7, 3, plain(PROMPT, 1)[3:], 0)]
    assert talk.draft(1) == []  # once


def test_only_the_newest_ask_is_answered():
    talk = Talk()
    talk.ask(Row(7, 0, PROMPT, 4))
    talk.ask(Row(8, 0, PROMPT, 1))
    assert talk.draft() == [Row(8, 3, plain(PROMPT, 1)[3:], 0)]


def test_missing_tokens_are_said_to_be_missing():
    talk = Talk()
    talk.ask(Row(7, 3, [4], 4), Row(8, 0, PROMPT, 1))
    assert talk.draft() == [Row(7, 3, [], UNKNOWN), Row(8, 3, plain(PROMPT, 1)[3:], 0)]
    talk.ask(Row(8, 9, [4], 4))  # a lost message
    assert talk.draft() == [Row(8, 9, [], UNKNOWN)]
    talk.ask(Row(8, 0, PROMPT, 1))
    assert talk.draft() == [Row(8, 3, plain(PROMPT, 1)[3:], 0)]


def test_somebody_is_there():
    talk = Talk()
    talk.ask()
    ((peer, reply),) = talk.replies()
    assert (peer, reply.rows, reply.incarnation) == (b"a", [], 1)


def test_a_connection_reaches_its_own_sessions_only():
    talk = Talk()
    talk.ask(Row(7, 0, PROMPT, 4), peer=b"a")
    talk.draft()
    talk.ask(Row(7, 3, [], 4), peer=b"b")
    assert talk.draft() == [Row(7, 3, [], UNKNOWN)]
    talk.ask(Row(7, 0, [], OVER), peer=b"b")
    assert talk.worker.num_sessions == 1


def test_another_incarnation_voids_the_sessions_of_a_connection():
    talk = Talk()
    talk.ask(Row(7, 0, PROMPT, 4), peer=b"a")
    talk.ask(Row(7, 0, PROMPT, 4), peer=b"b")
    talk.ask(peer=b"a", incarnation=2)
    assert talk.worker.num_sessions == 1 and len(talk.oracle.runs) == 1


@pytest.mark.parametrize("prompt", [[1, VOCAB], list(range(40))], ids=["unknown token", "too long"])
def test_nothing_is_kept_of_what_the_model_cannot_read(prompt):
    talk = Talk(max_len=30)
    for _ in range(2):
        talk.ask(Row(7, 0, prompt, 4))
        assert talk.draft() == [Row(7, len(prompt), [], 0)]
    talk.ask(Row(7, len(prompt), [1], 4))
    assert talk.draft() == [Row(7, len(prompt) + 1, [], 0)]
    assert not talk.oracle.runs and talk.worker._num_tokens == 0


def test_drafts_end_where_the_model_does():
    talk = Talk(max_len=5)
    talk.ask(Row(7, 0, PROMPT, 4))
    assert talk.draft() == [Row(7, 3, plain(PROMPT, 2)[3:], 0)]
    talk.ask(Row(7, 3, plain(PROMPT, 2)[3:], 4))
    assert talk.draft() == [Row(7, 5, [], 0)]


def test_sessions_are_dropped_by_age_and_by_number():
    talk = Talk(max_sessions=2, max_tokens=100, ttl_s=60)
    for number in (1, 2, 3):
        talk.ask(Row(number, 0, PROMPT, 1))
    assert [key[1] for key in talk.worker._works] == [2, 3]
    talk.ask(Row(2, 3, [], 1))
    talk.ask(Row(4, 0, PROMPT, 1))
    assert [key[1] for key in talk.worker._works] == [2, 4]
    talk.ask(Row(5, 0, [1] * 99, 1))
    assert [key[1] for key in talk.worker._works] == [5]
    talk.clock.now = 61
    talk.worker._forget_old()
    assert talk.worker.num_sessions == 0 and not talk.oracle.runs

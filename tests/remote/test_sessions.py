"""Sessions: what is told, what is guessed, what of a guess can be used."""

from hypothesis import given
from hypothesis import strategies as st

from dllm.remote import sessions
from dllm.remote.sessions import Session, hear, news, take_guess, usable
from dllm.remote.wire import OVER, UNKNOWN, Row

TOKENS = st.lists(st.integers(0, 3), max_size=12)


@given(TOKENS, TOKENS, TOKENS, st.data())
def test_a_worker_keeps_of_its_guess_what_is_not_contradicted(known, guess, tokens, data):
    start = data.draw(st.integers(0, len(known)))
    expected, said = known + guess, known[:start] + tokens
    heard = list(known)
    left = hear(heard, guess, Row(1, start, tokens, 4))
    assert heard == said
    if expected[: len(said)] == said:
        assert said + (left or []) == expected and left is not None
    else:
        assert left is None


@given(TOKENS, TOKENS, st.integers(0, 12), st.integers(0, 5))
def test_a_guess_is_used_behind_the_tokens_that_agree_with_it(tokens, guess, start, limit):
    found = usable(Session(1, start=start, guess=guess), tokens, limit)
    assert len(found) <= limit
    for length in range(1, len(found) + 1):
        whole = tokens + found[:length]
        assert whole[start:] == guess[: len(whole) - start]
    if not found and limit:
        behind = tokens[start:]
        assert start > len(tokens) or guess[: len(behind)] != behind or len(guess) <= len(behind)


def test_a_target_tells_what_is_new(monkeypatch):
    session = Session(7, told=2)
    assert news(session, [5, 6, 7, 8], 4) == [Row(7, 2, [7, 8], 4)]
    assert news(session, [5, 6], 4) == [Row(7, 2, [], 4)]
    monkeypatch.setattr(sessions, "MAX_ROW_TOKENS", 3)
    session.told = 0
    rows = news(session, list(range(7)), 4)
    assert rows == [Row(7, 0, [0, 1, 2], 0), Row(7, 3, [3, 4, 5], 0), Row(7, 6, [6], 4)]
    assert sessions.over(session).extra == OVER


def test_an_older_reply_does_not_replace_a_newer_one():
    session = Session(7, told=9)
    take_guess(session, Row(7, 3, [1], 0), 5)
    take_guess(session, Row(7, 2, [2], 0), 4)
    assert (session.start, session.guess, session.told) == (3, [1], 9)
    take_guess(session, Row(7, 0, [], UNKNOWN), 4)
    assert (session.guess, session.told, session.resets) == ([1], 0, 1)

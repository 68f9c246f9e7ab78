"""Messages: what is encoded comes back, nothing else is read; 10,000 mutated ones, both ways."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.remote import wire
from dllm.remote.wire import ASK, OVER, REPLY, UNKNOWN, Message, Row, decode, encode
from tests.support.oracle import VOCAB, plain
from tests.support.remote_harness import Clock, Net, Target, worker

NUM_MUTATED = 10_000
U64, U32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
LENGTH = st.integers(0, wire.MAX_START)
TOKENS = st.lists(st.integers(0, wire.MAX_TOKEN_ID), max_size=9)
EXTRA = {ASK: [*range(wire.MAX_WANT + 1), OVER], REPLY: [0, UNKNOWN]}


@st.composite
def messages(draw, kind=None):
    kind = draw(st.sampled_from((ASK, REPLY))) if kind is None else kind
    row = st.builds(Row, U64, LENGTH, TOKENS, st.sampled_from(EXTRA[kind]))
    return Message(kind, draw(U64), draw(U64), draw(U32), draw(st.lists(row, max_size=4)))


@given(messages())
def test_what_is_encoded_comes_back(message):
    data = encode(message)
    assert decode(data) == message
    assert len(data) == 28 + sum(15 + 4 * len(row.tokens) for row in message.rows)


@given(messages(), st.data())
@settings(max_examples=200)
def test_what_is_cut_or_longer_is_refused(message, data):
    whole = encode(message)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + b"\0"):
        with pytest.raises(ValueError):
            decode(wrong)


GOOD = encode(Message(ASK, 1, 2, 3, [Row(4, 5, [6], 7)]))


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, b"X"), (2, b"\1"), (3, b"\2"), (24, b"\2"), (39, b"\x80"), (42, b"\x81"), (46, b"\x80")],
    ids=["magic", "version", "kind", "rows", "start", "want", "token"],
)
def test_a_field_out_of_range_is_refused(place, value):
    with pytest.raises(ValueError):
        decode(GOOD[:place] + value + GOOD[place + 1 :])


def test_more_rows_or_tokens_than_needed_are_refused():
    row = Row(1, 0, [], 0)
    for kind, most in ((ASK, wire.MAX_ROWS), (REPLY, 2)):
        assert len(decode(encode(Message(kind, 1, 2, 3, [row] * most)), most).rows) == most
        with pytest.raises(ValueError, match="rows; allowed"):
            decode(encode(Message(kind, 1, 2, 3, [row] * (most + 1))), most)
    longest = Message(REPLY, 1, 2, 3, [Row(1, 0, [5] * wire.MAX_GUESS, 0)])
    assert decode(encode(longest)) == longest
    assert len(encode(longest)) == wire.reply_bytes(1)
    with pytest.raises(ValueError, match="a guess of"):
        decode(encode(Message(REPLY, 1, 2, 3, [Row(1, 0, [5] * (wire.MAX_GUESS + 1), 0)])))


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Bits flipped, bytes changed, cut out, put in or repeated; sometimes nothing but noise."""
    noise = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(noise) + 1)
        match rng.randrange(6):
            case 0 if place < len(noise):
                noise[place] ^= 1 << rng.randrange(8)
            case 1 if place < len(noise):
                noise[place] = rng.randrange(256)
            case 2:
                del noise[place : place + rng.randint(1, 9)]
            case 3:
                noise[place:place] = rng.randbytes(rng.randint(1, 9))
            case 4:
                noise[place:place] = noise[: rng.randint(1, 40)]
            case 5 if rng.random() < 0.1:
                noise = bytearray(rng.randbytes(rng.randint(0, 60)))
    return bytes(noise)


def test_mutated_asks_do_no_harm():
    """No crash, nothing that grows, and the drafts of another target are as before."""
    rng, clock = random.Random(0), Clock()
    drafter = worker(clock, max_sessions=20)
    net = Net(drafter, clock)
    target = Target([net], clock)
    target.add("honest", [1, 2, 3], 5 * NUM_MUTATED // 50)
    num_read = 0
    for number in range(NUM_MUTATED):
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))]
        extra = rng.choice((0, 1, 4, 4, 4, OVER))
        row = Row(rng.randrange(8), rng.choice((0, 0, 0, 2, 5)), tokens, extra)
        data = mutated(rng, encode(Message(ASK, rng.randrange(2), number, 1000, [row, row])))
        try:
            message = decode(data)
        except ValueError:
            continue
        num_read += 1
        if message.kind == ASK:
            drafter.hear(rng.choice((b"a", b"b")), message)
        if number % 50 == 0 and target.requests:
            target.step()
    target.run()
    assert target.finished["honest"].tokens == plain([1, 2, 3], 5 * NUM_MUTATED // 50)
    assert NUM_MUTATED // 50 < num_read < NUM_MUTATED  # some were read
    assert target.drafter.num_remote > NUM_MUTATED // 50
    assert drafter.num_sessions <= 20
    clock.now += 61
    drafter.hear(b"target", Message(ASK, 0, 0, 0, []))
    list(drafter.replies())
    drafter._forget_old()
    assert drafter.num_sessions == 0 and not drafter.is_busy
    assert not drafter._drafts.runs and drafter._num_tokens == 0


class Mangled(Net):
    """A worker whose replies are mutated, or invented from its memory of what it was asked."""

    rng = random.Random(0)
    num_mangled = num_read = 0

    def receive(self) -> list[Message]:
        found = []
        for reply in super().receive():
            for _ in range(4):
                self.num_mangled += 1
                try:
                    message = decode(mutated(self.rng, encode(reply)))
                except ValueError:
                    self.num_refused += 1
                    continue
                self.num_read += 1
                if message.kind == REPLY:
                    found.append(message)
            if self.rng.random() < 0.5:
                found.append(reply)
        return found


def test_mutated_replies_do_no_harm():
    """No crash, nothing that grows, no changed token; and drafts come through all the same."""
    clock = Clock()
    net = Mangled(worker(clock), clock)
    target = Target([net], clock)
    number = 0
    while net.num_mangled < NUM_MUTATED:
        target.add(str(number), [number % VOCAB, 5, 7], 40)
        number += 1
        target.run(max_steps=10**6)
    assert NUM_MUTATED // 50 < net.num_read < net.num_mangled
    for name, request in target.finished.items():
        assert request.tokens == plain([int(name) % VOCAB, 5, 7], 40)
    assert target.drafter.num_remote > 5 * number
    asker = target.asker
    target.step()
    assert not asker._sessions and not asker._by_number and not asker._homes

"""Messages: what is encoded comes back, nothing else is read; 10,000 mutated ones, both ways."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.remote import wire
from dllm.remote import worker as drafting
from dllm.remote.client import Session, Wish
from dllm.remote.wire import Ask, Guess, Reply, Told, frame, read_ask, read_reply
from dllm.remote.worker import Work
from tests.support.oracle import VOCAB, plain
from tests.support.remote_harness import Clock, Net, Target, worker

NUM_MUTATED = 10_000
NUMBER, LENGTH = st.integers(0, 2**63 - 1), st.integers(0, wire.MAX_INT32)
TOKENS = st.lists(st.integers(0, wire.MAX_INT32), max_size=9)
TOLD = st.builds(Told, NUMBER, LENGTH, TOKENS, st.integers(0, wire.MAX_WANT))
ASKS = st.builds(
    Ask, NUMBER, st.integers(0, 2**32 - 1), st.lists(TOLD, max_size=4), st.lists(NUMBER, max_size=4)
)
GUESSES = st.lists(st.builds(Guess, NUMBER, LENGTH, TOKENS, st.booleans()), max_size=4)
REPLIES = st.builds(Reply, NUMBER, GUESSES)


def encode(message: Ask | Reply) -> bytes:
    """Without the length in front, which is right."""
    data = frame(message)
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    return data[4:]


@given(ASKS, REPLIES)
def test_what_is_encoded_comes_back(ask, reply):
    assert read_ask(encode(ask)) == ask and read_reply(encode(reply)) == reply
    assert len(encode(reply)) <= wire.reply_bytes(len(reply.rows))
    for read, other in ((read_ask, reply), (read_reply, ask)):
        with pytest.raises(ValueError):
            read(encode(other))


@given(ASKS, st.data())
@settings(max_examples=200)
def test_what_is_cut_or_longer_is_refused(ask, data):
    whole = encode(ask)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + b"\0"):
        with pytest.raises(ValueError):
            read_ask(wrong)


def test_the_longest_messages_are_read_and_longer_ones_are_not():
    last = wire.MAX_INT32
    row = Guess(2**63 - 1, last, [last] * wire.MAX_GUESS)
    longest = Reply(2**63 - 1, [row] * wire.MAX_ROWS)
    assert len(encode(longest)) <= wire.reply_bytes(wire.MAX_ROWS)
    assert read_reply(encode(longest)) == longest
    told = [Told(2**63 - 1, last, [], wire.MAX_WANT)] * (wire.MAX_ROWS - 1)
    told.append(Told(2**63 - 1, last, [last] * wire.MAX_TOLD, 0))
    ask = Ask(2**63 - 1, 2**32 - 1, told, [2**63 - 1] * wire.MAX_ROWS)
    assert len(encode(ask)) <= wire.MAX_ASK_BYTES
    assert read_ask(encode(ask)) == ask
    for reply in (
        Reply(1, [Guess(1, 0, [])] * (wire.MAX_ROWS + 1)),
        Reply(1, [Guess(1, 0, [5] * (wire.MAX_GUESS + 1))]),
    ):
        with pytest.raises(ValueError, match="length <="):
            read_reply(encode(reply))
    with pytest.raises(ValueError, match="length <="):
        read_ask(encode(Ask(1, 0, [Told(1, 0, [5] * (wire.MAX_TOLD + 1), 0)])))


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


def test_mutated_asks_do_no_harm(monkeypatch):
    """No crash, nothing that grows, and the drafts of another target are as before."""
    monkeypatch.setattr(drafting, "MAX_SESSIONS", 20)
    rng, clock = random.Random(0), Clock()
    drafter = worker(clock)
    net = Net(drafter, clock)
    target = Target([net], clock)
    target.add("honest", [1, 2, 3], 5 * NUM_MUTATED // 50)
    num_read = 0
    for number in range(NUM_MUTATED):
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))]
        told = Told(rng.randrange(8), rng.choice((0, 0, 0, 2, 5)), tokens, rng.choice((0, 1, 4)))
        over = [rng.randrange(8)] if rng.random() < 0.2 else []
        try:
            ask = read_ask(mutated(rng, encode(Ask(number, 1000, [told, told], over))))
        except ValueError:
            continue
        num_read += 1
        drafter.hear(rng.choice((100, 101)), ask)
        if number % 50 == 0 and target.requests:
            target.step()
    target.run()
    assert target.finished["honest"].tokens == plain([1, 2, 3], 5 * NUM_MUTATED // 50)
    assert NUM_MUTATED // 50 < num_read < NUM_MUTATED  # some were read
    assert target.count("drafts") > NUM_MUTATED // 50
    assert drafter.num_sessions <= 20
    for peer in (net.peer, 100, 101):
        drafter.leave(peer)
    assert drafter.num_sessions == 0 and not drafter.is_busy
    assert not drafter._drafts.runs and drafter.num_tokens == 0


class Mangled(Net):
    """A worker that sends mutations of each reply before the reply itself."""

    rng = random.Random(0)
    num_mangled = num_read = 0

    def read(self) -> list[bytes]:
        found = []
        for reply in super().read():
            for _ in range(4):
                self.num_mangled += 1
                data = mutated(self.rng, reply)
                try:
                    read_reply(data)
                except ValueError:
                    continue
                self.num_read += 1
                found.append(data)
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
    assert target.count("drafts") > 5 * number
    target.step()
    assert not target.client.sessions


# --- sessions -------------------------------------------------------------------------------------

FEW = st.lists(st.integers(0, 3), max_size=12)


@given(FEW, FEW, FEW, st.data())
def test_a_worker_keeps_of_its_guess_what_is_not_contradicted(known, guess, tokens, data):
    start = data.draw(st.integers(0, len(known)))
    expected, said = known + guess, known[:start] + tokens
    work = Work(list(known), list(guess))
    agrees = work.hear(Told(1, start, tokens, 4))
    assert work.tokens == said
    assert agrees == (expected[: len(said)] == said)
    assert work.tokens + work.guess == (expected if agrees else said)


@given(FEW, FEW, st.integers(0, 12), st.integers(0, 5))
def test_a_guess_is_used_behind_the_tokens_that_agree_with_it(tokens, guess, start, limit):
    found = Session(1, start=start, guess=guess).usable(Wish(tokens, limit))
    assert len(found) <= limit
    for length in range(1, len(found) + 1):
        whole = tokens + found[:length]
        assert whole[start:] == guess[: len(whole) - start]
    if not found and limit:
        behind = tokens[start:]
        assert start > len(tokens) or guess[: len(behind)] != behind or len(guess) <= len(behind)


def test_a_session_that_a_worker_lacks_is_told_again():
    session = Session(7, told=9)
    session.take(Guess(7, 3, [1]))
    session.take(Guess(7, 0, [], is_unknown=True))
    assert (session.start, session.guess, session.told, session.resets) == (3, [1], 0, 1)

"""Messages: what is encoded comes back, nothing else is read; 10,000 mutated ones, both ways."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.remote import wire
from dllm.remote import worker as drafting
from dllm.remote.client import DraftRequest, Session
from dllm.remote.wire import Delta, Draft, DraftBatch, Reply, frame, read_batch, read_reply
from dllm.remote.worker import DraftSession
from tests.support.oracle import VOCAB, plain
from tests.support.remote_harness import Clock, Net, Target, simulated, worker

NUM_MUTATED = 10_000
NUMBER, LENGTH = st.integers(0, 2**63 - 1), st.integers(0, wire.MAX_INT32)
TOKENS = st.lists(st.integers(0, wire.MAX_INT32), max_size=9)
DELTA = st.builds(Delta, NUMBER, LENGTH, TOKENS, st.integers(0, wire.MAX_WANT))
BATCHES = st.builds(
    DraftBatch,
    NUMBER,
    st.integers(0, 2**32 - 1),
    st.lists(DELTA, max_size=4),
    st.lists(NUMBER, max_size=4),
)
DRAFTS = st.lists(st.builds(Draft, NUMBER, LENGTH, TOKENS, st.booleans()), max_size=4)
REPLIES = st.builds(Reply, NUMBER, DRAFTS)


def encode(message: DraftBatch | Reply) -> bytes:
    """Without the length in front, which is right."""
    data = frame(message)
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    return data[4:]


@given(BATCHES, REPLIES)
def test_what_is_encoded_comes_back(batch, reply):
    assert read_batch(encode(batch)) == batch and read_reply(encode(reply)) == reply
    assert len(encode(reply)) <= wire.reply_bytes(len(reply.rows))
    for read, other in ((read_batch, reply), (read_reply, batch)):
        with pytest.raises(ValueError):
            read(encode(other))


@given(BATCHES, st.data())
@settings(max_examples=200)
def test_what_is_cut_or_longer_is_refused(batch, data):
    whole = encode(batch)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + b"\0"):
        with pytest.raises(ValueError):
            read_batch(wrong)


def test_the_longest_messages_are_read_and_longer_ones_are_not():
    last = wire.MAX_INT32
    row = Draft(2**63 - 1, last, [last] * wire.MAX_DRAFT_TOKENS)
    longest = Reply(2**63 - 1, [row] * wire.MAX_ROWS)
    assert len(encode(longest)) <= wire.reply_bytes(wire.MAX_ROWS)
    assert read_reply(encode(longest)) == longest
    told = [Delta(2**63 - 1, last, [], wire.MAX_WANT)] * (wire.MAX_ROWS - 1)
    told.append(Delta(2**63 - 1, last, [last] * wire.MAX_DELTA_TOKENS, 0))
    batch = DraftBatch(2**63 - 1, 2**32 - 1, told, [2**63 - 1] * wire.MAX_ROWS)
    assert len(encode(batch)) <= wire.MAX_BATCH_BYTES
    assert read_batch(encode(batch)) == batch
    for reply in (
        Reply(1, [Draft(1, 0, [])] * (wire.MAX_ROWS + 1)),
        Reply(1, [Draft(1, 0, [5] * (wire.MAX_DRAFT_TOKENS + 1))]),
    ):
        with pytest.raises(ValueError, match="length <="):
            read_reply(encode(reply))
    with pytest.raises(ValueError, match="length <="):
        read_batch(encode(DraftBatch(1, 0, [Delta(1, 0, [5] * (wire.MAX_DELTA_TOKENS + 1), 0)])))


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
    rng, (target, net) = random.Random(0), simulated()
    drafter = net.worker
    target.add("honest", [1, 2, 3], 5 * NUM_MUTATED // 50)
    num_read = 0
    for number in range(NUM_MUTATED):
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))]
        told = Delta(rng.randrange(8), rng.choice((0, 0, 0, 2, 5)), tokens, rng.choice((0, 1, 4)))
        over = [rng.randrange(8)] if rng.random() < 0.2 else []
        try:
            batch = read_batch(mutated(rng, encode(DraftBatch(number, 1000, [told, told], over))))
        except ValueError:
            continue
        num_read += 1
        drafter.hear(rng.choice((100, 101)), batch)
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
def test_a_worker_keeps_of_its_draft_what_is_not_contradicted(known, draft, tokens, data):
    start = data.draw(st.integers(0, len(known)))
    expected, said = known + draft, known[:start] + tokens
    session = DraftSession(list(known), list(draft))
    agrees = session.hear(Delta(1, start, tokens, 4))
    assert session.tokens == said
    assert agrees == (expected[: len(said)] == said)
    assert session.tokens + session.draft == (expected if agrees else said)


@given(FEW, FEW, st.integers(0, 12), st.integers(0, 5))
def test_a_draft_is_used_behind_the_tokens_that_agree_with_it(tokens, draft, start, limit):
    found = Session(1, start=start, draft=draft).usable(DraftRequest(tokens, limit))
    assert len(found) <= limit
    for length in range(1, len(found) + 1):
        whole = tokens + found[:length]
        assert whole[start:] == draft[: len(whole) - start]
    if not found and limit:
        behind = tokens[start:]
        assert start > len(tokens) or draft[: len(behind)] != behind or len(draft) <= len(behind)


def test_a_session_that_a_worker_lacks_is_told_again():
    session = Session(7, num_sent=9)
    session.take(Draft(7, 3, [1]))
    session.take(Draft(7, 0, [], is_unknown=True))
    assert (session.start, session.draft, session.num_sent, session.resets) == (3, [1], 0, 1)

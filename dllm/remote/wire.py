"""Messages between a target and a draft worker: token ids and lengths, no probabilities, no pickle.

A frame is the length of a message (4 bytes, big-endian) and the message, MessagePack of the types
below. What is longer, of another type or out of range is refused whole.

A target tells a worker what is new of each request (a *session*) and how many tokens it wants
behind it. The worker replies with what it expects there. Sessions belong to their connection: they
end with it, and no other connection reaches them.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from dllm.settings.options import MAX_INT32
from dllm.settings.remote import MAX_DRAFTS

MAX_WANT = MAX_DRAFTS + 1  # drafts of a session; a batch for a new prompt wants one more
MAX_DRAFT_TOKENS = 2 * MAX_WANT  # tokens of a draft: those asked for, and some of a run ahead
MAX_ROWS = 1024  # sessions of a message
MAX_DELTA_TOKENS = 150_000  # new tokens of a batch, all sessions together; later ones have the rest
MAX_BATCH_BYTES = 1 << 20  # more than a batch within these limits has
LENGTH_BYTES = 4  # in front of each message

Int32 = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Delta(Struct, array_like=True, forbid_unknown_fields=True):
    """One session's part of a batch."""

    session: Number
    start: Int32  # behind so many tokens come ``tokens``; what stood there before is void
    tokens: Annotated[list[Int32], Meta(max_length=MAX_DELTA_TOKENS)]
    want: Annotated[int, Meta(ge=0, le=MAX_WANT)]  # drafts behind them; 0 for none yet


class DraftBatch(Struct, array_like=True, forbid_unknown_fields=True, tag="dllm-ask-3"):
    """Target to worker: new tokens of some sessions, and which of them need drafts."""

    step: Number  # counts the batches of a connection
    deadline_us: Annotated[int, Meta(ge=0, le=2**32 - 1)]  # that the target waits for the reply
    rows: Annotated[list[Delta], Meta(max_length=MAX_ROWS)]
    over: Annotated[list[Number], Meta(max_length=MAX_ROWS)] = []  # sessions that have ended


class Draft(Struct, array_like=True, forbid_unknown_fields=True):
    """What a worker expects of a session."""

    session: Number
    start: Int32  # ``tokens`` are expected behind so many tokens
    tokens: Annotated[list[Int32], Meta(max_length=MAX_DRAFT_TOKENS)]
    is_unknown: bool = False  # the worker lacks the session's tokens; it has to be told all of them


class Reply(Struct, array_like=True, forbid_unknown_fields=True, tag="dllm-reply-3"):
    """Worker to target: the answer to the batch of this ``step``."""

    step: Number
    rows: Annotated[list[Draft], Meta(max_length=MAX_ROWS)]


GREETING = Reply(0, [])  # a worker's first message, when it has let a target in

_encode = msgspec.msgpack.Encoder().encode
read_batch = msgspec.msgpack.Decoder(DraftBatch).decode  # ValueError for what is no such message
read_reply = msgspec.msgpack.Decoder(Reply).decode


def reply_bytes(num_rows: int) -> int:
    """No reply of so many rows has more bytes."""
    return 64 + min(num_rows, MAX_ROWS) * (32 + 5 * MAX_DRAFT_TOKENS)


def frame(message: DraftBatch | Reply) -> bytes:
    data = _encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data

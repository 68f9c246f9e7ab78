"""Messages between a target and a draft worker: token ids and lengths, no probabilities, no pickle.

    message = header | row*
    header  = magic 'dD', version u8, kind u8, incarnation u64, step u64, deadline u32, rows u32
    row     = session u64, start u32, count u16, extra u8, count x u32 token ids

28 bytes, and 15 + 4 a token for each row; little-endian. An ask says of each session: behind its
first ``start`` tokens come these, whatever stood there before is void; ``extra`` more are asked for
(0: none yet, OVER: the session has ended). An ask without rows only asks whether anybody is there.
A reply says: behind ``start`` tokens I expect these. UNKNOWN in ``extra`` means: I lack the tokens
before ``start``, send them all.

``incarnation`` is a random number of the asker, repeated in replies. A new one voids all sessions
of the connection. ``step`` counts asks and is repeated in replies; ``deadline`` is in microseconds.
"""

import struct
from typing import NamedTuple

from dllm.settings.remote import MAX_DRAFTS

HEADER, ROW = struct.Struct("<2sBBQQII"), struct.Struct("<QIHB")
MAGIC, VERSION = b"dD", 2
ASK, REPLY = 0, 1
UNKNOWN = 1  # `extra` of a reply's row; 0 otherwise
OVER = 255  # `extra` of an ask's row
MAX_WANT = MAX_DRAFTS + 1  # drafts that one row may ask for; at admission it is one more
MAX_GUESS = 2 * MAX_WANT  # tokens of a reply's row: those asked for, and some of a run ahead
MAX_ROWS = 8192
MAX_ROW_TOKENS = 0xFFFF
MAX_TOKEN_ID = 2**31 - 1
MAX_START = 2**31 - 1
MAX_MESSAGE_BYTES = 8 << 20  # a link closes the connection of a peer that sends more


class Row(NamedTuple):
    """What a message says of one session."""

    session: int
    start: int
    tokens: list[int]
    extra: int


class Message(NamedTuple):
    """An ask or a reply; the module says what the fields mean."""

    kind: int
    incarnation: int
    step: int
    deadline_us: int
    rows: list[Row]


def reply_bytes(num_rows: int) -> int:
    """The size of the largest reply of so many rows."""
    return min(HEADER.size + num_rows * (ROW.size + 4 * MAX_GUESS), MAX_MESSAGE_BYTES)


def encode(message: Message) -> bytes:
    """The bytes of a message, whose fields are in range."""
    kind, incarnation, step, deadline_us, rows = message
    parts = [HEADER.pack(MAGIC, VERSION, kind, incarnation, step, deadline_us, len(rows))]
    for session, start, tokens, extra in rows:
        parts.append(ROW.pack(session, start, len(tokens), extra))
        parts.append(struct.pack(f"<{len(tokens)}I", *tokens))
    return b"".join(parts)


def decode(data: bytes, max_rows: int = MAX_ROWS) -> Message:
    """The message that these bytes are, and nothing but that.

    Args:
        max_rows: nothing of a message with more rows is read.

    Raises:
        ValueError: they are no whole message of this version, or a field is out of range.
    """
    if not HEADER.size <= len(data) <= MAX_MESSAGE_BYTES:
        raise ValueError(f"{len(data)} bytes; allowed: {HEADER.size} to {MAX_MESSAGE_BYTES}")
    magic, version, kind, incarnation, step, deadline_us, count = HEADER.unpack_from(data)
    if (magic, version) != (MAGIC, VERSION) or kind not in (ASK, REPLY):
        raise ValueError(f"no message of version {VERSION}")
    if count > max_rows:
        raise ValueError(f"{count} rows; allowed: {max_rows}")
    if count * ROW.size > len(data) - HEADER.size:
        raise ValueError(f"{count} rows do not fit into {len(data)} bytes")
    at, rows = HEADER.size, []
    for _ in range(count):
        row, at = _row(data, at, kind)
        rows.append(row)
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes behind the last row")
    return Message(kind, incarnation, step, deadline_us, rows)


def _row(data: bytes, at: int, kind: int) -> tuple[Row, int]:
    """The row at a place, and where the next one begins."""
    if at + ROW.size > len(data):
        raise ValueError("a row is cut off")
    session, start, count, extra = ROW.unpack_from(data, at)
    at += ROW.size
    if kind == REPLY and count > MAX_GUESS:
        raise ValueError(f"a guess of {count} tokens; allowed: {MAX_GUESS}")
    if at + 4 * count > len(data):
        raise ValueError("tokens are cut off")
    tokens = list(struct.unpack_from(f"<{count}I", data, at))
    if start > MAX_START or max(tokens, default=0) > MAX_TOKEN_ID:
        raise ValueError("a length or a token id is out of range")
    allowed = extra in (0, UNKNOWN) if kind == REPLY else extra <= MAX_WANT or extra == OVER
    if not allowed:
        raise ValueError(f"{extra} is nothing to ask for or to reply")
    return Row(session, start, tokens, extra), at + 4 * count

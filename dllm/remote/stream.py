"""Frames over a Unix socket or TLS: a connection that never blocks, and a worker's server.

How much memory a peer can take is decided here. Of each connection no more is kept than one
incomplete frame, what one ``read`` takes from the socket, and two frames that wait to be sent. A
server has MAX_CONNECTIONS at most. ZeroMQ cannot promise that: it bounds the number of messages,
and the bytes of each part of a message, but not the number of parts.
"""

import contextlib
import logging
import os
import select
import socket
import ssl
from collections.abc import Iterator, Sequence

from dllm.remote.address import Address, make_private
from dllm.remote.keys import Keys
from dllm.remote.report import Report
from dllm.remote.wire import (
    GREETING,
    LENGTH_BYTES,
    MAX_BATCH_BYTES,
    DraftBatch,
    Reply,
    frame,
    read_batch,
)

MAX_CONNECTIONS = 64  # of a server
CHUNK_BYTES = 1 << 18  # taken from a socket by one `read`
MAX_FRAMES = 4  # given by one `read`
CONNECTED = "Targets that are connected: "
GONE_AFTER_S = 3  # a machine that does not confirm what TCP sent is gone
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Stream:
    """One connection; it closes itself when it breaks, or a frame is too long.

    ``max_bytes``: the longest message that is received. ``keys``: of this side; None without TLS.
    """

    def __init__(
        self, connection: socket.socket, max_bytes: int, keys: Keys | None, is_server: bool = False
    ) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            _notice_lost_machines(connection)
        # Ready: connected, and the handshake of this side is over. With TLS a worker may still
        # refuse its target then: the target hears of it when it reads.
        self.is_open, self.is_ready = True, False
        # What closed it. By a ValueError or an SSLError one side has refused the other.
        self.error: Exception | None = None
        self.is_near = False  # it is ready, and its other end is on this machine
        self.peer = ""  # who is at the other end of a server's connection, for log lines
        self._socket, self._max_bytes = connection, max_bytes
        self._keys, self._is_server = keys, is_server
        self._is_writing = not is_server  # the handshake, or the connection before it
        self._in = bytearray()
        self._out = self._next = memoryview(b"")

    def fileno(self) -> int:
        """For polling; -1 if it is closed."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        is_writing = self._is_writing or (self.is_ready and self._out)
        return select.POLLIN | (select.POLLOUT if is_writing else 0)

    @property
    def has_news(self) -> bool:
        """Whether ``read`` has something to give that polling does not show."""
        if self._frame_end() is not None:
            return True
        is_tls = self.is_ready and isinstance(self._socket, ssl.SSLSocket)
        return is_tls and self._socket.pending() > 0  # type: ignore[attr-defined]

    def read(self) -> list[bytes]:
        """Messages that are there, so many at once that a flood does not stop the reader."""
        with self._closing():
            if self._get_ready():
                self._flush()
        with self._closing():  # also where nothing can be sent: the other side may wait likewise
            if self.is_ready and self._frame_end() is None:
                self._fill()
        found: list[bytes] = []
        while len(found) < MAX_FRAMES and (end := self._frame_end()) is not None:
            found.append(bytes(self._in[LENGTH_BYTES:end]))
            del self._in[:end]
        return found

    def send(self, data: bytes, replaces: bool = False) -> bool:
        """Returns whether it is on its way, which it is not while the frame before is still
        waiting.

        ``replaces``: a frame that cannot be sent yet waits, in the place of another that does.
        """
        with self._closing():
            if self._get_ready():
                self._flush()
        if not self.is_open:
            return False
        if self._out:
            self._next = memoryview(data) if replaces else self._next
            return replaces
        self._out = memoryview(data)
        with self._closing():
            if self.is_ready:
                self._flush()
        return self.is_open

    def close(self, error: Exception | None = None) -> None:
        self.error = self.error or error
        self.is_open = self.is_ready = self._is_writing = False
        self._in = bytearray()
        self._out = self._next = memoryview(b"")
        self._socket.close()

    def _frame_end(self) -> int | None:
        if len(self._in) < LENGTH_BYTES:
            return None
        size = int.from_bytes(self._in[:LENGTH_BYTES], "big")
        if size > self._max_bytes:
            self.close(ValueError(f"a message of {size} bytes; allowed: {self._max_bytes}"))
            return None
        return LENGTH_BYTES + size if LENGTH_BYTES + size <= len(self._in) else None

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Leave for later what would block; close the connection on any other error."""
        try:
            yield
        except WOULD_BLOCK:
            pass
        except OSError as error:
            self.close(error)

    def _get_ready(self) -> bool:
        if not self.is_open or self.is_ready:
            return self.is_ready
        if error := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        try:
            there = self._socket.getpeername()
        except OSError:
            raise BlockingIOError from None  # still connecting
        is_unix = self._socket.family == socket.AF_UNIX
        self.is_near = is_unix or there[0] == self._socket.getsockname()[0]
        if self._keys is not None:
            self._shake_hands(self._keys)
        self._is_writing, self.is_ready = False, True
        return True

    def _shake_hands(self, keys: Keys) -> None:
        if not isinstance(self._socket, ssl.SSLSocket):
            self._socket = keys.contexts[self._is_server].wrap_socket(
                self._socket, server_side=self._is_server, do_handshake_on_connect=False
            )
        try:
            self._socket.do_handshake()
        except WOULD_BLOCK as error:
            self._is_writing = isinstance(error, ssl.SSLWantWriteError)
            raise
        keys.check(self._socket)

    def _fill(self) -> None:
        left = CHUNK_BYTES
        while left > 0:
            data = self._socket.recv(left)
            if not data:
                raise ConnectionAbortedError("the other side has closed it")
            self._in += data
            left -= len(data)

    def _flush(self) -> None:
        while self._out:
            self._out = self._out[self._socket.send(self._out) :]
            if not self._out:
                self._out, self._next = self._next, memoryview(b"")


def _notice_lost_machines(connection: socket.socket) -> None:
    """Let a TCP connection break soon after the other machine is gone; and send at once."""
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, GONE_AFTER_S),
        (socket.TCP_USER_TIMEOUT, 1000 * GONE_AFTER_S),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def wait(streams: Sequence[Stream], seconds: float, listening: socket.socket | None = None) -> None:
    """Until a connection has news or is closed, or somebody connects; ``seconds`` at most."""
    poll = select.poll()
    if listening is not None:
        poll.register(listening, select.POLLIN)
    for stream in streams:
        if stream.has_news or not stream.is_open:
            return
        poll.register(stream, stream.events)
    poll.poll(int(1e3 * max(0.0, seconds)))


class Server:
    """A worker's side: batches of MAX_CONNECTIONS targets at most.

    Of more, the one is closed that never asked, or that asked last the longest time ago. Who is let
    in, or refused, is logged. Raises ValueError: nothing can listen at the address.
    """

    def __init__(self, address: Address, keys: Keys | None = None) -> None:
        self.num_refused = 0  # connections whose handshake failed, or that sent what is no batch
        self._last_refusal = ""
        self._report = Report(said=f"{CONNECTED}0")
        self._keys = None if address.path else keys
        self._streams: dict[int, Stream] = {}  # by number; in the order of their last batches
        self._have_asked: set[int] = set()
        self._number = 0
        family, there = address.resolve()[0]
        if address.path:
            make_private(address.path)
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if not address.path:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(there)
            self._socket.listen(MAX_CONNECTIONS)
        except OSError as error:
            self._socket.close()
            raise ValueError(f"{address}: {error.strerror}") from None
        self._socket.setblocking(False)
        if not address.path:
            address = address._replace(port=self._socket.getsockname()[1])
        self.address = address

    def receive(self, seconds: float) -> Iterator[tuple[int, DraftBatch | None]]:
        """Batches that are there, with the number of the connection; waits ``seconds`` at most.

        None in place of a batch: the connection is closed. Its number does not come back. One
        batch is in memory at a time.
        """
        wait(list(self._streams.values()), seconds, self._socket)
        for number, stream in list(self._streams.items()):
            for batch in self._batches(number, stream):
                yield number, batch
            if not stream.is_open:
                if isinstance(stream.error, ValueError | ssl.SSLError):
                    self.num_refused += 1
                    self._last_refusal = f"{stream.peer}: {stream.error}"
                self._drop(number)
                yield number, None
        for number in self._accept():
            yield number, None
        self._say()

    def _batches(self, number: int, stream: Stream) -> Iterator[DraftBatch]:
        for data in stream.read():
            try:
                batch = read_batch(data)
            except ValueError as error:
                stream.close(error)
                return
            self._streams[number] = self._streams.pop(number)  # behind all others
            self._have_asked.add(number)
            yield batch

    def _accept(self) -> Iterator[int]:
        """Let in who knocks; gives the numbers of those that are closed to make room."""
        for _ in range(MAX_CONNECTIONS):
            try:
                connection, where = self._socket.accept()
            except OSError:  # nobody is left, or left again
                return
            if len(self._streams) == MAX_CONNECTIONS:
                first = min(self._streams, key=lambda number: number in self._have_asked)
                self._drop(first)
                yield first
            self._number += 1
            stream = Stream(connection, MAX_BATCH_BYTES, self._keys, is_server=True)
            stream.peer = where[0] if where else "this machine"
            stream.send(frame(GREETING))
            self._streams[self._number] = stream

    def _drop(self, number: int) -> None:
        self._streams.pop(number).close()
        self._have_asked.discard(number)

    def _say(self) -> None:
        count = sum(stream.is_ready for stream in self._streams.values())
        refused = f"; {self.num_refused} were refused, the last one {self._last_refusal}"
        what = f"{CONNECTED}{count}" + (refused if self.num_refused else "")
        self._report(what, logging.WARNING if self.num_refused else logging.INFO)

    def reply(self, number: int, message: Reply) -> None:
        """Send a reply. One that waits because the target does not read is replaced."""
        stream = self._streams.get(number)
        if stream is not None:
            stream.send(frame(message), replaces=True)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._socket.close()
        if self.address.path:
            with contextlib.suppress(OSError):
                os.unlink(self.address.path)

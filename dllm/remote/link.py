"""How messages travel: a ZeroMQ DEALER for each worker, a ROUTER at the worker. Nothing blocks.

A DEALER connects again by itself. Its monitor tells at once when the worker is gone: a killed
process, or after HEARTBEAT_TIMEOUT_MS a machine. A process that hangs sends nothing.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from dllm.remote.keys import Keys
from dllm.remote.wire import (
    ASK,
    MAX_MESSAGE_BYTES,
    MAX_ROWS,
    REPLY,
    Message,
    decode,
    encode,
    reply_bytes,
)

RECONNECT_MS, LAST_RECONNECT_MS = 50, 250
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 3000
MAX_WAITING = 16  # messages that wait to be sent; what does not fit is not sent
# What a worker reads before something else is done: a flood must not stop the reader. A target
# reads MAX_WAITING frames, and the bytes of one reply that it can need.
MAX_FRAMES, MAX_BYTES = 256, 1 << 20
ENVELOPE_BYTES = 1024  # more than encryption adds to a message
UP, DOWN = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


class Link:
    """A target's connection to one worker.

    Args:
        max_rows: sessions of which the target may ask at once; a reply with more is refused.

    Attributes:
        address: of the worker.
        is_up: the connection stands.
        num_ups: how often it came up.
        num_refused: messages received that are no replies.
    """

    def __init__(self, address: str, keys: Keys | None = None, max_rows: int = MAX_ROWS) -> None:
        self.address = address
        self._max_rows, self._max_bytes = max_rows, reply_bytes(max_rows)
        self.is_up, self.num_ups, self.num_refused = False, 0, 0
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set(zmq.IMMEDIATE, 1)  # nothing is kept for a worker that is not there
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, LAST_RECONNECT_MS)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        _prepare(self._socket, address, self._max_bytes)
        self._inbox = Inbox(self._socket, 1)
        if keys is not None:
            self._socket.set(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.set(zmq.CURVE_SERVERKEY, keys.worker)
        self._monitor: zmq.Socket = self._socket.get_monitor_socket(UP | DOWN)
        try:
            self._socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def sockets(self) -> tuple[zmq.Socket, zmq.Socket]:
        """What to poll for news."""
        return self._socket, self._monitor

    def send(self, message: Message) -> bool:
        """Whether the message is on its way."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[Message]:
        """Replies that are there; takes note of whether the connection stands."""
        self._read_events()
        replies = []
        for frames in self._inbox.read(MAX_WAITING, self._max_bytes):
            reply = _decoded(frames, REPLY, self._max_rows)
            if reply is None:
                self.num_refused += 1
            else:
                replies.append(reply)
        return replies

    def _read_events(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                self.is_up = event == UP
                self.num_ups += event == UP

    def close(self) -> None:
        """Close the connection."""
        self.is_up = False
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)


def wait(links: Sequence[Link], seconds: float) -> None:
    """Wait until any of the links has news, ``seconds`` at most."""
    poller = zmq.Poller()
    for link in links:
        for socket in link.sockets:
            poller.register(socket, zmq.POLLIN)
    poller.poll(int(1e3 * max(0.0, seconds)))  # the caller comes back for less than 1 ms


class Inbox:
    """Reads a socket, so much at once.

    Args:
        num_frames: of a message. Of a longer one no more than one frame too many is kept.
    """

    def __init__(self, socket: zmq.Socket, num_frames: int) -> None:
        self._socket, self._num_frames = socket, num_frames
        self._frames: list[bytes] = []  # of a message that has not ended

    def read(self, max_frames: int, max_bytes: int) -> Iterator[list[bytes]]:
        """Messages that are there; none begins behind so many frames or bytes."""
        with contextlib.suppress(zmq.Again):
            for _ in range(max_frames):
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
                max_bytes -= len(frame)
                if len(self._frames) <= self._num_frames:
                    self._frames.append(frame.bytes)
                if not frame.more:
                    frames, self._frames = self._frames, []
                    yield frames
                if max_bytes <= 0:
                    return


def _decoded(frames: Sequence[bytes], kind: int, max_rows: int = MAX_ROWS) -> Message | None:
    """The message of this kind that is the only frame; None if there is none."""
    try:
        (data,) = frames
        message = decode(data, max_rows)
    except ValueError:
        return None
    return message if message.kind == kind else None


class Server:
    """A worker's side: asks of any number of targets.

    Attributes:
        address: where it listens, with the port.
        num_refused: messages received that are no asks.
    """

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        self.num_refused = 0
        context: zmq.Context = zmq.Context.instance()
        self._socket: zmq.Socket = context.socket(zmq.ROUTER)
        _prepare(self._socket, address, MAX_MESSAGE_BYTES)
        self._inbox = Inbox(self._socket, 2)
        self._doorkeeper: Any = None
        if keys is not None:
            self._doorkeeper = ThreadAuthenticator(context)
            self._doorkeeper.start()
            self._doorkeeper.configure_curve(domain="*", location=str(keys.allowed))
            self._socket.set(zmq.CURVE_SERVER, 1)
            self._socket.set(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.set(zmq.CURVE_SECRETKEY, keys.secret)
        self._socket.bind(address)
        self.address = self._socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0")

    def receive(self, seconds: float) -> list[tuple[bytes, Message]]:
        """Asks that are there, with who asks; waits for the first one, ``seconds`` at most."""
        asks = []
        if self._socket.poll(round(1e3 * seconds)):
            for peer, *frames in self._inbox.read(MAX_FRAMES, MAX_BYTES):
                ask = _decoded(frames, ASK)
                if ask is None:
                    self.num_refused += 1
                else:
                    asks.append((peer, ask))
        return asks

    def reply(self, peer: bytes, message: Message) -> None:
        """Send a reply; it is dropped if the target is gone or does not read."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close(0)
        if self._doorkeeper is not None:
            self._doorkeeper.stop()


def check_bind(address: str) -> None:
    """Refuse an address at which this process cannot listen.

    Raises:
        ValueError: says why.
    """
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        _prepare(socket, address, MAX_MESSAGE_BYTES)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ValueError(f"{address}: {error}") from None


def _prepare(socket: zmq.Socket, address: str, max_bytes: int) -> None:
    if "[" in address:
        socket.set(zmq.IPV6, 1)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, MAX_WAITING)
    # RCVHWM keeps libzmq's default: with 16, drafts of a worker that had hung for seconds, so that
    # its connection was full and broken, never came back (tests/remote/test_restarts.py).
    socket.set(zmq.MAXMSGSIZE, max_bytes + ENVELOPE_BYTES)

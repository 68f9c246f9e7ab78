"""Connects a target to a draft worker, wherever the name of the worker's host leads."""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable

from dllm.remote.address import Address, Place, check_private
from dllm.remote.keys import Keys
from dllm.remote.stream import Stream

LOOK_UP_S = 1.0  # between two questions to a name server


class Places:
    """All addresses of a worker's host, in turn. Raises ValueError: the host is not known.

    While somebody asks for one, the host's name is looked up again and again, in a thread: a name
    server that is slow stops nobody.
    """

    def __init__(self, address: Address, clock: Callable[[], float] = time.perf_counter) -> None:
        self._address, self._clock = address, clock
        self._found = address.resolve()
        self._looked_up_at = clock()
        self._thread: threading.Thread | None = None
        self._number = 0

    def next(self) -> Place:
        is_idle = self._thread is None or not self._thread.is_alive()
        is_due = self._clock() >= self._looked_up_at + LOOK_UP_S
        if is_idle and is_due and not self._address.is_numeric:
            self._looked_up_at = self._clock()
            self._thread = threading.Thread(target=self._look_up, name="look-up", daemon=True)
            self._thread.start()
        found = self._found
        self._number += 1
        return found[(self._number - 1) % len(found)]

    def _look_up(self) -> None:
        try:
            found = self._address.resolve()
        except ValueError:  # no name server, or no such name: those that were found last are tried
            return
        if set(found) != set(self._found):  # a name server may give the same ones in another order
            self._found = found


def dialer(address: Address, keys: Keys | None, max_bytes: int) -> Callable[[], Stream]:
    """It begins connections, and raises OSError where nobody listens. ValueError: unknown host."""
    places = Places(address)

    def dial() -> Stream:
        if address.path:
            try:
                check_private(address.path)
            except ValueError as error:
                raise OSError(str(error)) from None
        family, there = places.next()
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        code = connection.connect_ex(there)
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            raise OSError(code, os.strerror(code))
        return Stream(connection, max_bytes, None if address.path else keys)

    return dial

"""Where a draft worker listens: a Unix socket in a private folder, or a TCP port behind TLS.

unix:///PATH, /PATH or ~/PATH   processes of this user on this machine
tcp://HOST:PORT                 other machines; both sides need keys (``keys``)
"""

import errno
import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

TCP = re.compile(r"tcp://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\*|[0-9]{1,5})")
MAX_PATH_BYTES = 107  # Linux
DEFAULT = "~/.cache/dllm/drafts/worker.sock"

Place = tuple[int, tuple[str, int] | str]  # family of a socket; (address, port), or a path


class Address(NamedTuple):
    path: str = ""  # of a Unix socket; empty for TCP
    host: str = ""
    port: int = 0  # takes a free one

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_numeric(self) -> bool:
        """False if a name server has to be asked."""
        try:
            return bool(self.path or ipaddress.ip_address(self.host))
        except ValueError:
            return False

    def resolve(self) -> list[Place]:
        """One place or more. May ask a name server. Raises ValueError: the host is not known."""
        if self.path:
            return [(socket.AF_UNIX, self.path)]
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ValueError(f"{self}: {error}") from None
        return [(family, (str(there[0]), int(there[1]))) for family, _, _, _, there in found]


def parse(given: object, keys: str | None, where: str, is_own: bool = False) -> Address:
    """Raises ValueError for what is no address, or of TCP without a folder of ``keys``.

    ``is_own``: it is to listen at: the port may be ``*``, and so may a part of a socket's name,
    which becomes the number of this process.
    """
    found = _tcp(given, is_own) or _unix(given, is_own) if isinstance(given, str) else None
    if found is None:
        raise ValueError(f"{where} = {given!r}; allowed: unix:///PATH or tcp://HOST:PORT.")
    if not found.path and keys is None:
        raise ValueError(
            f"{where} = {given!r}: prompts cross the wire as token ids, so TCP needs keys. Allowed "
            "without: unix:///PATH. Or run `dllm draft-keys DIR`, and name DIR in keys."
        )
    return found


def _tcp(given: str, is_own: bool) -> Address | None:
    match = TCP.fullmatch(given)
    if match is None:
        return None
    host, port = match[1].strip("[]"), match[2]
    try:
        if match[1].startswith("["):
            ipaddress.IPv6Address(host)
    except ValueError:
        return None
    if port == "*":
        return Address(host=host) if is_own else None
    return Address(host=host, port=int(port)) if 0 < int(port) < 65536 else None


def _unix(given: str, is_own: bool) -> Address | None:
    path = os.path.expanduser(given.removeprefix("unix://"))
    if is_own:
        path = path.replace("*", str(os.getpid()))
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return None
    is_path = path.startswith("/") and not path.endswith("/") and not set(path) & {"*", "\0", "\n"}
    return Address(path) if is_path and size <= MAX_PATH_BYTES else None


def check_private(path: str) -> None:
    """Raises ValueError if others can enter a socket's folder: its name could be another user's."""
    folder = Path(path).parent
    try:
        found = folder.stat()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: {folder}") from None
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(f"{path}: others may enter {folder}. Run: chmod 700 {folder}")


def make_private(path: str) -> None:
    """Make the folder of a socket unless it is there, and remove a socket that nobody listens at.

    Raises ValueError: others can enter the folder, or somebody listens at the socket.
    """
    place = Path(path)
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(path)
        if not place.exists():
            return
        if not place.is_socket():
            raise ValueError(f"{path} is there, and no socket.")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            if probe.connect_ex(path) == errno.ECONNREFUSED:
                place.unlink()
                return
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    raise ValueError(f"{path} is in use.")

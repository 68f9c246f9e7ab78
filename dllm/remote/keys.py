"""Who may talk to whom: loopback addresses freely, others with CURVE keys and an allow-list.

``dllm draft-keys DIR`` writes two pairs of keys (CurveZMQ, rfc.zeromq.org/spec/26):

    DIR/worker.key_secret   DIR/worker.key    of the draft worker
    DIR/target.key_secret   DIR/target.key    of the target
    DIR/allowed/target.key                    the targets that the worker lets in

A worker reads its own pair and ``allowed``; a target reads its own pair and ``worker.key``.
"""

import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import zmq
import zmq.auth
from zmq.utils.z85 import Z85CHARS

from dllm.settings.command import OK, CommandError

WORKER, TARGET, ALLOWED = "worker", "target", "allowed"
TCP = re.compile(r"tcp://(\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\*|[0-9]{1,5})")
MAX_IPC_BYTES = 107  # of a socket's path
KEY_CHARS = 40


class Keys(NamedTuple):
    """CURVE keys of one side (Z85 text).

    Attributes:
        public, secret: its own pair.
        worker: the worker's public key.
        allowed: folder of the targets' public keys that a worker lets in.
    """

    public: bytes
    secret: bytes
    worker: bytes
    allowed: Path


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can reach an address (``tcp://HOST:PORT``, ipc)."""
    if address.startswith("ipc://"):
        return True
    host = urlsplit(address).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: object, keys: str | None, where: str, is_own: bool = False) -> None:
    """Refuse what is no address, and one outside of this machine without keys.

    Args:
        is_own: it is to listen at; host and port may be ``*``.

    Raises:
        ValueError: says what is allowed.
    """
    shape = f"{where} = {address!r}; allowed: tcp://HOST:PORT or ipc://PATH."
    if not isinstance(address, str) or not (_is_tcp(address, is_own) or _is_ipc(address)):
        raise ValueError(shape)
    if keys is None and not is_loopback(address):
        raise ValueError(
            f"{where} = {address!r} is outside of this machine, and prompts cross the wire as "
            "token ids. Allowed: a loopback address, or any with CURVE keys: run `dllm draft-keys "
            "DIR`, and name DIR in keys."
        )


def _is_tcp(address: str, is_own: bool) -> bool:
    match = TCP.fullmatch(address)
    if match is None or ("*" in match.groups() and not is_own):
        return False
    host, port = match.groups()
    try:
        if host.startswith("["):
            ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return False
    return port == "*" or 0 < int(port) < 65536


def _is_ipc(address: str) -> bool:
    path = address.removeprefix("ipc://")
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return False
    is_path = path not in ("*", "@") and "\0" not in path
    return address.startswith("ipc://") and is_path and 0 < size <= MAX_IPC_BYTES


def read_keys(folder: str, side: str) -> Keys:
    """The keys of one side, WORKER or TARGET.

    Raises:
        ValueError: a file is missing or no key, others can read the secret, or a worker's list of
            those let in is empty.
    """
    path = Path(folder)
    own, worker = path / f"{side}.key_secret", path / f"{WORKER}.key"
    for file in (own, worker):
        if not file.is_file():
            raise ValueError(f"keys: there is no {file}. Run: dllm draft-keys {folder}")
    if own.stat().st_mode & 0o077:
        raise ValueError(f"keys: others may read {own}. Run: chmod 600 {own}")
    if side == WORKER:
        allowed = sorted((path / ALLOWED).glob("*.key"))
        if not allowed:
            raise ValueError(
                f"keys: no key of a target in {path / ALLOWED}: nobody would be let in."
            )
        for file in allowed:
            _load(file)
    public, secret = _load(own)
    if secret is None:
        raise ValueError(f"keys: {own} holds no secret key.")
    return Keys(public, secret, _load(worker)[0], path / ALLOWED)


def _load(file: Path) -> tuple[bytes, bytes | None]:
    """The public key of a file, and the secret one if it has any."""
    try:
        keys = zmq.auth.load_certificate(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"keys: {file}: {error}") from None
    for key in keys:
        if key is not None and (len(key) != KEY_CHARS or set(key) - set(Z85CHARS)):
            raise ValueError(f"keys: {file}: a key has {KEY_CHARS} characters of Z85.")
    return keys


def write_keys(folder: Path) -> None:
    """Write new keys; never over existing ones.

    Raises:
        CommandError: the folder has keys already.
    """
    allowed = folder / ALLOWED
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"{folder} is no folder. Name another one.")
    if any(folder.glob("*.key*")):
        raise CommandError(f"{folder} has keys already. Name another folder.")
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True)
    allowed.mkdir(exist_ok=True)
    before = os.umask(0o077)
    try:
        for side in (WORKER, TARGET):
            zmq.auth.create_certificates(folder, side)
    finally:
        os.umask(before)
    (allowed / f"{TARGET}.key").write_bytes((folder / f"{TARGET}.key").read_bytes())


def main(argv: Sequence[str]) -> int:
    """``dllm draft-keys DIR``."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="dllm draft-keys", description="Write CURVE keys for draft workers and targets."
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args(argv).folder
    write_keys(folder)
    print(
        f"{folder}: keys of a draft worker and of a target. The worker's machine needs "
        f"{WORKER}.key_secret, {WORKER}.key and {ALLOWED}/; the target's needs "
        f"{TARGET}.key_secret, {TARGET}.key and {WORKER}.key."
    )
    return OK

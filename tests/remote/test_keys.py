"""Who is let in over TCP, and what is an address."""

import contextlib
import socket
import ssl
import stat
from pathlib import Path

import pytest

from dllm.remote.address import Address, parse
from dllm.remote.keys import Keys, main
from dllm.remote.wire import Delta, DraftBatch, frame
from dllm.settings.command import CommandError
from tests.support.draft_links import (
    ANSWER,
    PROMPT,
    TCP,
    ask,
    count,
    linked,
    serving,
    until,
)
from tests.support.patience import HANG_S


def write_pair(folder: Path) -> Path:
    assert main([str(folder)]) == 0
    return folder


def trust(folder: Path, other: Path) -> None:
    """What the page says: copy the public part of the other."""
    (folder / "trusted" / f"{other.name}.pem").write_bytes((other / "certificate.pem").read_bytes())


@pytest.fixture
def pairs(tmp_path) -> dict[str, Path]:
    """A worker and two targets that know each other, and a stranger that knows the worker."""
    found = {name: write_pair(tmp_path / name) for name in ("worker", "one", "two", "stranger")}
    for name in ("one", "two", "stranger"):
        trust(found[name], found["worker"])
    for name in ("one", "two"):
        trust(found["worker"], found[name])
    return found


def keys_of(folder: Path) -> Keys:
    return Keys(str(folder))


def test_only_targets_whose_certificate_is_known_are_let_in(pairs):
    given = frame(DraftBatch(1, 10**6, [Delta(1, 0, PROMPT, 2)]))
    with serving(TCP, keys_of(pairs["worker"])) as server:
        with linked(server.address, keys_of(pairs["stranger"])) as outside:
            for name in ("one", "two"):
                with linked(server.address, keys_of(pairs[name])) as link:
                    for step in range(1, 4):
                        assert ask(link, step) == ANSWER
                        outside.receive()
            until(outside, lambda: bool(outside.receive() or server.num_refused > 2))
            assert not outside.num_ups and not count(outside, "asks")
        assert len(server._have_asked) <= 2
        with socket.create_connection(("127.0.0.1", server.address.port)) as plain_text:
            plain_text.settimeout(HANG_S)
            plain_text.sendall(given)
            with contextlib.suppress(ConnectionResetError):
                assert b"dllm" not in plain_text.recv(1000)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection(("127.0.0.1", server.address.port)) as raw,
            contextlib.suppress(OSError),
            context.wrap_socket(raw) as nobody,
        ):
            nobody.settimeout(HANG_S)
            nobody.sendall(given)
            assert not nobody.recv(1000)
        assert len(server._have_asked) <= 2


def test_a_target_talks_to_the_worker_that_it_knows_only(pairs):
    """One that has the right to be asked elsewhere, at this address, sees no token."""
    trust(pairs["stranger"], pairs["one"])
    with serving(TCP, keys_of(pairs["stranger"])) as server:
        with linked(server.address, keys_of(pairs["one"])) as link:
            until(link, lambda: bool(link.receive() or link._why))
            assert link.num_ups == 0
        assert not server._have_asked


def test_a_worker_reached_at_an_address_of_this_machine_is_near(pairs, tmp_path):
    unix = Address(str(tmp_path / "worker.sock"))
    worker, one = keys_of(pairs["worker"]), keys_of(pairs["one"])
    for address, keys in ((TCP, worker), (unix, None)):
        with serving(address, keys) as server, linked(server.address, one) as link:
            assert not link.is_near
            assert ask(link) == ANSWER and link.is_near


def test_a_certificate_without_its_key_is_refused(pairs):
    (pairs["two"] / "certificate.pem").write_bytes((pairs["one"] / "certificate.pem").read_bytes())
    with pytest.raises(ValueError, match="keys: "):
        keys_of(pairs["two"])


def test_secrets_are_for_their_owner(tmp_path):
    folder = tmp_path / "keys"
    folder.mkdir()
    folder.chmod(0o755)
    write_pair(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600
    with pytest.raises(CommandError, match="has keys already"):
        main([str(folder)])
    with pytest.raises(CommandError, match="is no folder"):
        main([str(folder / "key.pem")])
    with pytest.raises(ValueError, match="nobody is trusted"):
        keys_of(folder)
    trust(folder, folder)
    keys_of(folder)
    (folder / "key.pem").chmod(0o644)
    with pytest.raises(ValueError, match="others may read"):
        keys_of(folder)
    with pytest.raises(ValueError, match="draft-keys"):
        keys_of(folder / "trusted")


@pytest.mark.parametrize("name", ["trusted/one.pem", "certificate.pem", "key.pem"])
def test_a_file_that_holds_no_key_is_refused(pairs, name):
    (pairs["worker"] / name).write_text("junk")
    with pytest.raises(ValueError, match="keys: "):
        keys_of(pairs["worker"])


def test_an_address_of_ipv6_is_one_to_listen_at(pairs):
    address = Address(host="::1")
    with (
        serving(address, keys_of(pairs["worker"])) as server,
        linked(parse(str(server.address), "keys", "workers"), keys_of(pairs["one"])) as link,
    ):
        assert ask(link) == ANSWER


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    ["tcp://127.0.0.1:5800", "tcp://0.0.0.0:5800", "tcp://drafts.example:5800", "tcp://[::]:5800"],
)
def test_tcp_needs_keys(given):
    assert str(parse(given, "keys", "--listen")) == given
    with pytest.raises(ValueError, match="TCP needs keys"):
        parse(given, None, "--listen")


def test_a_path_is_a_socket(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for given in ("unix:///home/me/a.sock", "/home/me/a.sock", "~/a.sock"):
        assert str(parse(given, None, "workers")) == "unix:///home/me/a.sock"
    assert parse("tcp://127.0.0.1:*", "keys", "--listen", is_own=True) == TCP
    assert "*" not in str(parse("~/worker-*.sock", None, "--listen", is_own=True))


@pytest.mark.parametrize(
    "given",
    [
        5,
        "127.0.0.1:5800",
        "http://127.0.0.1:1",
        "tcp://127.0.0.1",
        "tcp://:5",
        "tcp://a:x",
        "tcp://127.0.0.1:*",
        "tcp://*:5800",
        "tcp://127.0.0.1:\u0665\u0668\u0660\u0660",
        "tcp://127.0.0.1#x:5800",
        "tcp://127.0.0.1:0;10.0.0.5:5800",
        "tcp://127.0.0.1:5800\n",
        "tcp://[::1:5800",
        "tcp://[::1::2]:5800",
        "unix://",
        "unix://a",
        "/a/*",
        "/" + 107 * "a",
        "/\ud800",
        "/a\0",
    ],
)
def test_what_is_no_address_is_refused(given):
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        parse(given, "keys", "workers")

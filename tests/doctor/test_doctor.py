"""``dllm doctor``: what it finds on this machine, and what it calls wrong."""

import json
import socket

import pytest
import torch

from dllm.cli import main
from dllm.doctor import command

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says more on a GPU")


def doctor(capsys, *arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit status, and the findings by name."""
    status = main(["doctor", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    return status, {each["name"]: (each["status"], each["text"]) for each in found}


@pytest.fixture
def port():
    """A number that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    return str(number)


def test_a_machine_and_a_model(capsys, checkpoint, port):
    status, found = doctor(capsys, str(checkpoint()), "--port", port)
    assert status == 0 and {each for each, _ in found.values()} <= {"ok", "note"}
    assert {"versions", "vllm", "plugins", "device", "port", "model", "memory"} < set(found)
    text = found["model"][1]
    assert "DiffusionGemmaForBlockDiffusion" in text and "canvas of 32" in text


def test_weights_that_are_not_here_have_no_size():
    found = command._room(None, "google/diffusiongemma-26B-A4B-it")
    assert (found.name, found.status) == ("memory", "note")


def test_lines_of_text(capsys, port):
    assert main(["doctor", "--port", port]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok   versions") and all(line[:4].strip() for line in lines)


def test_a_port_of_ipv6():
    try:
        taken = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    with taken:
        number = taken.getsockname()[1]
        assert command._port("::1", number).status == "fail"
    assert command._port("::1", number).status == "ok"


def test_what_is_wrong(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("dllm.doctor.command.a_namesake", lambda: "another dllm")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, found = doctor(capsys, str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert status == 1
    wrong = {name for name, (status, _) in found.items() if status == "fail"}
    assert wrong == {"plugins", "port", "model"}

"""``dllm doctor``: what it finds on this machine, and what it calls wrong."""

import importlib
import json
import os
import socket

import pytest
import torch
from vllm import envs

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
    assert "--kv-cache-memory-bytes" in found["memory"][1]


def test_flags_of_the_server_may_follow(capfd, checkpoint, port):
    flags = ("--port", port, "--max-model-len", "96", "--tensor-parallel-size", "2")
    flags += ("--kv-cache-memory-bytes", "1G")
    _, alone = doctor(capfd, str(checkpoint()), "--port", port)
    _, found = doctor(capfd, str(checkpoint()), *flags)
    assert "96 tokens a request" in found["model"][1]
    assert found["memory"][1].split(";")[1:] == alone["memory"][1].split(";")[1:2]  # one machine


def test_a_folder_that_is_not_there(capsys, monkeypatch, port):
    """Nothing of vLLM is asked, whose answer would be about the model hub."""
    monkeypatch.setattr(command, "_server_arguments", None)
    status, found = doctor(capsys, "./checkpoints/tiny-dlm", "--port", port)
    assert status == 1 and found["model"][0] == "fail"
    assert "did you mean 'tiny-dllm'" in found["model"][1] and "tiny-ar," in found["model"][1]


@pytest.mark.parametrize("beside", [False, True])
def test_a_model_of_the_hub_that_is_not_here(capsys, monkeypatch, tmp_path, port, beside):
    """vLLM is asked; a folder that is called like the organization may have been meant."""
    (tmp_path / "nobody" / "such-a-model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path if beside else "/")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, found = doctor(capsys, "nobody/no-such-model", "--port", port)
    assert status == 1 and found["model"][0] == "fail"
    assert "HF_HUB_OFFLINE=0 hf download nobody/no-such-model`, or" in found["model"][1]
    assert ("did you mean 'such-a-model'" in found["model"][1]) == beside


def test_weights_that_are_not_here_have_no_size(capsys, tmp_path, checkpoint, port):
    for file in checkpoint().glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    _, found = doctor(capsys, str(tmp_path), "--port", port)
    assert found["memory"][0] == "note" and "a token's keys and values take" in found["memory"][1]


def test_weights_that_the_index_leaves_out_are_not_counted(capsys, tmp_path, checkpoint, port):
    for file in checkpoint().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    _, alone = doctor(capsys, str(tmp_path), "--port", port)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with (tmp_path / "consolidated.safetensors").open("wb") as file:
        file.truncate(1 << 30)  # takes no disk
    _, found = doctor(capsys, str(tmp_path), "--port", port)
    assert found["memory"][1].split(",")[0] == alone["memory"][1].split(",")[0]
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    _, found = doctor(capsys, str(tmp_path), "--port", port)
    assert found["memory"][0] == "fail" and "gone.safetensors" in found["memory"][1]


def test_what_libraries_print_is_no_json(capfd, monkeypatch, port):
    def noisy() -> str:
        os.write(1, b"a library's log")
        return "0.32.0"

    monkeypatch.setattr(command, "vllm_version", noisy)
    status, _ = doctor(capfd, "--port", port)
    assert status == 0


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("DLLM_DISABLE", "1", "note"),
        ("VLLM_PLUGINS", "other", "fail"),
        ("VLLM_PLUGINS", "other,dllm", "ok"),
    ],
)
def test_what_vllm_is_told_to_load(capsys, monkeypatch, port, name, value, status):
    monkeypatch.setenv(name, value)
    _, found = doctor(capsys, "--port", port)
    assert found["plugins"][0] == status


def test_a_cache_that_cannot_be_written(capsys, monkeypatch, port):
    # Not the variable: vLLM keeps its environment from the first engine of a process on.
    monkeypatch.setitem(vars(envs), "VLLM_CACHE_ROOT", "/dev/null/cache")
    status, found = doctor(capsys, "--port", port)
    assert status == 1 and found["cache"][0] == "fail"


def test_a_build_for_gpus_without_a_gpu(capsys, monkeypatch, port):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    status, found = doctor(capsys, "--port", port)
    assert status == 1 and found["device"][0] == "fail" and "13.0" in found["device"][1]


def test_the_port_of_a_config_file(capsys, tmp_path, checkpoint, port):
    config = tmp_path / "serve.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        config.write_text(f"port: {number}\n")
        flags = (str(checkpoint()), "--config", str(config))
        _, found = doctor(capsys, *flags)
        _, free = doctor(capsys, *flags, "--port", port)
    assert found["port"][0] == "fail" and f":{number}" in found["port"][1]
    assert free["port"] == ("ok", f"127.0.0.1:{port} is free")


def test_a_torchvision_of_another_torch(capsys, monkeypatch, tmp_path, port):
    """transformers imports it, and so does every server."""
    wrong = "operator torchvision::nms does not exist"
    (tmp_path / "torchaudio.py").write_text(f"raise RuntimeError({wrong!r})")
    monkeypatch.syspath_prepend(tmp_path)

    def imports(*_):
        importlib.import_module("torchaudio")

    monkeypatch.setattr(command, "_server_arguments", imports)
    status, found = doctor(capsys, "checkpoints/tiny-dllm", "--port", port)
    assert status == 1 and found["model"] == ("fail", wrong)
    assert found["torchaudio"][0] == "fail" and "pip uninstall torchaudio" in found["torchaudio"][1]


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

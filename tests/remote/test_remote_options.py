"""What is refused before anything starts: options of a target, command lines of a draft worker."""

import pytest

from dllm import cli
from dllm.remote import discovery
from dllm.settings.remote import RemoteOptions
from dllm.settings.server import PluginOptions

WORKER = "unix:///drafts/worker.sock"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": [WORKER, WORKER]}, ["each address once"]),
        ({"workers": WORKER}, ["workers = "]),
        ({"workers": [{}]}, ["workers = "]),
        ({"workers": []}, ["workers = []", "discovery = 'static'"]),
        ({"workers": [WORKER], "fallback": "ngram"}, ["'fallback'"]),
        ({"workers": [WORKER], "polcy": "fixed"}, ["'polcy'", "did you mean 'policy'"]),
        ({"policy": "widest"}, ["policy = 'widest'", "'adaptive'"]),
        ({"policy": "adaptive", "width": 3}, ["width belongs"]),
        ({"policy": "fixed", "width": -1}, ["width = -1"]),
        ({"deadline_ms": 0}, ["deadline_ms = 0"]),
        ({"deadline_ms": float("nan")}, ["deadline_ms"]),
        ({"keys": 5}, ["keys = 5"]),
        ({"discovery": "etcd"}, ["discovery = 'etcd'", "'static'"]),
        ({"discovery": "dynamo", "workers": [WORKER]}, ["which finds them", WORKER]),
        (5, ["remote = 5"]),
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    with pytest.raises(ValueError) as refusal:
        PluginOptions.from_additional_config({"dllm": {"remote": options}})
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_options_are_read():
    given = {"workers": [WORKER], "deadline_ms": 20, "policy": "fixed", "width": 0}
    options = PluginOptions.from_additional_config({"dllm": {"remote": given}}).remote
    assert options == RemoteOptions([WORKER], 20, "fixed", 0)
    assert PluginOptions.from_additional_config({"dllm": {}}).remote is None
    with pytest.raises(ValueError, match="0 to 5"):
        RemoteOptions([WORKER], policy="fixed", width=6).check_against(5)
    RemoteOptions([WORKER]).check_against(127)
    with pytest.raises(ValueError, match="num_speculative_tokens = 128; allowed: at most 127"):
        RemoteOptions([WORKER]).check_against(128)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "tcp://0.0.0.0:5800"], ["0.0.0.0", "draft-keys"]),
        (["--listen", "0.0.0.0:5800"], ["tcp://HOST:PORT"]),
        (["--listen", "tcp://127.0.0.1:5800"], ["127.0.0.1", "draft-keys"]),
        (["--listen", "/tmp/worker.sock"], ["chmod 700 /tmp"]),
        (["--keys", "/nowhere"], ["/nowhere/key.pem"]),
        (["--ahead", "-1"], ["--ahead -1", "at least 0"]),
        (["--discovery", "dynamo", "--listen", "tcp://0.0.0.0:5800"], ["draft-keys"]),
    ],
)
def test_a_command_line_that_cannot_work_is_refused(flags, words, capsys):
    assert cli.main(["draft-worker", "--model", "/nowhere/model", *flags]) == 1
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_a_listed_worker_names_an_address_that_others_reach(monkeypatch, tmp_path, capsys):
    keys = str(tmp_path / "keys")
    assert cli.main(["draft-keys", keys]) == 0
    listed = ["draft-worker", "--model", "/nowhere/model", "--keys", keys, "--discovery", "dynamo"]
    monkeypatch.setattr(discovery, "find_python", lambda: None)
    for address in ("tcp://0.0.0.0:5800", "tcp://[::]:5800"):
        assert cli.main([*listed, "--listen", address]) == 1
        assert "targets are told this address" in capsys.readouterr().err


def test_discovery_without_dynamo_is_refused_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setenv(discovery.PYTHON_VARIABLE, "/nowhere/python")
    assert cli.main(["draft-worker", "--model", "/nowhere/model", "--discovery", "dynamo"]) == 1
    assert "/nowhere/python: there is no such file" in capsys.readouterr().err


def test_help_names_what_is_ours(capsys):
    assert cli.main(["draft-worker", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--ahead" in said and "--keys" in said

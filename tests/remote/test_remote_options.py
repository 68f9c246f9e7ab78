"""What is refused before anything starts: options of a target, command lines of a draft worker."""

from dllm import cli
from dllm.remote import discovery
from dllm.settings.remote import RemoteOptions
from dllm.settings.server import PluginOptions

WORKER = "unix:///drafts/worker.sock"


def test_options_are_read():
    given = {"workers": [WORKER], "deadline_ms": 20, "policy": "fixed", "width": 0}
    options = PluginOptions.from_additional_config({"dllm": {"remote": given}}).remote
    assert options == RemoteOptions([WORKER], 20, "fixed", 0)
    assert PluginOptions.from_additional_config({"dllm": {}}).remote is None


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

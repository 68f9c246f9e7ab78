"""The `dllm` command: dispatch, and errors that help."""

import json
from pathlib import Path
from typing import Any

import pytest

from dllm import cli
from dllm.cli import main
from dllm.tools import client
from tests.support.chat_stub import Stub, serve
from tests.support.process import run_python

# --------------------------------------------------------------------------------------------------
# Dispatch


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in cli.COMMANDS)
    assert main([]) == cli.MISUSED


SLOW = ("torch", "transformers", "vllm", "openai", "triton", "safetensors")


def test_help_imports_nothing_that_takes_seconds() -> None:
    code = f"""
import contextlib, sys
from dllm.cli import COMMANDS, main
main(["--help"])
main(["--version"])
for name in COMMANDS:
    with contextlib.suppress(SystemExit):
        main([*name.split(), "--help"])
    slow = {{*{SLOW}}} & set(sys.modules)
    assert not slow, (name, slow)
"""
    said = run_python("-c", code).stdout
    assert all(f"usage: dllm {name}" in said for name in cli.COMMANDS)


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evla"]) == 2
    assert "no command 'evla' (did you mean 'eval'?)" in capsys.readouterr().err


@pytest.mark.parametrize("behind", [[], ["--help"]])
def test_the_first_word_of_two_names_those_behind_it(
    behind: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *behind]) == 2
    expected = "dllm: no command 'train'; allowed: train drafter, train pilot.\n"
    assert capsys.readouterr().err == expected


def test_run_as_a_module_it_reports_errors_in_one_line() -> None:
    """`python -m` gives the module two names; the error must be caught under both."""
    done = run_python("-m", "dllm.cli", "eval", "--decisions", "nothing", status=1)
    assert done.stderr.startswith("dllm eval: --decisions nothing: No such file")
    assert "Traceback" not in done.stderr


# --------------------------------------------------------------------------------------------------
# Servers


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """The arguments for one typed question."""
    question = {"type": "predicate", "instructions": "Yes"}
    line = {"input": "in", "question": question, "answer": True}
    (tmp_path / "asked.jsonl").write_text(json.dumps(line))
    return ["--decisions", str(tmp_path / "asked.jsonl")]


def decide(body: dict[str, Any]) -> dict[str, Any]:
    """A server's answer to a typed question."""
    told = {"label_mass": 1.0, "hesitation": 0.0}
    return {"answers": [{"type": "predicate", "probability": 0.75}], "diagnostics": [told]}


def test_a_server_that_is_not_there(asked, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Stub(str)) as stub:
        gone = stub.url
    assert main(["eval", *asked, "--base-url", gone]) == 1
    message = capsys.readouterr().err
    assert f"no server answers at {gone}" in message
    assert "make serve" in message


def test_an_address_without_a_scheme() -> None:
    with pytest.raises(cli.CommandError, match="allowed: a URL such as"):
        client.connect("localhost:8000", None)


def test_the_only_model_needs_no_name() -> None:
    with serve(Stub(str, models=("tiny-dllm",))) as stub:
        assert client.connect(stub.url, None).model == "tiny-dllm"
        with pytest.raises(cli.CommandError, match=r"no model 'tiny-dlm'.*did you mean 'tiny-dllm"):
            client.connect(stub.url, "tiny-dlm")


def test_one_of_several_models_has_to_be_named() -> None:
    with serve(Stub(str, models=("a", "b"))) as stub:
        assert client.connect(f"{stub.url}/v1", "b").model == "b"
        with pytest.raises(cli.CommandError, match="served: a, b"):
            client.connect(stub.url, None)


def test_a_command_line_is_written_down_without_the_key() -> None:
    argv = ["--api-key", "s3cret", "--api-key=s3cret", "--seed=1"]
    kept = ["--api-key", "$OPENAI_API_KEY", "--api-key=$OPENAI_API_KEY", "--seed=1"]
    assert client.without_key(argv, "s3cret") == kept
    assert client.without_key(["http://me:word@host/v1"], None) == ["http://host/v1"]
    assert client.without_key(["--api-key", ""], "") == ["--api-key", ""]
    assert client.without_key(argv, None) == argv


@pytest.mark.parametrize("command", [["eval"], ["watch", "a question"]])
def test_a_server_with_a_key(command: list[str], asked, tmp_path, monkeypatch, capsys) -> None:
    """The key comes from the flag or the variable; without it the server answers HTTP 401."""
    answered = []
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serve(Stub(str, key="s3cret", complete=decide)) as stub:
        given = [*command, "--base-url", stub.url]
        if command == ["eval"]:
            given += [*asked, "--output", str(tmp_path / "out.json")]
        for key, variable in ((None, None), ("wrong", None), ("s3cret", "wrong"), (None, "s3cret")):
            if variable:
                monkeypatch.setenv("OPENAI_API_KEY", variable)
            answered.append(main([*given, *(["--api-key", key] if key else [])]))
    said = capsys.readouterr().err
    # The stub shows no canvases, so `watch` fails behind the door.
    assert answered == ([1, 1, 1, 1] if command[0] == "watch" else [1, 1, 0, 0])
    assert said.count("HTTP 401") == said.count("--api-key, or in the variable OPENAI_API_KEY") == 2
    assert not any("s3cret" in file.read_text() for file in tmp_path.iterdir())

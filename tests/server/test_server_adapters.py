"""`vllm serve --enable-lora` of tiny-sdar with its bundled adapter, and others at run time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dllm.tasks.suite import question
from tests.support.adapters import write_adapter
from tests.support.server_harness import FLAGS, MODEL, Server

pytestmark = pytest.mark.slow

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
END = ". Yours, Bob"
ASKED = question("reverse", "heldout", 0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--enable-lora", f"--lora-modules=signed={CHECKPOINTS / 'tiny-sdar-signed'}")
    log = tmp_path_factory.mktemp("adapters") / "log"
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with Server(CHECKPOINTS / "tiny-sdar", log, (*FLAGS, *flags), environment) as running:
        running.wait_until_ready()
        yield running


def ask(server: Server, model: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": ASKED.prompt}]
    return server.client().chat.completions.create(
        model=model, messages=messages, max_tokens=64, **options
    )


def text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def test_a_request_names_its_adapter(server: Server) -> None:
    assert text(ask(server, MODEL)) == ASKED.answer
    assert text(ask(server, "signed")) == ASKED.answer + END
    stream = ask(server, "signed", stream=True)
    parts = [part.choices[0].delta.content or "" for part in stream if part.choices]
    assert "".join(parts) == ASKED.answer + END
    rule = {"structured_outputs": {"regex": "[a-z, ]+" + END.replace(".", "\\.")}}
    assert text(ask(server, "signed", extra_body=rule)) == ASKED.answer + END


def test_a_decision_reads_the_canvas_of_its_adapter(server: Server) -> None:
    choices = [{"value": "Ann"}, {"value": "Bob"}]
    asked = {"type": "choice", "instructions": "Who has more?", "choices": choices}
    body = {"input": ASKED.prompt, "questions": [asked]}
    replies = [server.post("/v1/decisions", body | {"model": name}) for name in (MODEL, "signed")]
    assert [reply.status for reply in replies] == [200, 200]
    plain, adapted = (json.loads(reply.text)["answers"] for reply in replies)
    assert plain != adapted


def test_adapters_come_and_go_and_a_wrong_one_is_refused(server: Server, tmp_path: Path) -> None:
    wrong = write_adapter(tmp_path / "wrong", {"lm_head": (832, 128)})
    refused = server.post("/v1/load_lora_adapter", {"lora_name": "w", "lora_path": str(wrong)})
    assert refused.status == 400 and "lm_head" in refused.message
    again = {"lora_name": "again", "lora_path": str(CHECKPOINTS / "tiny-sdar-signed")}
    assert server.post("/v1/load_lora_adapter", again).status == 200
    assert text(ask(server, "again")) == ASKED.answer + END
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "again"}).status == 200
    assert server.post("/v1/chat/completions", {"model": "again", "messages": []}).status == 404

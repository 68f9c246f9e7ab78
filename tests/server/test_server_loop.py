"""No body of at most 1 MB holds the event loop of the API server for long.

What is measured is CPU time of the loop's thread between two turns of the loop. Its unit is the
time in which the same thread reads 1 MB of JSON (``tests/support/loop_gap.py``).
"""

import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server_harness import MODEL, Reply, Server

pytest_plugins = ["tests.support.server_harness"]

LONGEST = 6  # of these units; 4.3 was measured
MEGABYTE = 1_000_000

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
DECISIONS = "/v1/decisions"
USER = {"role": "user", "content": "a"}


def completion(**options: Any) -> tuple[str, Any]:
    return COMPLETIONS, {"model": MODEL, "prompt": "ab", "max_tokens": 2, "seed": 1} | options


def chat(**options: Any) -> tuple[str, Any]:
    return CHAT, {"model": MODEL, "messages": [USER], "max_tokens": 2, "seed": 1} | options


def response(**options: Any) -> tuple[str, Any]:
    return RESPONSES, {"model": MODEL, "input": "ab", "max_output_tokens": 2} | options


def message(**options: Any) -> tuple[str, Any]:
    return MESSAGES, {"model": MODEL, "messages": [USER], "max_tokens": 2} | options


def decision(questions: int, text: Any, **options: Any) -> tuple[str, Any]:
    asked = [{"type": "predicate", "instructions": f"more than {i}"} for i in range(questions)]
    return DECISIONS, {"model": MODEL, "input": text, "questions": asked} | options


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties or {"a": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def tag(schema: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}


def invocation(route: tuple[str, Any]) -> tuple[str, Any]:
    return "/invocations", route[1]


PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}
NO_JSON = {"name": "f", "arguments": "[" * 400_000}
CALL = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": NO_JSON}]}
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(30_000)}}
NESTED: dict[str, Any] = {"type": "object"}
for _ in range(300):
    NESTED = {"type": "object", "properties": {"a": NESTED}, "required": ["a"]}

OPTIONS = [{"value": str(i)} for i in range(255)]
JSON_PARTS = [{"type": "input_json", "data": [0] * 9_999}] * 48

QUICK = {"diffusion_max_steps": 1}
NO_MESSAGE = "body.messages.0.ChatCompletionDeveloperMessageParam"

# Name: the body, and the status and parameter that it gets.
REFUSED = {
    # Requests of the engine.
    "prompts x widths": (completion(prompt=["a"] * 600, suffix="b", n=16), "n"),
    "prompts": (completion(prompt=["a"] * 1024), "prompt"),
    "texts as prompts": (completion(prompt=["a"] * 150_000), "prompt"),
    "conversations": ((CHAT + "/batch", chat(messages=[[USER]] * 4000)[1]), "messages"),
    "prompt logprobs": (completion(prompt_logprobs=1000), "prompt_logprobs"),
    "questions of systemone": (("/v1/systemone", {"model": MODEL, "state": "a", "questions":
        {f"q{i}": {"type": "noul"} for i in range(401)}}), None),
    "prompts x n": (completion(prompt=["a"] * 1024, n=16), "n"),
    "n": (completion(n=16_384), "n"),
    # Texts.
    "ids": (completion(prompt=[5] * 300_000), "input_tokens"),
    "text": (completion(prompt="1 2 " * 240_000), "input_text"),
    "chat text": (chat(messages=[{"role": "user", "content": "1 2 " * 240_000}]), "input_text"),
    "suffix": (completion(suffix="a " * 450_000), "suffix"),
    "bad words": (completion(bad_words=["ab " * 330_000]), "bad_words"),
    "60 bad words": (completion(bad_words=[f"{i}" + "ab " * 2600 for i in range(60)]), "bad_words"),
    "pins": (chat(diffusion_pins=[{"at": 0, "text": "a"}] * 40_000), "diffusion_pins"),
    "text of a pin": (chat(diffusion_pins=[{"at": 0, "text": "a " * 450_000}]), "diffusion_pins"),
    "ids of a pin": (chat(diffusion_pins=[{"at": 0, "ids": [5] * 300_000}]), "diffusion_pins"),
    # Lists of a request.
    "stop strings": (completion(stop=["a"] * 190_000), "body.stop"),
    "stop tokens": (completion(stop_token_ids=list(range(130_000))), "stop_token_ids"),
    "logit bias": (completion(logit_bias={str(i): 1 for i in range(80_000)}), "logit_bias"),
    "allowed tokens": (completion(allowed_token_ids=[5] * 300_000), "allowed_token_ids"),
    "positions": (completion(vllm_xargs={"diffusion_pin_at": list(range(130_000))}),
                  "diffusion_pin_at"),
    "canvas": (completion(vllm_xargs={"diffusion_seed_canvas": [5] * 300_000}),
               "diffusion_seed_canvas"),
    "extra arguments": (completion(vllm_xargs={f"k{i}": 1 for i in range(70_000)}), "k0"),
    "nested arguments": (completion(vllm_xargs={"a": [["b"]] * 130_000}), "body.vllm_xargs.a"),
    # Structured outputs.
    "wide schema": (completion(structured_outputs={"json": WIDE}), "structured_outputs"),
    "wide format": (chat(response_format=schema_format(WIDE)), "structured_outputs"),
    "deep schema": (chat(response_format=schema_format(NESTED)), None),
    "regex": (completion(structured_outputs={"regex": "(a|b)" * 190_000}), "structured_outputs"),
    "grammar": (completion(structured_outputs={"grammar": "root ::= " + '"a" ' * 150_000}),
                "structured_outputs"),
    "choices": (completion(structured_outputs={"choice": [f"c{i}" for i in range(90_000)]}),
                "structured_outputs"),
    # xgrammar takes minutes for it.
    "structural tag": (chat(response_format=tag({"type": "object",
        "properties": {f"p{i}": {} for i in range(6000)}, "minProperties": 100,
        "maxProperties": 3000})), "structured_outputs"),
    "long structural tag": (chat(response_format=tag(WIDE)),
                            "structured_outputs"),
    # Lists of objects.
    "prompts of wrong numbers": (completion(prompt=[1.5] * 190_000), "prompt"),
    "prompts of lists": (completion(prompt=[[1]] * 160_000), "prompt"),
    "messages": (chat(messages=[USER] * 28_000), "body.messages"),
    "no messages": (chat(messages=[1] * 300_000), NO_MESSAGE),
    "tools": (chat(tools=[tool(f"f{i}") for i in range(7_000)]), "body.tools"),
    "no tools": (chat(tools=[{}] * 200_000), "body.tools.0.function"),
    "input": (response(input=[USER] * 20_000), "body.input"),
    "no input": (response(input=[{}] * 200_000), "body.input"),
    "questions on much": (decision(400, "a" * 900_000), "questions"),
    "input of questions": (decision(2, "1 2 " * 240_000), "input_text"),
    "no questions": ((DECISIONS, {"model": MODEL, "input": "a", "questions": [{}] * 300_000}),
                     "body.questions.0"),
    "names of a decision": (decision(1, "a", **{f"u{i}": 1 for i in range(80_000)}), "body"),
    "options of questions": ((DECISIONS, {"model": MODEL, "input": "a", "questions":
        [{"type": "choice", "instructions": "a", "choices": OPTIONS}] * 240}), "input_tokens"),
    "JSON of a decision": (decision(1, [{"role": "user", "content": JSON_PARTS}]), "input_text"),
    "Anthropic's messages": (message(messages=[USER] * 28_000), "body.messages"),
    "parts": (chat(messages=[PARTS] * 25), "body.messages"),
    "parts of a response": (response(input=[PARTS] * 25), "body.input"),
    "Anthropic's parts": (message(messages=[PARTS] * 25), "body.messages"),
    "parts of a batch": ((CHAT + "/batch", chat(messages=[[PARTS]] * 25)[1]), "body.messages"),
    "deep arguments of a call": (chat(messages=[USER, CALL]), "messages"),
    # Routes with validators of their own.
    "invocation": (invocation(chat(messages=[1] * 100_000)), "prompt"),
    "nested arguments of an invocation": (
        invocation(completion(vllm_xargs={"a": [["b"]] * 60_000})), None),
    "items": (("/generative_scoring", {"query": "a", "items": ["b"] * 100_000,
                                       "label_token_ids": [5]}), "label_token_ids"),
}  # fmt: skip
ANSWERED = {
    "512 prompts": completion(prompt=["a"] * 512, max_tokens=1, vllm_xargs=QUICK),
    "512 samples": completion(n=512, max_tokens=1, vllm_xargs=QUICK),
    "widths": completion(prompt=["ab"] * 2, suffix="b", n=2, max_tokens=40,
                         vllm_xargs={"diffusion_fill_widths": [0, 25]} | QUICK),
    "long stop strings": completion(stop=["a" * 240_000] * 4),
    "unknown fields": completion(**{f"u{i}": 1 for i in range(80_000)}),
    "unknown numbers": completion(x=[1] * 300_000),
    "500 pins": chat(diffusion_pins=[{"at": i, "text": "a"} for i in range(500)]),
    "template's arguments": chat(chat_template_kwargs={f"k{i}": i for i in range(50_000)}),
    "400 questions": decision(400, "ab" * 50, samples=1),
    "documents": chat(documents=[{"a": "b"}] * 1000),
}  # fmt: skip


@pytest.fixture
def loop(server: Server) -> Iterator[Any]:
    """Gives the longest hold of the loop, in ms, and begins anew; meanwhile others ask /health."""
    done = threading.Event()
    sick = []

    def ping() -> None:
        while not done.is_set():
            if not server.is_healthy():
                sick.append(1)

    # What is imported by the first request of a route is not what is measured.
    for route in (completion(suffix="b"), chat(), response(), message(), decision(1, "a")):
        assert server.post(*route).status == 200
    pings = threading.Thread(target=ping)
    pings.start()
    try:
        server.get("/loop-gap")
        yield lambda: json.loads(server.get("/loop-gap").text)["longest"]
    finally:
        done.set()
        pings.join()
        server.get("/loop-gap?stop")
    assert not sick


def held(server: Server, loop: Any, route: str, body: Any) -> tuple[Reply, float]:
    """The reply, and how long it held the loop: the least of three times, or one that is short."""
    data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    assert len(data) <= MEGABYTE
    longest = math.inf
    for _ in range(3):
        loop()
        reply = server.post(route, data)
        longest = min(longest, loop())
        if longest <= LONGEST:
            break
    return reply, longest


def test_the_worst_bodies_hold_no_loop(server, loop):
    expected = {name: (400, parameter) for name, (_, parameter) in REFUSED.items()}
    expected |= dict.fromkeys(ANSWERED, (200, None))
    found, units = {}, {}
    for name, given in ({n: given for n, (given, _) in REFUSED.items()} | ANSWERED).items():
        reply, units[name] = held(server, loop, *given)
        found[name] = reply.status, None if reply.status == 200 else reply.parameter
    print(json.dumps(units, indent=0))
    assert found == expected
    assert not {name: longest for name, longest in units.items() if longest > LONGEST}


def test_json_that_is_too_deep_holds_no_loop(server, loop):
    deep = b'{"prompt":' + b"[" * 450_000 + b"]" * 450_000 + b"}"
    reply, longest = held(server, loop, COMPLETIONS, deep)
    assert reply.status == 400 and longest <= LONGEST


def branching(levels: int) -> Any:
    """A schema of two objects at each level: for 9 levels 112 kB."""
    if levels == 0:
        return {"type": "string"}
    return {
        "oneOf": [
            {
                "type": "object",
                "properties": {f"{name}{levels}": branching(levels - 1)},
                "required": [f"{name}{levels}"],
                "additionalProperties": False,
            }
            for name in "ab"
        ]
    }


@pytest.mark.parametrize("route", [CHAT, f"{MESSAGES}/count_tokens"])
def test_a_strict_tool_is_read_off_the_loop(server, loop, route):
    schema = {"type": "object", "properties": {"v": branching(9)}, "required": ["v"]}
    given = {"name": "f", "strict": True}
    tool = given | {"input_schema": schema}
    if route == CHAT:
        tool = {"type": "function", "function": given | {"parameters": schema}}
    body = {"model": MODEL, "messages": [USER], "tools": [tool]}
    reply, longest = held(server, loop, route, body)
    assert reply.status == 200
    assert longest <= LONGEST

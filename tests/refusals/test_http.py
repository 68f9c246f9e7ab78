"""What a server answers with HTTP 400: (path, what is sent, what the answer names).

Names are of the parameter or of the message, which say what was given, what is allowed and what to
do; those that vLLM writes itself, for every model, say the first two. What may be streamed is sent
a second time as a stream, and refused in the same words before it starts: behind HTTP 200 nobody
would hear of it. Parameters that no engine takes are in ``test_requests``; here, one of each kind.
"""

import json
import re
from typing import Any

import pytest

from tests.support.server_harness import CANVAS, MAX_MODEL_LEN, MODEL, VOCAB_SIZE, Reply, Server

pytest_plugins = ["tests.support.server_harness"]

Body = dict[str, Any]
Names = tuple[str, ...]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, ANTHROPIC, BATCH = "/v1/responses", "/v1/messages", f"{CHATS}/batch"
DECISIONS, SYSTEMONE, SCORES = "/v1/decisions", "/v1/systemone", "/v1/scores"
MESSAGES = [{"role": "user", "content": "Sort these"}]
PREDICATE = {"type": "predicate", "instructions": "Ann has more than Bob", "name": "more"}
# What each path is asked, beside what is refused.
ASKED: dict[str, Body] = {
    COMPLETIONS: {"prompt": "Sort these", "max_tokens": 4},
    CHATS: {"messages": MESSAGES, "max_tokens": 4},
    RESPONSES: {"input": "Hi.", "max_output_tokens": 4},
    ANTHROPIC: {"messages": MESSAGES, "max_tokens": 9},
    BATCH: {"messages": [MESSAGES], "max_tokens": 4},
    DECISIONS: {"input": "Ann has 34, Bob has 51.", "questions": [PREDICATE]},
    SYSTEMONE: {"state": "a", "questions": {"a": {"type": "noul"}}},
    SCORES: {"prompt": "a", "text": "b"},
}
STREAMING = (COMPLETIONS, CHATS, RESPONSES)
IDS = f"0 to {VOCAB_SIZE - 1}"


def xargs(**extra: Any) -> Body:
    return {"vllm_xargs": extra}


# Our own messages, and vLLM's that say as much: each gives advice.
ADVICE = re.compile(r"\b(send|omit|leave|remove|reduce|correct|request fewer)\b", re.IGNORECASE)
TOLD: list[tuple[str, Body, Names]] = [
    (COMPLETIONS, xargs(diffusion_canvas_lenght=8),
     ("'diffusion_canvas_lenght'", "did you mean 'diffusion_canvas_length'?")),
    *((path, xargs(x=[1, "a"]), ("'x'", "Known: diffusion_canvas_length, "))
      for path in STREAMING),
    *((path, {"diffusion_max_steps": 8}, ("diffusion_max_steps", "within vllm_xargs"))
      for path in (*STREAMING, ANTHROPIC)),
    (COMPLETIONS, xargs(kv_transfer_params="x"), ("kv_transfer_params = 'x'", "a valid dict")),
    (COMPLETIONS, xargs(diffusion_t_max=float("nan")),
     ("diffusion_t_max = nan", "allowed: a finite number")),
    (COMPLETIONS, xargs(diffusion_seed_canvas=[VOCAB_SIZE], diffusion_canvas_length=1),
     (f"diffusion_seed_canvas = {VOCAB_SIZE}", f"from -1 to {VOCAB_SIZE - 1}")),
    # Edits that the worker cannot hold, or that leave nothing to emit.
    (COMPLETIONS, {"bad_words": ["a b c d e f" * 9] * 2 + ["z y x w v" * 300]},
     ("bad_words comes to", "at most 1024")),
    (COMPLETIONS, {"allowed_token_ids": [1, 6], "min_tokens": 1},
     ("allowed_token_ids leaves no token", "at least one")),
    *((path, {"repetition_penalty": 1e38}, ("repetition_penalty = 1e+38", "to 10000"))
      for path in (COMPLETIONS, CHATS)),
    # Parameters that canvases, or this server, do not honour.
    (COMPLETIONS, {"thinking_token_budget": 3}, ("thinking_token_budget", "--reasoning-parser")),
    (COMPLETIONS, xargs(thinking_token_budget=3), ("thinking_token_budget", "--reasoning-parser")),
    (COMPLETIONS, {"structured_outputs": {"regex": "a+"}, "min_tokens": 2},
     ("min_tokens beside structured outputs", "Leave one of them out")),
    (COMPLETIONS, {"use_beam_search": True}, ("use_beam_search = True", "allowed: False")),
    # Ids and lengths.
    (COMPLETIONS, {"prompt": [5, VOCAB_SIZE]}, (str(VOCAB_SIZE), IDS)),
    (COMPLETIONS, {"prompt": [2**40]}, (str(2**40), IDS)),
    (COMPLETIONS, {"prompt": [5, 2**70]}, (str(2**70), IDS)),
    (COMPLETIONS, {"prompt": [5] * 600}, ("600 input tokens", f"{MAX_MODEL_LEN} tokens")),
    (COMPLETIONS, {"top_k": 2**70}, ("top_k = 1180591620717411303424", "-1 to 2147483647")),
    (COMPLETIONS, {"max_tokens": 513}, ("max_tokens=513", f"max_model_len={MAX_MODEL_LEN}")),
]  # fmt: skip
OTHERS: list[tuple[str, Body, Names]] = [
    (COMPLETIONS, {"prompt": [[]]}, ("prompt",)),
    *((path, {"n": 0}, ("n",)) for path in (COMPLETIONS, CHATS)),
    (RESPONSES, {"logit_bias": {"999999": 1}}, ("logit_bias",)),
    # What multiplies requests.
    (COMPLETIONS, {"prompt": ["a"] * 513}, ("prompt",)),
    (CHATS, {"n": 513}, ("n",)),
    (BATCH, {"messages": [MESSAGES] * 513}, ("messages",)),
]  # fmt: skip


def pin(at: int, token: int = 5) -> Body:
    return {"diffusion_pins": [{"at": at, "ids": [token]}]}


HOLD = xargs(diffusion_pin_mode="hold")
PINS: list[tuple[str, Body, Names]] = [  # other pins that are none: tests/api/test_pins.py
    (CHATS, {"diffusion_pins": [{"at": 1}]}, ("allowed: a list of",)),
    (CHATS, pin(1) | xargs(diffusion_pin_at=[2]), ("diffusion_pins beside diffusion_pin_at",)),
    (CHATS, pin(9) | {"max_tokens": 9} | HOLD, ("max_tokens of at least 10",)),
    (RESPONSES, pin(1), ("diffusion_pins is not served here",)),
    (ANTHROPIC, pin(1), ("diffusion_pins is not served here",)),
    (ANTHROPIC, pin(1) | {"stream": True}, ("diffusion_pins is not served here",)),
    (CHATS, pin(4, 1) | {"min_tokens": 20, "max_tokens": 30} | HOLD,
     ("a pin at 4 that ends the answer, and min_tokens = 20",)),
]  # fmt: skip
# Holes: what else fits none is in tests/api/test_fill.py.
HOLES: list[tuple[str, Body, Names]] = [
    (COMPLETIONS, {"suffix": " and go"} | fields, (said,)) for fields, said in (
        ({"suffix": " and go" * CANVAS}, "hole, suffix and an end token of at most 32 together"),
        (xargs(diffusion_stream="canvas") | {"stream": True}, "beside suffix"),
        ({"diffusing": True, "stream": True}, "diffusion_stream beside suffix"),
        ({"diffusion_pins": [{"at": 1, "ids": [5]}]}, "diffusion_pins beside suffix"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs beside suffix"),
        ({"n": 129, "max_tokens": 4}, "prompts x n x widths of a hole come to 516"),
        ({"echo": True}, "echo beside suffix"),
        ({"temperature": -1}, "temperature"),
        (xargs(diffusion_trace=True), "diffusion_trace"),
    )
]  # fmt: skip
HOLES.append((COMPLETIONS, xargs(diffusion_fill_widths=[1, 2]),
              ("diffusion_fill_widths without suffix",)))  # fmt: skip
STREAM, EVERY, TRACE = "diffusion_stream", "diffusion_stream_every", "diffusion_trace"
AS_A_STREAM, AS_A_WHOLE = {"stream": True}, {"stream": False}
CANVASES, DRAFTS = xargs(diffusion_stream="canvas"), {"diffusing": True}
FRAMES: list[tuple[str, Body, Names]] = [
    (CHATS, CANVASES | AS_A_WHOLE, (STREAM, "without")),
    (CHATS, DRAFTS | AS_A_WHOLE, (STREAM, "without")),
    (COMPLETIONS, CANVASES | AS_A_WHOLE, (STREAM, "without")),
    (RESPONSES, CANVASES | AS_A_STREAM, (STREAM, "not served here")),
    (RESPONSES, DRAFTS, (STREAM, "not served here")),
    (ANTHROPIC, CANVASES | AS_A_STREAM, (STREAM, "not served here")),
    (ANTHROPIC, CANVASES, (STREAM, "not served here")),
    (BATCH, CANVASES, (STREAM, "not served here")),
    (CHATS, xargs(diffusion_stream="tokens") | AS_A_STREAM,
     (STREAM, "= 'tokens'; allowed: 'canvas' or 'text'")),
    (CHATS, xargs(diffusion_stream_every="visit") | AS_A_STREAM, (EVERY, f"without {STREAM}")),
    (CHATS, xargs(diffusion_stream="canvas", diffusion_stream_every="step") | AS_A_STREAM,
     (EVERY, "= 'step'; allowed: 'pass' or 'visit'")),
    (RESPONSES, xargs(diffusion_trace=True), (TRACE,)),
    (ANTHROPIC, xargs(diffusion_trace=True), (TRACE,)),
    (CHATS, xargs(diffusion_trace=["entropies"]), (TRACE,)),
    (CHATS, xargs(diffusion_trace=2), (TRACE,)),
    (SCORES, {}, ("masks",)),
]  # fmt: skip
HUNDREDTHS = {"type": "number", "multipleOf": 0.01}
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": HUNDREDTHS}}
GRAMMARS: list[tuple[str, Body, Names]] = [
    (COMPLETIONS, {"structured_outputs": asked}, said) for asked, said in (
        ({"grammar": 'root ::= root "a" | "b"'},
         ("left-recursive", "write the recursion behind a symbol")),
        ({"regex": "[ab]*a[ab]{15}"}, ("states",)),
        ({"json": {"type": "object", "enum": [[["x" * 300_000]]]}}, ("bytes; allowed",)),
        ({"json": HUNDREDTHS}, ("'multipleOf'",)),
        ({"structural_tag": json.dumps(TAG)}, ("'multipleOf'",)),
        ({"regex": "a("}, ("cannot be read",)),
        ({"json": {"type": "object"}, "whitespace_pattern": " "}, ("whitespace_pattern",)),
    )
]  # fmt: skip
GRAMMARS += [
    (CHATS, {"structured_outputs": {"regex": "a("}}, ("cannot be read",)),
    (COMPLETIONS, xargs(dllm_grammar="x"), ("dllm_grammar",)),  # a table, which is ours to make
    *((RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}, ())
      for schema in ({"type": "array", "uniqueItems": True},
                     {"type": "string", "pattern": "[ab]*a[ab]{15}"})),
]  # fmt: skip
CHOICE = {"type": "choice", "instructions": "Who has more?"}
SCORE = {"type": "score", "instructions": "How many?", "levels": [{"label": "a"}]}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


def of_choices(*values: Any) -> Body:
    return {"questions": [CHOICE | {"choices": [{"value": value} for value in values]}]}


def of_user(part: Any) -> Body:
    return {"input": [{"role": "user", "content": [part]}]}


def of_json(data: Any) -> Body:
    return of_user({"type": "input_json", "data": data})


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


TYPED: list[tuple[str, Body, Names]] = [
    (DECISIONS, body, (name,)) for body, name in (
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        (of_choices("a"), "questions.0"),
        (of_choices(*map(str, range(256))), "questions.0"),
        (of_choices("a", "a"), "questions.0.choice.choices"),
        (of_choices(1, "a"), "questions.0"),
        ({"questions": [SCORE]}, "questions.0"),
        ({"questions": [{"type": "vote", "instructions": ""}]}, "questions.0"),
        ({"stream": True}, "stream"),
        ({"samples": 17}, "samples"),
        ({"samples": True}, "samples"),
        ({"joint": True}, "joint"),
        ({"joint": 0}, "joint"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a", "prompt_cache_key": "a"}, "cache_salt"),
        # Half of a surrogate pair.
        ({"prompt_cache_key": "\udfff"}, "prompt_cache_key"),
        ({"questions": [PREDICATE | {"name": "\ud800"}]}, "questions.0.predicate.name"),
        (of_choices("\ud800", "a"), "questions.0.choice.choices.0.value"),
        (of_json({"\ud800": 1}), "input"),
        ({"input": [1, None, "a"]}, "input"),
        (of_user(IMAGE), "input"),
        ({"questions": [PREDICATE | {"instructions": [IMAGE]}]}, "questions"),
        (of_json(nested(33)), "input"),
        (of_json([0] * 10_000), "input"),
        (of_json("a" * 300_000), "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": ""}]}, "body"),
        (of_user({"type": "refusal", "refusal": "no"}), "input"),
        ({"input": "1 " * MAX_MODEL_LEN}, "input"),
        (of_choices(*("ab" * CANVAS + str(i) for i in range(255))), "questions"),
        ({"input": "a" * 25_000, "questions": [PREDICATE] * 400}, "questions"),
    )
]  # fmt: skip
TYPED.append((SYSTEMONE, {"chat_template_kwargs": {"chat_template": "x"}},
              ("chat_template_kwargs",)))  # fmt: skip
ROWS = [*TOLD, *OTHERS, *PINS, *HOLES, *FRAMES, *GRAMMARS, *TYPED]


def send(server: Server, path: str, body: Body) -> Reply:
    return server.post(path, {"model": MODEL, **ASKED[path], **body})


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [pytest.param(*row, id=f"{row[0]} {row[1]}"[:70]) for row in ROWS],
)
def test_it_is_refused(server, path, body, names):
    reply = send(server, path, body)
    assert reply.status == 400, reply.text
    assert all(name in f"{reply.parameter} {reply.message}" for name in names), reply.text
    if (path, body, names) in TOLD:
        assert ADVICE.search(reply.message), reply.message
    if path in STREAMING and "stream" not in body:
        streamed = send(server, path, body | {"stream": True})
        assert (streamed.status, streamed.message) == (400, reply.message)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b'"a"', b"\xff\xfe", b"{" * 100_000, b'{"prompt":[[['],
    ids=repr,
)  # fmt: skip
def test_what_is_no_request(server, body):
    assert server.post(COMPLETIONS, body).status == 400


@pytest.mark.parametrize("content_type", ["", "text/plain", "multipart/form-data"])
def test_what_is_not_called_json(server, content_type):
    reply = server.post(COMPLETIONS, ASKED[COMPLETIONS], content_type)
    assert reply.status == 400 and "application/json" in reply.message


@pytest.mark.parametrize("kind", [None, "disabled", "adaptive"])
def test_thinking_without_a_budget_is_not_refused(server, kind):
    asked = {} if kind is None else {"thinking": {"type": kind}}
    assert send(server, ANTHROPIC, asked).status == 200

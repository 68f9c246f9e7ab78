"""What a client may not send is refused, and the message says why.

Messages say what was given, what is allowed and what to do. Those of ``dllm.settings.request`` are
held to all three; those that vLLM writes itself, for every model, to the first two.
"""

import re
from typing import Any

import pytest

from tests.support.server_harness import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, Reply, Server

pytest_plugins = ["tests.support.server_harness"]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASE = {
    COMPLETIONS: {"model": MODEL, "prompt": "Sort these", "max_tokens": 4, "seed": 1},
    CHAT: {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Sort these"}],
        "max_tokens": 4,
        "seed": 1,
    },
}
ADVICE = re.compile(r"\b(send|omit|leave|remove|reduce|correct|request fewer)\b", re.IGNORECASE)


def ask(server: Server, path: str = COMPLETIONS, **options: Any) -> Reply:
    return server.post(path, BASE[path] | options)


def case(given: str, allowed: str, **options: Any) -> Any:
    """A refused request, and what its message has to hold."""
    name = ",".join(f"{key}={value!r}"[:60] for key, value in options.items())
    return pytest.param(options, given, allowed, id=name)


def xargs(given: str, allowed: str, **extra: Any) -> Any:
    return case(given, allowed, vllm_xargs=extra)


IDS = f"0 to {VOCAB_SIZE - 1}"


OURS = [
    # What each extra argument may be, tests/settings/test_request.py has.
    xargs("'diffusion_canvas_lenght'", "did you mean 'diffusion_canvas_length'?",
          diffusion_canvas_lenght=8),
    xargs("'x'", "Known: diffusion_canvas_length, ", x=[1, "a"]),
    xargs("kv_transfer_params = 'x'", "allowed: a valid dict", kv_transfer_params="x"),
    xargs("diffusion_t_max = nan", "allowed: a finite number", diffusion_t_max=float("nan")),
    xargs(f"diffusion_seed_canvas = {VOCAB_SIZE}", f"from -1 to {VOCAB_SIZE - 1}",
          diffusion_seed_canvas=[VOCAB_SIZE], diffusion_canvas_length=1),
    # Edits that the worker cannot hold, or that leave nothing to emit.
    case("bad_words comes to", "at most 1024", bad_words=["a b c d e f" * 9] * 2
         + ["z y x w v" * 300]),
    case("allowed_token_ids leaves no token", "at least one", allowed_token_ids=[1, 6],
         min_tokens=1),
    case("repetition_penalty = 1e+38", "to 10000", repetition_penalty=1e38),
    # Parameters that canvases, or this server, do not honour.
    case("thinking_token_budget", "--reasoning-parser", thinking_token_budget=3),
    xargs("thinking_token_budget", "--reasoning-parser", thinking_token_budget=3),
    case("min_tokens beside structured outputs", "Leave one of them out",
         structured_outputs={"regex": "a+"}, min_tokens=2),
    case("use_beam_search = True", "allowed: False", use_beam_search=True, stream=True),
    # Ids and lengths.
    case(str(VOCAB_SIZE), IDS, prompt=[5, VOCAB_SIZE]),
    case(str(2**40), IDS, prompt=[2**40]),
    case(str(2**70), IDS, prompt=[5, 2**70]),
    case("600 input tokens", f"{MAX_MODEL_LEN} tokens", prompt=[5] * 600),
    case("top_k = 1180591620717411303424", "-1 to 2147483647", top_k=2**70),
    case("max_tokens=513", f"max_model_len={MAX_MODEL_LEN}", max_tokens=513),
]  # fmt: skip


@pytest.mark.parametrize(("options", "given", "allowed"), OURS)
def test_refusals_say_what_was_given_what_is_allowed_and_what_to_do(
    server, options, given, allowed
):
    reply = ask(server, **options)
    assert reply.status == 400, reply.text
    assert given in reply.message
    assert allowed in reply.message
    assert ADVICE.search(reply.message), reply.message


@pytest.mark.parametrize(
    ("path", "sent", "parameter"),
    [
        (COMPLETIONS, {"prompt": ["a"] * 513}, "prompt"),
        (CHAT, {"n": 513}, "n"),
        (f"{CHAT}/batch", {"messages": [BASE[CHAT]["messages"]] * 513}, "messages"),
    ],
)
def test_what_multiplies_requests_is_bounded_by_its_name(server, path, sent, parameter):
    reply = server.post(path, BASE[CHAT] | sent)
    assert (reply.status, reply.parameter) == (400, parameter), reply.text


@pytest.mark.parametrize("kind", [None, "disabled", "adaptive"])
def test_thinking_without_a_budget_is_not_refused(server, kind):
    asked = {} if kind is None else {"thinking": {"type": kind}}
    assert server.post("/v1/messages", BASE[CHAT] | asked).status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "options", [{"vllm_xargs": {"x": 1}}, {"repetition_penalty": 1e9}, {"n": 0}]
)
def test_a_stream_is_refused_before_it_starts(server, path, options):
    """As a status, not as an event in a stream that began with 200."""
    reply = ask(server, path, stream=True, **options)
    assert reply.status == 400, reply.text
    assert reply.message == ask(server, path, **options).message


@pytest.mark.parametrize("options", [{"vllm_xargs": {"x": 1}}, {"logit_bias": {"999999": 1}}])
def test_a_streamed_response_is_refused_before_it_starts(server, options):
    """Though vLLM's stream has events before it asks the engine."""
    body = {"model": BASE[CHAT]["model"], "input": "Hi.", "max_output_tokens": 4} | options
    whole, streamed = (
        server.post("/v1/responses", body | {"stream": streams}) for streams in (False, True)
    )
    assert whole.status == streamed.status == 400
    assert whole.message == streamed.message


@pytest.mark.parametrize("prompt", [[VOCAB_SIZE], [[]]], ids=["foreign ids", "no ids"])
def test_a_stream_of_such_a_prompt_is_refused_before_it_starts(server, prompt):
    reply = ask(server, stream=True, prompt=prompt)
    assert reply.status == 400 and '"prompt"' in reply.text, reply.text


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b'"a"', b"\xff\xfe", b"{" * 100_000, b'{"prompt":[[['],
    ids=repr,
)  # fmt: skip
def test_what_is_no_request_is_refused(server, body):
    assert server.post(COMPLETIONS, body).status == 400


@pytest.mark.parametrize("content_type", ["", "text/plain", "multipart/form-data"])
def test_what_is_not_called_json_is_refused(server, content_type):
    reply = server.post(COMPLETIONS, BASE[COMPLETIONS], content_type)
    assert reply.status == 400 and "application/json" in reply.message

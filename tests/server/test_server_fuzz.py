"""Generated bodies: none gets HTTP 5xx from us, leaves a traceback, or changes another's tokens."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.server_harness import CANVAS, MODEL, VOCAB_SIZE, Server

pytest_plugins = ["tests.support.server_harness"]

# Bodies, and how many of them are sent at once, with good requests beside them.
SHORT, LONG = (150, 5), (2000, 10)
JSON = "application/json"

texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["Sort these", "a", " ", "\0", "\ud800", "<|turn>", "{}", "9" * 40, "ab " * 99]
    ),
)
numbers = st.one_of(
    st.integers(-2, CANVAS + 2),
    st.sampled_from([2**31, 2**63, 2**64, 10**30, -(10**30)]),
    st.floats(),
)
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
tokens = st.one_of(st.integers(0, VOCAB_SIZE - 1), st.integers(0, VOCAB_SIZE - 1), numbers)
ids = st.lists(tokens, max_size=6)
places = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 40), numbers), max_size=6)


def often(right: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What is right, or now and then anything."""
    return st.one_of(right, right, right, right, junk)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the fields, each of them often right."""
    return st.fixed_dictionaries({}, optional={name: often(of) for name, of in fields.items()})


schemas = st.recursive(
    st.one_of(
        some(type=st.sampled_from(["string", "integer", "number", "boolean", "null"])),
        some(enum=st.lists(junk, max_size=4)),
        some(type=st.just("string"), pattern=st.sampled_from(["^a+$", "[0-9]{2,4}", "(", "\\d|x"])),
        some(type=st.just("integer"), minimum=numbers, maximum=numbers),
    ),
    lambda inner: st.one_of(
        some(
            type=st.just("object"),
            properties=st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            required=st.lists(st.sampled_from("abcd"), max_size=3),
            additionalProperties=st.one_of(st.booleans(), inner),
        ),
        some(type=st.just("array"), items=inner, minItems=st.integers(0, 3), maxItems=numbers),
        some(anyOf=st.lists(inner, max_size=3)),
        some(**{"$defs": st.just({"a": {"type": "null"}}), "$ref": st.just("#/$defs/a")}),
    ),
    max_leaves=5,
)
forms = st.one_of(
    st.just({"type": "json_object"}),
    st.just({"type": "text"}),
    st.builds(
        lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        often(schemas),
    ),
)
structured = st.one_of(
    some(json=schemas),
    some(regex=st.sampled_from(["a+", "(a|b){3}", "[", "\\w{1,9}", ""])),
    some(choice=st.lists(texts, max_size=4)),
    some(grammar=st.sampled_from(['root ::= "a" root | "b"', "start: /a+/", "root ::= x", ""])),
)
functions = st.builds(
    lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
    often(st.sampled_from(["f", "g", "get-x"])),
    often(schemas),
)
xargs = some(
    diffusion_canvas_length=st.integers(1, CANVAS),
    diffusion_max_steps=st.integers(1, 20),
    diffusion_t_min=st.floats(0.1, 0.5),
    diffusion_t_max=st.floats(0.5, 1),
    diffusion_entropy_bound=st.floats(0.01, 2),
    diffusion_confidence=st.floats(0, 2),
    diffusion_seed_canvas=st.lists(st.integers(-1, VOCAB_SIZE - 1), min_size=4, max_size=4),
    diffusion_pinned=st.lists(st.integers(0, 3), max_size=3),
    diffusion_pin_at=places,
    diffusion_pin_ids=ids,
    diffusion_pin_mode=st.sampled_from(["hint", "hold"]),
    diffusion_read_only=st.booleans(),
    diffusion_constrained=st.booleans(),
    diffusion_eos_stop=st.booleans(),
    diffusion_stream=st.sampled_from(["canvas", "text"]),
    diffusion_stream_every=st.sampled_from(["pass", "visit"]),
    diffusion_trace=st.one_of(
        st.booleans(), st.lists(st.sampled_from(["entropy", "behind_stop"]), max_size=2)
    ),
    diffusion_fill_widths=st.tuples(st.integers(0, 5), st.integers(3, 9)),
    diffusion_fill_end=tokens,
)
pins = st.lists(
    st.one_of(
        some(at=st.integers(0, 40), text=texts),
        st.builds(lambda at, ids: {"at": at, "ids": ids}, st.integers(0, 40), ids),
    ),
    max_size=4,
)
SAMPLING = {
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(-1, 20),
    "min_p": st.floats(0, 1),
    "seed": st.integers(0, 9),
    "stop": st.lists(texts, max_size=3),
    "stop_token_ids": ids,
    "bad_words": st.lists(texts, max_size=3),
    "logit_bias": st.dictionaries(tokens.map(str), st.floats(-100, 100), max_size=3),
    "allowed_token_ids": ids,
    "logprob_token_ids": ids,
    "min_tokens": st.integers(0, 6),
    "ignore_eos": st.booleans(),
    "stream": st.booleans(),
    "diffusing": st.booleans(),
    "prompt_logprobs": st.integers(0, 3),
    "repetition_penalty": st.floats(0.5, 2),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "priority": st.integers(-1, 1),
    "skip_special_tokens": st.booleans(),
    "vllm_xargs": xargs,
    "structured_outputs": structured,
    "response_format": forms,
    "diffusion_pins": pins,
}
roles = st.sampled_from(["user", "user", "assistant", "system", "tool"])
contents = st.one_of(
    texts, st.lists(st.builds(lambda t: {"type": "text", "text": t}, often(texts)), max_size=3)
)
messages = st.lists(
    often(st.builds(lambda role, content: {"role": role, "content": content}, roles, contents)),
    max_size=3,
)
choices = st.one_of(
    st.sampled_from(["auto", "none", "required"]),
    st.builds(lambda f: {"type": "function", "function": {"name": f}}, st.sampled_from("fgh")),
)
lengths = st.integers(1, 2 * CANVAS)
bodies = st.one_of(
    st.tuples(
        st.just("/v1/completions"),
        some(
            prompt=st.one_of(texts, ids, st.lists(texts, max_size=3)),
            max_tokens=lengths,
            suffix=texts,
            echo=st.booleans(),
            logprobs=st.integers(0, 5),
            **SAMPLING,
        ),
    ),
    st.tuples(
        st.just("/v1/chat/completions"),
        some(
            messages=messages,
            max_tokens=lengths,
            logprobs=st.booleans(),
            top_logprobs=st.integers(0, 5),
            tools=st.lists(functions, max_size=3),
            tool_choice=choices,
            include_reasoning=st.booleans(),
            chat_template_kwargs=st.dictionaries(st.text(max_size=3), junk, max_size=2),
            **SAMPLING,
        ),
    ),
    st.tuples(
        st.just("/v1/responses"),
        some(
            input=st.one_of(texts, messages),
            max_output_tokens=lengths,
            temperature=st.floats(0, 2),
            stream=st.booleans(),
            instructions=texts,
            text=st.builds(lambda form: {"format": form}, forms),
            tools=st.lists(
                functions.map(lambda f: {"type": "function", **f["function"]}), max_size=2
            ),
            tool_choice=choices,
            metadata=st.dictionaries(st.text(max_size=3), texts, max_size=2),
            vllm_xargs=xargs,
            diffusion_pins=pins,
        ),
    ),
    st.tuples(st.just("/v1/messages"), some(messages=messages, max_tokens=lengths, system=texts)),
    st.tuples(st.just("/tokenize"), some(prompt=texts, add_special_tokens=st.booleans())),
    st.tuples(st.just("/detokenize"), some(tokens=ids)),
)
# Most bodies are whole but for what was generated.
CHAT = [{"role": "user", "content": "Sort these"}]
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "Sort these", "max_tokens": 8},
    "/v1/chat/completions": {"model": MODEL, "messages": CHAT, "max_tokens": 8},
    "/v1/responses": {
        "model": MODEL, "input": "Sort these", "max_output_tokens": 8, "store": False,
    },
    "/v1/messages": {"model": MODEL, "messages": CHAT, "max_tokens": 8},
    "/tokenize": {"model": MODEL, "prompt": "Sort these"},
    "/detokenize": {"model": MODEL, "tokens": [5, 6]},
}  # fmt: skip
GOOD = [
    {"model": MODEL, "prompt": [20 + (7 * i + i * i // 5) % 450 for i in range(length)]}
    | {"seed": length, "max_tokens": 2 * CANVAS, "ignore_eos": True, "return_token_ids": True}
    for length in (3, 40, 150, 300)
]


class Sent(NamedTuple):
    """What goes over the wire."""

    path: str
    body: bytes
    content_type: str


@st.composite
def requests(draw: st.DrawFn) -> Sent:
    """Now and then with an end or a byte lost on the way, or called something else than JSON."""
    path, body = draw(bodies)
    data = json.dumps(WHOLE[path] | body).encode()
    damage = draw(st.sampled_from(["none"] * 8 + ["end", "byte"]))
    place = draw(st.integers(0, len(data) - 1))
    if damage == "end":
        data = data[:place]
    if damage == "byte":
        data = data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
    return Sent(path, data, draw(st.sampled_from([JSON] * 18 + ["text/plain", "junk"])))


def fuzz(server: Server, num_bodies: int, at_once: int, derandomize: bool) -> None:
    def good_tokens(body: dict[str, Any]) -> Any:
        return server.ask("/v1/completions", body)["choices"][0]["token_ids"]

    alone = [good_tokens(body) for body in GOOD]
    log_before = server.log.stat().st_size
    statuses: list[int] = []

    @settings(
        max_examples=num_bodies // at_once,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(requests(), min_size=at_once, max_size=at_once))
    def nobody_is_disturbed(batch: list[Sent]) -> None:
        log_size = server.log.stat().st_size
        with ThreadPoolExecutor(at_once + len(GOOD)) as pool:
            behind = [pool.submit(server.post, *one) for one in batch]
            assert list(pool.map(good_tokens, GOOD)) == alone
            replies = [reply.result() for reply in behind]
        statuses.extend(reply.status for reply in replies)
        broken = [
            (one, reply)
            for one, reply in zip(batch, replies, strict=True)
            if (reply.status >= 500 or '"code":5' in reply.text) and not is_of_vllm(one.body)
        ]
        assert not broken
        with server.log.open("rb") as log:
            log.seek(log_size)
            # vLLM logs whatever /v1/messages refuses with its traceback.
            traces = [
                line for line in log if b"Traceback" in line and b" [api_router.py:" not in line
            ]
        assert not traces or any(is_of_vllm(one.body) for one in batch)

    try:
        nobody_is_disturbed()
    finally:
        answered = sum(status == 200 for status in statuses)
        print(f"{len(statuses)} bodies, {answered} answered; log: {log_before}")
    assert 0.05 < answered / len(statuses) < 0.95
    assert server.is_healthy()


def is_of_vllm(data: bytes) -> bool:
    """Whether vLLM answers this with 500 whatever model it serves.

    ``structured_outputs`` that is no object, and half a UTF-16 pair where vLLM sends text on.
    """
    try:
        outputs = json.loads(data).get("structured_outputs")
    except ValueError:
        return False
    return (outputs is not None and not isinstance(outputs, dict)) or b"\\ud" in data


def test_generated_bodies_disturb_nobody(server):
    fuzz(server, *SHORT, derandomize=True)


def test_many_generated_bodies_disturb_nobody(server):
    fuzz(server, *LONG, derandomize=False)

"""Kinds of requests of the soak campaign: good ones, whose answers are compared, and hostile ones.

A good request has a seed, so that the same request alone must get the same tokens. A hostile one
may get anything but a status of 500 and above; ``tests/server/test_server_fuzz.py`` sends generated
ones. New weights are among the hostile ones; they are those that the server has.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, NamedTuple

import aiohttp

from bench.context import ROOT
from bench.servers import SERVE_FLAGS
from bench.toys.suite import FAMILIES, question

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DECISIONS = "/v1/decisions"
ADAPTER = "signed"  # as which the server knows it
MAX_TOKENS = 64
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": NUMBERS, "strict": True}},
    {"type": "function", "function": {"name": "find", "parameters": PERSON}},
]
Body = dict[str, Any]


class Request(NamedTuple):
    """A request of a kind; ``body`` without the model's name, unless it asks for an adapter."""

    kind: str
    path: str
    body: Body


class Answer(NamedTuple):
    status: int  # of HTTP; 0 if the connection broke, or an event of the stream was an error
    # Text, token ids and finish reason of each choice; of streams without the events.
    choices: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    problem: str = ""

    @property
    def is_good(self) -> bool:
        return self.status == 200 and bool(self.choices) and not self.problem


def _prompt(dice: Random) -> str:
    return question(dice.choice(list(FAMILIES)), "heldout", dice.randrange(100_000)).prompt


def _completion(dice: Random, **options: Any) -> tuple[str, Body]:
    return COMPLETIONS, {"prompt": _prompt(dice), "max_tokens": MAX_TOKENS} | options


def _chat(dice: Random, **options: Any) -> tuple[str, Body]:
    messages = [{"role": "user", "content": _prompt(dice)}]
    return CHAT, {"messages": messages, "max_tokens": MAX_TOKENS} | options


def _some(dice: Random, every: Body, count: int) -> Body:
    return {name: every[name] for name in dice.sample(sorted(every), count)}


def _sampled(dice: Random, **more: Any) -> tuple[str, Body]:
    """A few parameters at a time, of every one that there is for all models, and ``more``."""
    every: Body = {
        "temperature": dice.choice([0, 0.5, 1.5]),
        **{"top_k": dice.randrange(2, 50), "top_p": dice.uniform(0.5, 1), "min_p": 0.1},
        **{"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
        "logit_bias": {str(dice.randrange(20, 500)): dice.uniform(-5, 5)},
        **{"bad_words": ["the", "a b"], "stop": ["zz"], "ignore_eos": True, "min_tokens": 20},
        "logprobs": dice.randrange(4),
        "stop_token_ids": [dice.randrange(20, 500)],
        "allowed_token_ids": sorted(dice.sample(range(20, 500), 200)),
        **more,
    }
    return _completion(dice, **_some(dice, every, 3))


def _noisy(dice: Random) -> tuple[str, Body]:
    every: Body = {
        **{"diffusion_canvas_length": dice.randrange(4, 33), "diffusion_max_steps": 5},
        **{"diffusion_t_max": dice.uniform(0.9, 1.5), "diffusion_t_min": dice.uniform(0.05, 0.2)},
        **{"diffusion_entropy_bound": dice.uniform(0.05, 2), "diffusion_confidence": 0.2},
        "diffusion_eos_stop": dice.choice([0, 1]),
    }
    return _completion(dice, vllm_xargs=_some(dice, every, 2))


def _masked(dice: Random) -> tuple[str, Body]:
    every: Body = {
        **{"diffusion_max_steps": dice.randrange(1, 33), "diffusion_threshold": dice.random()},
        "diffusion_strategy": dice.choice(["leftmost", "low_confidence_dynamic"]),
    }
    return _completion(dice, vllm_xargs=_some(dice, every, 2))


def _structured(dice: Random) -> tuple[str, Body]:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    forms: list[Body] = [
        {"response_format": schema},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}},
        {"structured_outputs": {"choice": ["yes", "no", f"{dice.randrange(50)} times"]}},
    ]
    return _chat(dice, **dice.choice(forms))


def _called(dice: Random) -> tuple[str, Body]:
    choice = dice.choice(["auto", "required", {"type": "function", "function": {"name": "add"}}])
    return _chat(dice, tools=TOOLS, tool_choice=choice)


def _thought(dice: Random) -> tuple[str, Body]:
    """Half of them with a budget, some of them with a tool or a schema behind the thought."""
    budget: Body = dice.choice([{}, {"thinking_token_budget": dice.randrange(20)}])
    more: Body = dice.choice([{}, {"tools": TOOLS}, {"response_format": {"type": "json_object"}}])
    return _chat(dice, chat_template_kwargs={"enable_thinking": True}, **budget, **more)


def _streamed(dice: Random) -> tuple[str, Body]:
    extra: Body = dice.choice([{}, {"vllm_xargs": {"diffusion_stream": "canvas"}}])
    return dice.choice([_chat, _completion])(dice, stream=True, **extra)


def _infilled(dice: Random) -> tuple[str, Body]:
    before, after = _prompt(dice).split(" ", 1)
    return COMPLETIONS, {"prompt": before, "suffix": " " + after[:20], "max_tokens": 8}


def _pinned(dice: Random) -> tuple[str, Body]:
    pins = [{"at": dice.randrange(4, 40), "text": dice.choice(["Tom", "map", "7"])}]
    return _chat(dice, diffusion_pins=pins, vllm_xargs={"diffusion_pin_mode": "hold"})


def _long(dice: Random) -> tuple[str, Body]:
    ids = [dice.randrange(20, 500) for _ in range(dice.randrange(400, 800))]
    return COMPLETIONS, {"prompt": ids, "max_tokens": 32, "ignore_eos": True}


def _quoted(dice: Random) -> tuple[str, Body]:
    """A text that repeats itself, from which drafts are looked up."""
    text = f"{_prompt(dice)} "
    return COMPLETIONS, {"prompt": text * dice.randrange(2, 6), "max_tokens": MAX_TOKENS}


def _conversed(dice: Random) -> tuple[str, Body]:
    """One of a few conversations, up to one of its turns: prompts begin alike."""
    told, messages = Random(dice.randrange(20)), []
    for _ in range(dice.randrange(1, 5)):
        one = question(told.choice(list(FAMILIES)), "heldout", told.randrange(100_000))
        messages += [{"role": "user", "content": one.prompt}]
        messages += [{"role": "assistant", "content": one.answer}]
    return CHAT, {"messages": messages[:-1], "max_tokens": 32}


def _decision(dice: Random) -> tuple[str, Body]:
    levels = [{"label": f"{number}0 to {number}9"} for number in range(dice.randrange(2, 9))]
    values = [{"value": word} for word in ("yes", "no", "neither")]
    questions: list[Body] = [
        {"type": "predicate", "instructions": _prompt(dice)},
        {"type": "choice", "instructions": _prompt(dice), "choices": values},
        {"type": "score", "instructions": _prompt(dice), "levels": levels},
    ]
    return DECISIONS, {"input": _prompt(dice), "questions": dice.sample(questions, 2)}


Kinds = dict[str, Callable[[Random], tuple[str, Body]]]
GOOD: Kinds = {
    "question": _chat,
    "conversation": _conversed,
    "several at once (n)": lambda dice: _completion(dice, n=dice.randrange(2, 5), temperature=0.7),
    "sampling parameters": _sampled,
    "structured output": _structured,
    "stream": _streamed,
    "infilling": _infilled,
    "pins": _pinned,
    "long prompt": _long,
    "decision": _decision,
}
NOISE: Kinds = GOOD | {  # of DiffusionGemma
    "sampling parameters": lambda dice: _sampled(dice, prompt_logprobs=0),
    "denoising parameters": _noisy,
}
MASKS: Kinds = GOOD | {"denoising parameters": _masked}
ADAPTED: Kinds = MASKS | {"adapter": lambda dice: _chat(dice, model=ADAPTER)}
DECIDING: Kinds = {
    name: GOOD[name] for name in ("decision", "question", "conversation", "sampling parameters")
}
TALKING: Kinds = NOISE | {"tool call": _called, "thought": _thought}
OF_CANVASES = ("infilling", "pins", "decision")
LEFT_TO_RIGHT: Kinds = {name: kind for name, kind in GOOD.items() if name not in OF_CANVASES} | {
    "stream": lambda dice: _chat(dice, stream=True),
    "quotation": _quoted,
}

# Few places, so that a burst is over the capacity.
FLAGS = (*SERVE_FLAGS, "--max-num-seqs", "16", "--enable-prefix-caching", "--no-log-error-stack")
SIGNED = ("--enable-lora", "--lora-modules", f"{ADAPTER}={ROOT / 'checkpoints/tiny-sdar-signed'}")
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "gemma4")
# In fp32, where answers do not depend on which drafts there were: in bf16 a step that verifies
# drafts rounds otherwise than plain decoding.
EXACT = (*FLAGS, "--dtype", "float32")
DRAFTER = {
    "method": "dflash",
    "model": str(ROOT / "checkpoints/tiny-drafter"),
    "num_speculative_tokens": 7,
}
ADAPTIVE = '{"dllm": {"drafter": {"policy": "adaptive", "prompt_lookup": true}}}'
ITSELF = '{"dllm": {"decoding": "self_speculation", "drafter": {"policy": "adaptive"}}}'
# Checkpoint -> (kinds of good requests, flags of the server).
MODELS: dict[str, tuple[Kinds, tuple[str, ...]]] = {
    "tiny-dllm": (NOISE, FLAGS),
    "tiny-sdar": (ADAPTED, (*FLAGS, *SIGNED)),
    "tiny-llada2": (MASKS, FLAGS),
    "tiny-decisions": (DECIDING, FLAGS),
    "tiny-tools": (TALKING, (*FLAGS, *PARSERS, "--reasoning-parser", "gemma4")),
    "tiny-ar": (
        LEFT_TO_RIGHT,
        (*EXACT, "--speculative-config", json.dumps(DRAFTER), "--additional-config", ADAPTIVE),
    ),
    "tiny-nemotron": (LEFT_TO_RIGHT, (*EXACT, "--additional-config", ITSELF)),
}


def good(dice: Random, kinds: Kinds) -> Request:
    kind = dice.choice(list(kinds))
    path, body = kinds[kind](dice)
    if path == DECISIONS:
        return Request(kind, path, body)
    if body.get("logprobs") is None and "suffix" not in body:
        body["return_token_ids"] = True
    return Request(kind, path, body | {"seed": dice.randrange(2**31)})


async def ask(session: aiohttp.ClientSession, model: str, request: Request) -> Answer:
    try:
        async with session.post(request.path, json={"model": model} | request.body) as reply:
            if reply.status != 200:
                return Answer(reply.status, problem=(await reply.text())[:300])
            if not request.body.get("stream"):
                return joined([await reply.json()])
            lines = [line[6:] async for line in reply.content if line.startswith(b"data: {")]
            return joined([json.loads(line) for line in lines])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        return Answer(0, problem=f"{type(error).__name__}: {error}"[:300])


def joined(events: list[Body]) -> Answer:
    """The answer that a stream spells; a body without a stream is one event.

    Typed answers are read as if they were texts.
    """
    choices: dict[int, tuple[str, tuple[int, ...], str]] = {}
    for event in events:
        if "error" in event:
            return Answer(0, problem=str(event["error"])[:300])
        if "answers" in event:
            return Answer(200, tuple((json.dumps(one), (), "") for one in event["answers"]))
        for one in event["choices"]:
            text, ids, end = choices.get(one["index"], ("", (), ""))
            ids += tuple(one.get("token_ids") or ())
            choices[one["index"]] = text + _said(one), ids, one["finish_reason"] or end
    problem = ""
    if not choices or not all(end for *_, end in choices.values()):
        problem = "the stream ended without a finish reason"
    elif any({*ids} == {0} for _, ids, _ in choices.values()):  # the most likely of NaN
        problem = "an answer of token 0 alone"
    return Answer(200, tuple(choices.values()), problem)


def _said(choice: Body) -> str:
    """The text of a choice; of a message its thought, answer and calls, which have random ids."""
    if "text" in choice:
        return choice["text"] or ""
    message = choice.get("message") or choice["delta"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said = (message.get("reasoning") or "") + (message.get("content") or "")
    return said + (json.dumps(calls) if calls else "")


# Statuses that came back; none for what did not wait.
Hostile = Callable[[aiohttp.ClientSession, str, Random], Awaitable[list[int]]]

REFUSED: tuple[Body, ...] = (
    *({"max_tokens": 0}, {"temperature": -1}, {"prompt": [5] * 5000}, {"prompt": [10**9]}),
    *({"use_beam_search": True, "n": 4}, {"logit_bias": {"99999": 1}}),
    {"vllm_xargs": {"diffusion_canvas_length": 10**6}},
    {"structured_outputs": {"regex": "((a{1,99}){1,99}){1,99}"}},
    {"structured_outputs": {"regex": "(a|aa|aaa|aaaa)*" * 50 + "b" * 999}},
    {"structured_outputs": {"json": {"type": "object", "if": {}, "not": {}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
)


async def _status(session: aiohttp.ClientSession, path: str, body: Body) -> int:
    async with session.post(path, json=body) as reply:
        await reply.read()
        return reply.status


def _endless(dice: Random, model: str, **options: Any) -> Body:
    return {"model": model, "prompt": _prompt(dice), "ignore_eos": True} | options


async def refused(session: aiohttp.ClientSession, model: str, dice: Random) -> list[int]:
    """A request that asks for what no server gives, slow grammars among them."""
    body = {"model": model, "prompt": "Sort these", "max_tokens": 8} | dice.choice(REFUSED)
    return [await _status(session, COMPLETIONS, body)]


async def large(session: aiohttp.ClientSession, model: str, dice: Random) -> list[int]:
    """Bodies of 1 MB: a prompt, a schema and a chat that are refused."""
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(30_000)}}
    bodies = ({"prompt": "1 2 " * 240_000}, {"prompt": "a", "structured_outputs": {"json": wide}})
    statuses = [await _status(session, COMPLETIONS, {"model": model, **body}) for body in bodies]
    chat = {"model": model, "messages": [{"role": "user", "content": "a"}] * 28_000}
    return [*statuses, await _status(session, CHAT, chat)]


async def aborted(session: aiohttp.ClientSession, model: str, dice: Random) -> list[int]:
    """A long answer whose client hangs up at once, or in the middle of the stream."""
    body = _endless(dice, model, max_tokens=512, stream=dice.random() < 0.7)
    patience = aiohttp.ClientTimeout(dice.uniform(0.01, 0.2))
    try:
        async with session.post(COMPLETIONS, json=body, timeout=patience) as reply:
            await reply.content.readany()
            return [reply.status]
    except TimeoutError:
        return []


async def slow(session: aiohttp.ClientSession, model: str, dice: Random) -> list[int]:
    """A stream, with unfinished canvases or without, that is read a few bytes at a time, and left.

    A server that drafts has no unfinished canvases, and refuses the former.
    """
    body = _endless(dice, model, max_tokens=256, stream=True, logprobs=5)
    canvases: Body = dice.choice([{}, {"vllm_xargs": {"diffusion_stream": "canvas"}}])
    async with session.post(COMPLETIONS, json=body | canvases) as reply:
        for _ in range(10):
            await reply.content.read(64)
            await asyncio.sleep(0.2)
        reply.close()
        return [reply.status]


async def unfinished(session: aiohttp.ClientSession, model: str, dice: Random) -> list[int]:
    """A connection that sends a head, and never the body."""
    url = session._base_url
    assert url is not None
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n"
    writer.write(dice.choice([head, head + b"Content-Type: application/json\r\n\r\n{"]))
    await writer.drain()
    await asyncio.sleep(2)
    writer.close()
    return []


async def burst(session: aiohttp.ClientSession, model: str, dice: Random) -> list[int]:
    """More requests at once than the server has places, each with long answers."""
    bodies = [_endless(dice, model, max_tokens=128) for _ in range(48)]
    return list(await asyncio.gather(*(_status(session, COMPLETIONS, body) for body in bodies)))


async def new_weights(session: aiohttp.ClientSession, model: str, dice: Random) -> list[int]:
    """The weights that are served, once more, while requests are held."""
    load = {"method": "reload_weights", "kwargs": {"weights_path": model}}
    return [
        await _status(session, path, body)
        for path, body in (("/pause?mode=keep", {}), ("/collective_rpc", load), ("/resume", {}))
    ]


RUDE: dict[str, Hostile] = {
    "refused": refused,
    "bodies of 1 MB": large,
    "aborted": aborted,
    "slow reader": slow,
    "unfinished request": unfinished,
}
# These use the server's capacity, as good requests do: whoever comes later waits for them.
HEAVY: dict[str, Hostile] = {
    "burst over capacity": burst,
    "new weights": new_weights,
}

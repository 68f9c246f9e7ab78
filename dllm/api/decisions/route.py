"""``POST /v1/decisions`` in OpenAI's shape, on the strategy that ``/v1/systemone`` uses, too."""

import json
from typing import Any

import prometheus_client
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.entrypoints.generate.structured_decisions.serving import ServingStructuredDecisions
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from vllm.utils.async_utils import make_async

from dllm.api.decisions.protocol import (
    AskedQuestion,
    Choice,
    DecisionRequest,
    Predicate,
    instructions_of,
)
from dllm.api.decisions.reads import Read
from dllm.api.engine_requests import options_of
from dllm.settings.request import refuse
from dllm.settings.vllm_names import question_types, strategies

PATH = "/v1/decisions"
COUNTERS = {
    name: prometheus_client.Counter(f"dllm:decision_{name}", text, ("model_name",))
    for name, text in (
        ("questions", "Questions answered or refused by /v1/decisions."),
        ("reads", "Canvases read for them."),
        ("refusals", "Questions refused, because their labels had too little probability."),
    )
}


def attach(app: FastAPI) -> None:
    """Serve the route, in the place of vLLM's own of that name (from 0.33 on)."""
    app.router.routes[:] = [one for one in app.router.routes if getattr(one, "path", "") != PATH]

    @app.post(PATH, dependencies=[Depends(validate_json_request)])
    @with_cancellation
    @load_aware_call
    async def decide(request: DecisionRequest, raw_request: Request) -> Response:
        handler = getattr(raw_request.app.state, "serving_structured_decisions", None)
        if handler is None:
            raise NotImplementedError(why_not(raw_request.app.state))
        result = await answered(handler, request, raw_request)
        if isinstance(result, ErrorResponse):
            return JSONResponse(result.model_dump(), result.error.code)
        return Response(result, media_type="application/json")


def why_not(state: Any) -> str:
    """As a sentence for the client; ``state`` is the FastAPI application's."""
    try:
        strategies.select_read_strategy(state.engine_client.model_config, ("generate",))
    except ValueError as error:
        return str(error)
    return str(getattr(state, "why_no_decisions", "its strategy could not be made"))


async def answered(
    handler: ServingStructuredDecisions, request: DecisionRequest, raw_request: Request
) -> bytes | ErrorResponse:
    """Raises VLLMValidationError if a question cannot be asked."""
    error = await handler._check_model(request)  # type: ignore[arg-type]
    if error is not None:
        return error
    validate_cache_salt(request.cache_salt)
    if request.cache_salt and request.prompt_cache_key is not None:
        refuse(
            "cache_salt", "cache_salt beside prompt_cache_key, which does the same; leave one out."
        )
    strategy = handler.strategy
    engine = strategy.context.engine_client
    if engine.errored:
        raise engine.dead_error
    # A body of 1 MB may hold so much that each of these is done off the event loop.
    renderer = strategy.context.online_renderer.renderer
    questions, text, images = await make_async(asked_of, renderer._executor)(request)
    if images and "image" not in strategy.modalities:
        refuse("input", "input holds an image; this model takes text alone. Leave it out.")
    engine.check_admission(strategy.num_requests(questions, request.joint, request.samples))
    reads = await strategy.read(
        questions,
        None,
        text,
        request_id=f"decision-{handler._base_request_id(raw_request)}",
        chat_template_kwargs=None,
        cache_salt=request.cache_salt or request.prompt_cache_key,
        media={"image": images} if images else None,
        samples=request.samples,
        **await options_of(handler, request, raw_request),
    )
    least = strategy.options.least_mass
    return await make_async(written, renderer._executor)(request, reads, least)


def asked_of(request: DecisionRequest) -> tuple[list[question_types.Question], str, list[str]]:
    """Also the input as a text, and its images' URLs. VLLMValidationError: a misplaced part."""
    questions = [vllm_question(place, asked) for place, asked in enumerate(request.questions)]
    return questions, *request.transcript()


def vllm_question(place: int, asked: AskedQuestion) -> question_types.Question:
    """A question as vLLM's read strategies take it; ``place`` is its place in the body, its id."""
    described: list[str | None] = [None, None]
    if isinstance(asked, Predicate):
        kind, texts = "noul", ["yes", "no"]
    elif isinstance(asked, Choice):
        kind, texts = "choice", _distinct_texts([one.value for one in asked.choices])
        described = [one.description for one in asked.choices]
    else:
        kind, texts = "score", [one.label for one in asked.levels]
        described = [one.description for one in asked.levels]
    return question_types.Question(
        str(place),
        question_types.QUESTION_TYPES[kind],
        instructions_of(place, asked),
        tuple(map(question_types.Option, texts, described)),
        tuple(map(str, range(len(texts)))),
    )


def _distinct_texts(values: list[str | bool]) -> list[str]:
    """The values as texts; as JSON if true would otherwise be the same as "true"."""
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if len(set(texts)) < len(texts):
        texts = [json.dumps(value, ensure_ascii=False) for value in values]
    return texts


def written(request: DecisionRequest, reads: list[Read], least_mass: float) -> bytes:
    """The response as JSON; it is counted for ``/metrics``."""
    answers = [
        answer(asked, read)
        if read.label_mass >= least_mass
        else {"type": "refusal", "name": asked.name}
        for asked, read in zip(request.questions, reads, strict=True)
    ]
    counts = {
        "questions": len(reads),
        "reads": sum(read.samples for read in reads),
        "refusals": sum(one["type"] == "refusal" for one in answers),
    }
    for name, number in counts.items():
        COUNTERS[name].labels(request.model).inc(number)
    # Each prompt is counted once, whatever its samples, and one token of output for each question.
    tokens = sum(read.input_tokens for read in reads)
    cached = sum(read.cached_tokens for read in reads)
    content = {
        "model": request.model,
        "answers": answers,
        "usage": {
            "input_tokens": tokens,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": tokens - cached,
            },
            "output_tokens": len(reads),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens + len(reads),
        },
        # What OpenAI does not say: how far an answer can be trusted.
        "diagnostics": [
            {
                "label_mass": read.label_mass,
                "hesitation": read.hesitation,
                "samples": read.samples,
                "standard_errors": read.standard_errors,
            }
            for read in reads
        ],
    }
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()


def answer(asked: AskedQuestion, read: Read) -> dict[str, Any]:
    head = {"type": asked.type, "name": asked.name}
    if isinstance(asked, Predicate):
        return {**head, "probability": read.probs[0]}
    count, top = len(read.probs), question_types.argmax(read.probs)
    # 0 if all options tie, 1 if one has everything.
    head["confidence"] = (read.probs[top] - 1 / count) / (1 - 1 / count)
    if isinstance(asked, Choice):
        values = [one.value for one in asked.choices]
        pairs = zip(values, read.probs, strict=True)
        probabilities = [{"value": value, "probability": p} for value, p in pairs]
        return {**head, "choice": values[top], "probabilities": probabilities}
    levels = enumerate(zip(asked.levels, read.probs, strict=True))
    return {
        **head,
        "score": sum(place * p for place, p in enumerate(read.probs)),
        "probabilities": [
            {"label": level.label, "value": place, "probability": p} for place, (level, p) in levels
        ],
    }

"""``POST /v1/decisions`` in OpenAI's shape, on the strategy that ``/v1/systemone`` uses, too."""

from functools import cache
from typing import Any

import prometheus_client
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from vllm.entrypoints.generate.structured_decisions import question_types, strategies
from vllm.entrypoints.generate.structured_decisions.serving import ServingStructuredDecisions
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)

from dllm.api.decisions.protocol import (
    AskedQuestion,
    Choice,
    DecisionRequest,
    Predicate,
    instructions_text,
)
from dllm.api.decisions.reads import Read
from dllm.settings.request import refuse


def attach(app: FastAPI) -> None:
    """Serve the route."""

    @app.post("/v1/decisions", dependencies=[Depends(validate_json_request)])
    @with_cancellation
    @load_aware_call
    async def decide(request: DecisionRequest, raw_request: Request) -> JSONResponse:
        handler = getattr(raw_request.app.state, "serving_structured_decisions", None)
        if handler is None:
            raise NotImplementedError(why_not(raw_request.app.state))
        result = await answered(handler, request, raw_request)
        status = result.error.code if isinstance(result, ErrorResponse) else 200
        content = result.model_dump() if isinstance(result, ErrorResponse) else result
        return JSONResponse(content, status)


def why_not(state: Any) -> str:
    """Why this server does not answer decisions."""
    engine = state.engine_client
    try:
        strategies.select_read_strategy(engine.model_config, ("generate",))
    except ValueError as error:
        return str(error)
    return "Typed decisions need a chat template that writes a prompt for a reply."


async def answered(
    handler: ServingStructuredDecisions, request: DecisionRequest, raw_request: Request
) -> dict[str, Any] | ErrorResponse:
    """The response, as JSON.

    Raises:
        VLLMValidationError: a question cannot be asked.
    """
    error = await handler._check_model(request)  # type: ignore[arg-type]
    if error is not None:
        return error
    engine, strategy = handler.engine_client, handler.strategy
    if engine.errored:
        raise engine.dead_error
    questions = [vllm_question(place, asked) for place, asked in enumerate(request.questions)]
    text, images = request.transcript()
    if images and "image" not in strategy.modalities:
        refuse("input", "input holds an image; this model takes text alone. Leave it out.")
    engine.check_admission(strategy.num_requests(questions))
    reads = await strategy.read(
        questions,
        None,
        text,
        request_id=f"decision-{handler._base_request_id(raw_request)}",
        chat_template_kwargs=None,
        lora_request=None,
        priority=request.priority,
        cache_salt=request.prompt_cache_key,
        trace_headers=await handler._get_trace_headers(raw_request.headers),
        media={"image": images} if images else None,
        samples=request.samples,
    )
    least = strategy.options.least_mass
    answers = [
        answer(asked, read) if read.label_mass >= least else refusal(asked)
        for asked, read in zip(request.questions, reads, strict=True)
    ]
    _count(request.model, reads, answers)
    return {
        "model": request.model,
        "answers": answers,
        "usage": usage(reads),
        "diagnostics": [diagnostics(read) for read in reads],
    }


def vllm_question(place: int, asked: AskedQuestion) -> question_types.Question:
    """A question as vLLM's strategies take it.

    Raises:
        VLLMValidationError: its instructions hold an image.
    """
    text = instructions_text(asked)
    if text is None:
        refuse(
            "questions", f"questions[{place}].instructions hold an image; allowed: in the input."
        )
    if isinstance(asked, Predicate):
        kind, options = "noul", [question_types.Option("yes"), question_types.Option("no")]
    elif isinstance(asked, Choice):
        # true and "true" have the same text: JSON's quotes tell them apart where both are given.
        values = [one.value for one in asked.choices]
        kind, options = (
            "choice",
            [
                question_types.Option(_shown(one.value, values), one.description)
                for one in asked.choices
            ],
        )
    else:
        kind = "score"
        options = [question_types.Option(one.label, one.description) for one in asked.levels]
    labels = tuple(map(str, range(len(options))))
    return question_types.Question(
        str(place), question_types.QUESTION_TYPES[kind], text, tuple(options), labels
    )


def _shown(value: str | bool, values: list[str | bool]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    is_ambiguous = (value == "true" and True in values) or (value == "false" and False in values)
    return f'"{value}"' if is_ambiguous else value


def answer(asked: AskedQuestion, read: Read) -> dict[str, Any]:
    """An answer in OpenAI's shape."""
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


def refusal(asked: AskedQuestion) -> dict[str, Any]:
    """The answer to a question whose labels have too little probability."""
    return {"type": "refusal", "name": asked.name}


def usage(reads: list[Read]) -> dict[str, Any]:
    """Tokens of the prompts, each counted once, and one of output for each question."""
    tokens = sum(read.input_tokens for read in reads)
    cached = sum(read.cached_tokens for read in reads)
    return {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": tokens - cached},
        "output_tokens": len(reads),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens + len(reads),
    }


def diagnostics(read: Read) -> dict[str, Any]:
    """What OpenAI does not say: how far an answer can be trusted."""
    return {
        "label_mass": read.label_mass,
        "hesitation": read.hesitation,
        "samples": read.samples,
        "standard_errors": list(read.standard_errors),
    }


@cache
def _counters() -> dict[str, prometheus_client.Counter]:
    """Made once in a process: Prometheus registers a name only once."""
    texts = {
        "questions": "Questions answered or refused by /v1/decisions.",
        "reads": "Canvases read for them.",
        "refusals": "Questions refused, because their labels had too little probability.",
    }
    return {
        name: prometheus_client.Counter(f"dllm:decision_{name}", text, ("model_name",))
        for name, text in texts.items()
    }


def _count(model: str, reads: list[Read], answers: list[dict[str, Any]]) -> None:
    counts = {
        "questions": len(reads),
        "reads": sum(read.samples for read in reads),
        "refusals": sum(one["type"] == "refusal" for one in answers),
    }
    for name, number in counts.items():
        _counters()[name].labels(model).inc(number)

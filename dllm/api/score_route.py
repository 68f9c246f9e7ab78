"""The route of ``api.scores``, on the engine client and the tokenizer of vLLM's completions."""

from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from vllm.inputs import tokens_input
from vllm.utils.async_utils import make_async

from dllm.api import scores
from dllm.api.fill import at_once, finished
from dllm.api.scores import ScoreRequest
from dllm.settings.denoising import DenoiseSettings
from dllm.settings.request import refuse


def attach(app: FastAPI, settings: DenoiseSettings) -> None:
    """Serve the route.

    Args:
        settings: of the served model.
    """

    @app.post("/v1/scores", dependencies=[Depends(validate_json_request)])
    @with_cancellation
    @load_aware_call
    async def score(request: ScoreRequest, raw_request: Request) -> Response:
        serving = raw_request.app.state.openai_serving_completion
        result = await serving._check_model(request)
        if result is None:
            result = await scored(serving, request, raw_request, settings)
        status = result.error.code if isinstance(result, ErrorResponse) else 200
        content = result.model_dump() if isinstance(result, ErrorResponse) else result
        return JSONResponse(content, status)


async def scored(
    serving: Any, request: ScoreRequest, raw_request: Request, settings: DenoiseSettings
) -> dict[str, Any]:
    """The answer.

    Raises:
        VLLMValidationError: this text cannot be scored here.
    """
    engine = serving.engine_client
    if engine.errored:
        raise engine.dead_error
    config = engine.vllm_config.model_config
    if config.logprobs_mode in ("raw_logits", "processed_logits"):
        refuse("model", "/v1/scores needs log-probabilities, and --logprobs-mode is of logits.")
    prompt, text = await _ids(serving, request)
    scores.check(prompt, text, settings, config.max_model_len)
    for name, ids in (("prompt", prompt), ("text", text)):
        serving.renderer.validate_token_ids(ids, parameter=name)
    blocks = list(scores.blocks(len(prompt), len(text), settings))
    if request.places is not None:
        reads = scores.chosen(text, blocks, request.places)
    else:
        reads = scores.drawn(text, blocks, request.samples, request.seed)
    engine.check_admission(len(reads))
    base = f"score-{serving._base_request_id(raw_request)}"
    options = {
        "lora_request": serving._maybe_get_adapters(request),
        "trace_headers": await serving._get_trace_headers(raw_request.headers),
        "priority": request.priority,
    }
    outputs = await at_once(
        finished(
            engine.generate(
                tokens_input([*prompt, *text[: read.start]], cache_salt=request.cache_salt),
                read.params(settings),
                f"{base}-{place}",
                **options,
            )
        )
        for place, read in enumerate(reads)
    )
    found = [read.logprobs(output) for read, output in zip(reads, outputs, strict=True)]
    answer = {"model": request.model or serving.models.model_name(), "passes": len(reads)}
    answer |= {"prompt_tokens": len(prompt), "text_tokens": len(text)}
    if request.places is not None:
        return answer | {"token_logprobs": scores.token_logprobs(text, reads, found)}
    mean, error = scores.estimate(reads, found, request.samples)
    return answer | {"elbo": mean, "standard_error": error, "samples": request.samples}


async def _ids(serving: Any, request: ScoreRequest) -> tuple[list[int], list[int]]:
    """Prompt and text as token ids; special tokens are added to the prompt alone."""
    renderer = serving.renderer
    encode = make_async(renderer.get_tokenizer().encode, renderer._executor)
    prompt, text = request.prompt, request.text
    return (
        prompt if isinstance(prompt, list) else list(await encode(prompt)),
        text if isinstance(text, list) else list(await encode(text, add_special_tokens=False)),
    )

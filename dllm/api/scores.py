"""``POST /v1/scores``: how likely a model with masks finds a given text behind a prompt.

places  log-probabilities of the tokens at some places: these are masks, all others are given, and
        each block takes one pass
else    an estimate of the evidence lower bound (ELBO) of log p(text | prompt), and its standard
        error. Of each block it draws how many tokens are masks, evenly, and then which; the sum of
        their log-probabilities times (tokens / masks) is an unbiased estimate of the bound of
        arXiv 2502.09992, for a block behind all blocks in front of it

A block is read as a typed decision is: by a request of one denoise step, whose given tokens are
pins, and whose logprobs of the text's tokens are at temperature 1. Tokens in front of the block are
its prompt, so that the prefix cache serves all reads of a text. What is behind the text in its last
block is masks.
"""

import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from vllm.utils.async_utils import make_async

from dllm.api.engine_requests import at_once, options_of, read_params, reader
from dllm.api.http_request import BODY
from dllm.settings.admission import admit_prompt
from dllm.settings.denoising import DenoiseSettings, unread_canvases
from dllm.settings.pins import PIN_AT, PIN_IDS
from dllm.settings.request import LOGITS_MODES, refuse, refuse_value

MAX_READS = 1600  # of one HTTP request, as of typed decisions
Ids = list[Annotated[int, Field(ge=0)]]


class ScoreRequest(BaseModel):
    """The body of a request.

    Attributes:
        prompt, text: texts, or token ids. A text is not a chat: no template is applied.
        places: of the text, from 0, whose tokens are scored in one pass for each block.
        samples: how many for the estimate; its standard error needs two.
        seed: of the masks that are drawn. The same request has the same answer.
    """

    model_config = BODY

    model: str | None = None
    prompt: str | Ids
    text: str | Ids
    places: Ids | None = None
    samples: int = Field(8, ge=1, le=MAX_READS)
    seed: int = 0
    priority: int = Field(0, ge=-(2**63), le=2**63 - 1)
    cache_salt: str | None = Field(None, max_length=128)


class BlockRead(NamedTuple):
    """One pass over a block."""

    start: int  # where the block starts in the text
    tokens: Sequence[int]  # of the text in the block
    masked: Sequence[int]  # the indices of those that are masks

    def params(self, settings: DenoiseSettings) -> SamplingParams:
        """A request for one denoise step, in which all tokens but the masked ones are pinned."""
        given = [at for at in range(len(self.tokens)) if at not in set(self.masked)]
        extra: dict[str, Any] = dict(settings.one_step)
        if given:
            extra |= {PIN_AT: given, PIN_IDS: [self.tokens[at] for at in given]}
        return read_params(len(self.tokens), [self.tokens[at] for at in self.masked], extra)

    def logprobs(self, output: RequestOutput) -> list[float]:
        """The log-probabilities of the masked tokens, in order."""
        found = output.outputs[0].logprobs
        assert found is not None, "they are asked for"
        return [found[at][self.tokens[at]].logprob for at in self.masked]


def attach(app: FastAPI, settings: DenoiseSettings) -> None:
    """Add the route ``/v1/scores`` to vLLM's application."""

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
    """Raises VLLMValidationError if the text cannot be scored here."""
    engine = serving.engine_client
    if engine.errored:
        raise engine.dead_error
    validate_cache_salt(request.cache_salt)
    config = engine.vllm_config.model_config
    if config.logprobs_mode in LOGITS_MODES:
        refuse("model", "/v1/scores needs log-probabilities, and --logprobs-mode is of logits.")
    prompt, text = await _ids(serving, request)
    check(prompt, text, settings, config.max_model_len)
    for name, ids in (("prompt", prompt), ("text", text)):
        admit_prompt(ids, config.get_vocab_size(), name)
    of_blocks = list(blocks(len(prompt), len(text), settings))
    if request.places is not None:
        reads = chosen(text, of_blocks, request.places)
    else:
        reads = drawn(text, of_blocks, request.samples, request.seed)
    engine.check_admission(len(reads))
    base = f"score-{serving._base_request_id(raw_request)}"
    read_canvas = reader(engine, await options_of(serving, request, raw_request))

    def asked(read: BlockRead, name: str) -> Any:
        context = tokens_input([*prompt, *text[: read.start]], cache_salt=request.cache_salt)
        return read_canvas(context, read.params(settings), name)

    outputs = await at_once(asked(read, f"{base}-{place}") for place, read in enumerate(reads))
    found = [read.logprobs(output) for read, output in zip(reads, outputs, strict=True)]
    answer = {"model": request.model or serving.models.model_name(), "passes": len(reads)}
    answer |= {"prompt_tokens": len(prompt), "text_tokens": len(text)}
    if request.places is not None:
        return answer | {"token_logprobs": token_logprobs(text, reads, found)}
    mean, error = estimate(reads, found, request.samples)
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


def check(
    prompt: Sequence[int], text: Sequence[int], settings: DenoiseSettings, max_model_len: int
) -> None:
    """Raises VLLMValidationError for what cannot be scored; the client gets HTTP 400."""
    if not settings.never_emitted:
        refuse(
            "model",
            "/v1/scores is served for models with masks; this one begins with noise, which hides "
            "nothing for certain. Ask for prompt_logprobs of its causal pass.",
        )
    if (why := unread_canvases(settings)) is not None:
        refuse("model", f"/v1/scores reads canvases of masks, and {why}")
    if settings.canvas_length > MAX_LOGPROB_TOKEN_IDS:
        refuse("model", f"/v1/scores reads canvases of at most {MAX_LOGPROB_TOKEN_IDS} tokens.")
    for name, ids in (("prompt", prompt), ("text", text)):
        if not ids:
            refuse(name, f"{name} has no token; allowed: at least one. Send one.")
    if len(prompt) + len(text) > max_model_len:
        refuse(
            "text",
            f"prompt and text have {len(prompt)} + {len(text)} tokens; allowed: {max_model_len} "
            "together. Send less.",
        )
    if never := sorted({*text} & {*settings.never_emitted}):
        refuse_value("text", never[0], "tokens that can be said, which a mask cannot")


def blocks(prompt_len: int, text_len: int, settings: DenoiseSettings) -> Iterator[range]:
    """The places of a text, in the canvases that its answer would have."""
    start = 0
    while start < text_len:
        width = settings.canvas_length
        if settings.block_size > 1:
            width = settings.block_size - (prompt_len + start) % settings.block_size
        yield range(start, min(start + width, text_len))
        start += width


def chosen(text: Sequence[int], of_blocks: Iterable[range], places: Sequence[int]) -> list[Any]:
    """Raises VLLMValidationError: a place is not in the text, or comes twice; too many blocks."""
    if len({*places}) < len(places) or not places or max(places) >= len(text):
        refuse_value("places", places, f"different integers from 0 to {len(text) - 1}")
    reads, ordered = [], sorted(places)
    for block in of_blocks:
        inside = ordered[bisect_left(ordered, block.start) : bisect_left(ordered, block.stop)]
        if inside:
            masked = [place - block.start for place in inside]
            reads.append(BlockRead(block.start, text[block.start : block.stop], masked))
    if len(reads) > MAX_READS:
        refuse(
            "places",
            f"places in {len(reads)} blocks; allowed: {MAX_READS} in an HTTP request. Send "
            "several requests.",
        )
    return reads


def drawn(
    text: Sequence[int], of_blocks: Sequence[range], samples: int, seed: int
) -> list[BlockRead]:
    """Of each sample, each block once. Raises VLLMValidationError: there are too many."""
    if len(of_blocks) * samples > MAX_READS:
        refuse(
            "samples",
            f"samples = {samples} of {len(of_blocks)} blocks; allowed: {MAX_READS} reads in an "
            "HTTP request. Send fewer samples, and several requests with other seeds.",
        )
    draw = random.Random(seed)
    reads = []
    for _ in range(samples):
        for block in of_blocks:
            masked = sorted(draw.sample(range(len(block)), draw.randint(1, len(block))))
            reads.append(BlockRead(block.start, text[block.start : block.stop], masked))
    return reads


def estimate(reads: Sequence[BlockRead], scores: Sequence[list[float]], samples: int) -> Any:
    """(mean, standard error) of the samples' sums; ``scores``: log-probabilities of the masks."""
    terms = [
        len(read.tokens) / len(read.masked) * math.fsum(found)
        for read, found in zip(reads, scores, strict=True)
    ]
    of_sample = len(reads) // samples
    sums = [math.fsum(terms[at : at + of_sample]) for at in range(0, len(terms), of_sample)]
    error = None if samples == 1 else statistics.stdev(sums) / math.sqrt(samples)
    return statistics.fmean(sums), error


def token_logprobs(
    text: Sequence[int], reads: Sequence[BlockRead], scores: Sequence[list[float]]
) -> list[float | None]:
    """The log-probability of each token of a text; None where the token was given."""
    found: list[float | None] = [None] * len(text)
    for read, of_masks in zip(reads, scores, strict=True):
        for place, score in zip(read.masked, of_masks, strict=True):
            found[read.start + place] = score
    return found

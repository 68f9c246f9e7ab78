"""Routes that drop fields that they do not know refuse ours: those of a flag or a package."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.exceptions import VLLMValidationError

from dllm.models import FAMILIES
from dllm.patches import install

install.install()


class CohereLike(OpenAIServingChat):
    """Translates what the chat's method answers; Cohere's needs a package that is not here."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(architecture=next(iter(FAMILIES)))
        self.engine_client = SimpleNamespace(
            model_config=SimpleNamespace(logprobs_mode="raw_logits"),
            vllm_config=SimpleNamespace(
                scheduler_config=SimpleNamespace(max_num_seqs=1),
                parallel_config=SimpleNamespace(data_parallel_size=1),
            ),
        )


def sent(body: dict[str, Any]) -> Any:
    async def json() -> dict[str, Any]:
        return body

    return SimpleNamespace(json=json)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"diffusion_pins": [{"at": 0, "text": "x"}]}, "diffusion_pins is not served here"),
        ({"diffusing": True}, "diffusion_stream is not served here"),
        ({"vllm_xargs": {"diffusion_stream": "text"}}, "diffusion_stream is not served here"),
        (
            {"vllm_xargs": {"a": 1}, "sampling_params": {"extra_args": {"diffusion_trace": True}}},
            "diffusion_trace is not served here",
        ),
    ],
)
@pytest.mark.parametrize(
    "method",
    [
        ServingTokens.serve_tokens,
        OpenAIServingChat.create_chat_completion,
        ServingRender.render_chat_request,
        ServingRender.render_completion_request,
        ServingRender.render_messages_request,
    ],
)
def test_our_fields_are_refused(method, body, message):
    with pytest.raises(VLLMValidationError, match=message):
        asyncio.run(method(CohereLike(), SimpleNamespace(), sent(body)))


def test_pins_are_refused_where_a_response_is_only_rendered():
    asked = ResponsesRequest(input="hi", diffusion_pins=[{"at": 0, "text": "x"}])
    with pytest.raises(VLLMValidationError, match="diffusion_pins is not served here"):
        asyncio.run(ServingRender.render_responses_request(CohereLike(), asked))


def test_holes_are_not_compared_by_logits():
    route = object.__new__(OpenAIServingCompletion)
    vars(route).update(vars(CohereLike()))
    asked = SimpleNamespace(suffix="b", vllm_xargs=None)
    with pytest.raises(VLLMValidationError, match="--logprobs-mode"):
        asyncio.run(OpenAIServingCompletion.create_completion(route, asked, sent({})))


@pytest.mark.parametrize("reads_encodings", [False, True])
def test_no_prompt_carries_what_nobody_reads(reads_encodings):
    route = CohereLike()
    if reads_encodings:
        route.engine_client.vllm_config.ec_transfer_config = object()
    long = {"a": [[1]] * 1000}
    asked = SimpleNamespace(kv_transfer_params=long, ec_transfer_params=long)
    with pytest.raises(VLLMValidationError):
        body = {"diffusing": True}  # refused behind it
        asyncio.run(ServingTokens.serve_tokens(route, asked, sent(body)))
    assert asked.kv_transfer_params is None
    assert asked.ec_transfer_params == (long if reads_encodings else None)

"""Bodies are read with bounds: the first wrong item ends it, and so does too long a list."""

from typing import Annotated, Any

import pytest
from fastapi import Body
from pydantic import BaseModel, TypeAdapter, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from dllm.api.decisions.protocol import DecisionRequest
from dllm.api.early_refusal import LONGEST, LONGEST_OF_FIELD, bounded_type, bounded_validator

USER = {"role": "user", "content": "a"}
CHOICE = {"type": "choice", "instructions": "a"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def validate(kind: type, **body: Any) -> Any:
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[kind, Body()])
    return bounded_validator(adapter.core_schema).validate_python(body)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ResponsesRequest, {"input": [{}] * 1000}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{}] * 1000}]}),
        (ChatCompletionRequest, {"messages": [1] * 1000}),
        (ChatCompletionRequest, {"messages": [USER], "tools": [{}] * 1000}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * 1000}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {f"{i}": "x" for i in range(1000)}}),
        (CompletionRequest, {"prompt": "a", "vllm_xargs": {"x": [["y"]] * 1000}}),
        (CompletionRequest, {"prompt": "a", "vllm_xargs": {f"{i}": None for i in range(1000)}}),
        (DecisionRequest, {f"{i}": None for i in range(LONGEST + 1)}),
        (DecisionRequest, {"questions": [CHOICE | {"choices": [{"value": 1}] * 255}] * 4}),
    ],
)
def test_a_thousand_wrong_items_are_one(kind, body):
    """One item may have an error for each form that it might have had."""
    with pytest.raises(ValidationError) as refusal:
        validate(kind, **body)
    assert refusal.value.error_count() < 1000


def test_a_type_has_the_bounds_of_a_body():
    adapter = TypeAdapter(bounded_type(ChatCompletionRequest))
    assert type(adapter.validate_python({"messages": [USER]})) is ChatCompletionRequest
    with pytest.raises(ValidationError):
        adapter.validate_python({"messages": [USER] * (LONGEST_OF_FIELD["messages"] + 1)})


def test_a_field_with_a_bound_keeps_its_default():
    class Kind(BaseModel):
        messages: list[Any] = []

    assert validate(Kind).messages == []


def test_what_is_right_is_read_as_before():
    body = {
        "request_id": "a",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "tools": [TOOL],
        "stop": ["x"],
        "logit_bias": {"1": 2},
        "vllm_xargs": {"diffusion_pin_at": [1, 2]},
    }
    read = validate(ChatCompletionRequest, **body)
    plain = ChatCompletionRequest(**body)
    assert type(read) is ChatCompletionRequest
    assert read.model_dump(mode="json") == plain.model_dump(mode="json")
    many = validate(CompletionRequest, prompt=[5] * 9999, vllm_xargs={"x": [1] * 9999})
    assert len(many.prompt) == len(many.vllm_xargs["x"]) == 9999

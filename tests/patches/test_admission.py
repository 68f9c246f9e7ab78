"""Requests are checked when they start, and an image for a text-only server is refused."""

import asyncio
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.registry import MultiModalRegistry

from dllm.patches import async_llm, install
from dllm.patches.admission import VERDICT
from tests.support import family_checkpoints

install.install()

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": PIXEL}},
        ],
    }
]


def parse_chat(model: Path, messages: list[dict[str, Any]]) -> Any:
    """What the API server does first with a chat request."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers.chat_utils import parse_chat_messages_async

    config = EngineArgs(model=str(model), enforce_eager=True).create_model_config()
    return asyncio.run(parse_chat_messages_async(messages, config, "openai"))


def test_an_image_gets_a_400_that_says_why(checkpoint, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        VLLMValidationError,
        match=r"text-only: images need torchvision, which is not installed here; audio and",
    ):
        parse_chat(checkpoint(), MESSAGES)


def test_an_image_gets_a_400_also_where_torchvision_is(checkpoint, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(VLLMValidationError, match=r"served without its vision tower; audio and"):
        parse_chat(checkpoint(), MESSAGES)


def test_a_model_that_cannot_have_a_vision_tower_asks_for_no_package(tmp_path):
    model = family_checkpoints.write(tmp_path / "model", family_checkpoints.SDAR)
    with pytest.raises(VLLMValidationError, match="text-only: the model has no vision tower"):
        parse_chat(model, MESSAGES)


def test_text_parts_pass(checkpoint):
    conversation, media, _ = parse_chat(
        checkpoint(), [{"role": "user", "content": MESSAGES[0]["content"][:1]}]
    )
    assert conversation[0]["content"] == [{"type": "text", "text": "What is this?"}]
    assert media is None


def test_other_text_only_models_get_vllms_own_answer():
    """Scoped to our architecture."""
    config = type("Config", (), dict(architecture="Qwen3ForCausalLM", is_multimodal_model=False))
    config.served_model_name = "qwen"
    registry = MultiModalRegistry()
    with pytest.raises(ValueError, match="qwen is not a multimodal model"):
        registry.create_processor(config)


def test_a_verdict_that_was_not_taken_is_not_used_by_the_next_request():
    params, given = SamplingParams(), []

    def validate(params: Any, tasks: Any) -> bool:
        given.append(VERDICT in vars(params))
        return False

    llm = SimpleNamespace(input_processor=SimpleNamespace(_validate_params=validate))
    async_llm._check_now(llm, params)
    async_llm._check_now(llm, params)  # of a request with the same parameters, perhaps changed
    assert given == [False, False]
    assert vars(params)[VERDICT] is False

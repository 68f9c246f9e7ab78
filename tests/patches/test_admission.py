"""Requests are checked when they start, and an image for a text-only server is refused."""

import asyncio
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.registry import MultiModalRegistry
from vllm.v1.engine.input_processor import InputProcessor

from dllm.models import FAMILIES
from dllm.patches import install
from dllm.patches.admission import prepare
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


@pytest.fixture(scope="module")
def processor(tmp_path_factory) -> InputProcessor:
    """What the front end of a server prepares requests with."""
    model = family_checkpoints.write(
        tmp_path_factory.mktemp("admission") / "model", family_checkpoints.SDAR
    )
    arguments = EngineArgs(str(model), enforce_eager=True, skip_tokenizer_init=True)
    return InputProcessor(arguments.create_engine_config())


def test_what_is_prepared_is_complete_and_the_given_parameters_stay(processor):
    extra = {"diffusion_pin_at": [3], "diffusion_pin_ids": [5], "diffusion_pin_mode": "hold"}
    extra |= {"diffusion_constrained": True, "thinking_token_budget": -1}
    given = SamplingParams(max_tokens=8, logprob_token_ids=[5, 6], extra_args=dict(extra))
    prepared = prepare(processor, given)
    assert (given.min_tokens, given.allowed_token_ids, given.extra_args) == (0, None, extra)
    assert (prepared.min_tokens, prepared.allowed_token_ids) == (3, [5, 6])
    assert prepare(processor, prepared) == prepared


def test_parameters_are_checked_for_each_request(processor):
    """Somebody may have changed them; and each piece of a prompt may have its own."""
    params = SamplingParams(max_tokens=8)
    prepare(processor, params)
    params.extra_args = {"diffusion_max_steps": 0}
    for again in (
        lambda: prepare(processor, params),
        lambda: processor.process_inputs(
            "a piece", {"prompt_token_ids": [1]}, params, ("generate",), resumable=True
        ),
    ):
        with pytest.raises(VLLMValidationError) as refusal:
            again()
        assert refusal.value.parameter == "diffusion_max_steps"


@pytest.mark.parametrize("family", ["SDARForCausalLM", "Qwen3ForCausalLM"])
def test_a_wrong_model_name_gets_the_served_ones(family):
    """Of our models, folders and adapters included."""
    from vllm.entrypoints.serve.engine.serving import BaseServing

    folder = "/home/me/models/tiny-sdar"
    models = SimpleNamespace(
        base_model_paths=[SimpleNamespace(name=folder)],
        lora_requests={"signed": None},
        is_base_model=lambda name: name == folder,
    )
    serving = BaseServing(models, SimpleNamespace(architecture=family))
    for served in (folder, "signed"):
        assert asyncio.run(serving._check_model(SimpleNamespace(model=served))) is None
    refused = asyncio.run(serving._check_model(SimpleNamespace(model="sined")))
    assert refused.error.code == 404 and refused.error.param == "model"
    is_ours = family in FAMILIES
    assert ("(did you mean 'signed'?)" in refused.error.message) == is_ours
    assert (f"{folder}, signed" in refused.error.message) == is_ours
    if is_ours:
        refused = asyncio.run(serving._check_model(SimpleNamespace(model="a/b " * 100_000)))
        assert len(refused.error.message) < 2000

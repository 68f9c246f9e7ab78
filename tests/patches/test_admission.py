"""Requests are checked when they start, and an image for a text-only server is refused."""

import ast
import asyncio
import importlib
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.registry import MultiModalRegistry
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dllm import patches
from dllm.patches import install, serving
from dllm.patches.admission import TargetInputs, prepare
from dllm.patches.async_llm import _prepared_pieces
from dllm.patches.drafts import SELF_DRAFTER
from dllm.settings.request import of_one_canvas
from tests.support import family_checkpoints

install.install()

PROMPT = {"prompt_token_ids": [1]}
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


@pytest.mark.parametrize(
    ("torchvision", "message"),
    [
        (None, "text-only: images need torchvision, which is not installed here; audio and"),
        (object(), "served without its vision tower; audio and"),
    ],
)
def test_an_image_gets_a_400_that_says_why(checkpoint, monkeypatch, torchvision, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: torchvision)
    with pytest.raises(VLLMValidationError, match=message):
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
    prepared = prepare(processor, PROMPT, given)
    assert (given.min_tokens, given.allowed_token_ids, given.extra_args) == (0, None, extra)
    assert (prepared.min_tokens, prepared.allowed_token_ids) == (3, [5, 6])
    assert prepare(processor, PROMPT, prepared) == prepared


def test_a_request_that_only_reads_is_one_canvas_without_an_end(processor):
    given = SamplingParams(max_tokens=99, extra_args={"diffusion_read_only": True})
    one = of_one_canvas(given, 8)
    assert (one.max_tokens, one.ignore_eos) == (8, True) and given.max_tokens == 99


def test_parameters_are_checked_for_each_request(processor):
    """Somebody may have changed them; and each piece of a prompt may have its own."""
    params = SamplingParams(max_tokens=8)
    prepare(processor, PROMPT, params)
    params.extra_args = {"diffusion_max_steps": 0}
    for again in (prepare, lambda *piece: in_pieces(*piece, SamplingParams())):
        with pytest.raises(VLLMValidationError) as refusal:
            again(processor, PROMPT, params)
        assert refusal.value.parameter == "diffusion_max_steps"


def in_pieces(processor: Any, prompt: Any, own: SamplingParams | None, first: Any) -> None:
    """Prepare a piece without parameters, and one that has its ``own``."""

    async def pieces() -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput(prompt)
        yield StreamingInput(prompt, own)

    async def all_pieces() -> None:
        async for _ in _prepared_pieces(processor, first, pieces()):
            pass

    asyncio.run(all_pieces())


def test_a_piece_of_a_prompt_has_no_grammar(processor):
    """vLLM would keep that of the first piece."""
    grammar = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    for first, own in ((SamplingParams(), grammar), (grammar, None)):
        with pytest.raises(VLLMValidationError) as refusal:
            in_pieces(processor, PROMPT, own, first)
        assert refusal.value.parameter == "structured_outputs"


def test_a_search_with_beams_is_refused_offline(processor):
    """It asks for one token at a time, of a canvas that is decided as a whole."""
    llm = SimpleNamespace(llm_engine=SimpleNamespace(input_processor=processor))
    with pytest.raises(VLLMValidationError) as refusal:
        LLM.beam_search(llm, [PROMPT], BeamSearchParams(beam_width=2, max_tokens=4))
    assert refusal.value.parameter == "use_beam_search"


def test_logprobs_that_drafts_leave_out_are_refused_before_a_stream_begins():
    drafts = SimpleNamespace(method="custom_class", model=SELF_DRAFTER)
    server = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=drafts))
    with pytest.raises(VLLMValidationError) as refusal:
        TargetInputs.prepared(server, PROMPT, SamplingParams(logprob_token_ids=[5]))
    assert refusal.value.parameter == "logprob_token_ids"


def test_the_prompt_of_a_response_begins_as_that_of_a_chat(processor):
    """The template has written the token that begins a text."""
    for asked in (ChatCompletionRequest(messages=[]), ResponsesRequest(input="a")):
        assert not asked.build_tok_params(processor.model_config).add_special_tokens
    of_others = SimpleNamespace(architecture="Qwen3ForCausalLM", max_model_len=8)
    assert ResponsesRequest(input="a").build_tok_params(of_others).add_special_tokens


def test_vllm_takes_what_was_prepared(processor):
    """A diffusion model of its own it would refuse each of these."""
    served = dict(temperature=0.5, min_p=0.1, seed=3, min_tokens=2, bad_words=["x"])
    served |= dict(logit_bias={3: 1.0}, allowed_token_ids=[3, 4])
    prepared = prepare(processor, PROMPT, SamplingParams(**served))
    request = processor.process_inputs("a", PROMPT, prepared, ("generate",))
    assert {name: getattr(request.sampling_params, name) for name in served} == served


def test_ids_of_prompt_logprobs_come_to_the_engine_in_the_form_it_reads(checkpoint):
    arguments = EngineArgs(str(checkpoint()), enforce_eager=True, skip_tokenizer_init=True)
    processor = InputProcessor(arguments.create_engine_config())
    prompt = {"prompt_token_ids": [1] * 3}
    prepared = prepare(processor, prompt, SamplingParams(prompt_logprob_token_ids=[[3, 4], [5]]))
    request = processor.process_inputs("a", prompt, prepared, ("generate",))
    sent = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))
    assert sent.sampling_params.prompt_logprob_token_ids.tolist() == [[3, 4], [5, -1]]


CHECKS = ("admit", "admit_budget", "admit_ids", "admit_next_tokens")  # of ``dllm.settings``
# Where a request comes in; a hole that is filled starts requests of its own.
ENTRANCES = {
    "prepare": {
        "async_llm.generate",
        "async_llm._prepared_pieces",
        "async_llm._start_fill",
        "async_llm.start",
        "grammars.add_request",
    },
    **{check: {"admission.prepared"} for check in CHECKS},
}


def test_a_request_is_checked_at_its_entrances_alone():
    called: dict[str, set[str]] = {name: set() for name in ENTRANCES}
    for path in Path(patches.__file__).parents[1].rglob("*.py"):
        if path.parent.name == "quantize":  # has a function of this name
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            inner = [one for one in ast.walk(function) if isinstance(one, type(function))][1:]
            within = {id(node) for one in inner for node in ast.walk(one)}
            for node in ast.walk(function):
                name = getattr(getattr(node, "func", None), "id", None)
                if name in called and id(node) not in within:
                    called[name].add(f"{path.stem}.{function.name}")
    assert called == ENTRANCES


def test_a_wrong_model_name_gets_the_served_ones():
    """Of our models, folders and adapters included."""
    folder = "/home/me/models/tiny-sdar"
    models = SimpleNamespace(
        base_model_paths=[SimpleNamespace(name=folder)],
        lora_requests={"signed": None},
        is_base_model=lambda name: name == folder,
    )
    ours = serving.Ours(models, SimpleNamespace(architecture="SDARForCausalLM"))
    for served in (folder, "signed"):
        assert asyncio.run(ours._check_model(SimpleNamespace(model=served))) is None
    refused = asyncio.run(ours._check_model(SimpleNamespace(model="sined")))
    assert refused.error.code == 404 and refused.error.param == "model"
    assert "(did you mean 'signed'?)" in refused.error.message
    assert f"{folder}, signed" in refused.error.message
    refused = asyncio.run(ours._check_model(SimpleNamespace(model="a/b " * 100_000)))
    assert len(refused.error.message) < 2000

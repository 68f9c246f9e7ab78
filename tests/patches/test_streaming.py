"""Which requests may show their canvases: where a real server would be needed for one refusal."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core_client import AsyncMPClient

from dllm.engine.channels import frame_output
from dllm.patches import streaming


def request(**fields: Any) -> Any:
    return SimpleNamespace(stream=True, include_reasoning=True, **fields)


@pytest.mark.parametrize(
    ("parser", "includes", "is_refused"),
    [(None, True, False), (None, False, False), (object, True, False), (object, False, True)],
)
def test_hidden_reasoning_is_not_shown(parser, includes, is_refused):
    chat, asked = SimpleNamespace(parser_cls=parser), request()
    asked.include_reasoning = includes
    if is_refused:
        with pytest.raises(VLLMValidationError, match="include_reasoning"):
            streaming._refuse_what_is_not_shown(chat, asked, "canvas")
    else:
        streaming._refuse_what_is_not_shown(chat, asked, "canvas")


def test_mercurys_field_and_ours_are_one():
    asked = request(diffusing=True, vllm_xargs=None)
    assert streaming.form_asked(asked) == "text"
    assert asked.vllm_xargs == {"diffusion_stream": "text"}
    both = request(diffusing=True, vllm_xargs={"diffusion_stream": "canvas"})
    assert streaming.form_asked(both) == "canvas"
    assert streaming.form_asked(request(diffusing=False, vllm_xargs=None)) is None
    assert streaming.form_asked(request(vllm_xargs={})) is None


def test_drafts_that_replace_cannot_stand_beside_an_echo():
    """They hold no prompt, and would make it come and go."""
    asked = SimpleNamespace(stream=True, echo=True)
    with pytest.raises(VLLMValidationError, match=r'diffusion_stream = "text" with echo'):
        streaming._refuse_what_is_not_shown(SimpleNamespace(), asked, "text")
    streaming._refuse_what_is_not_shown(SimpleNamespace(), asked, "canvas")


def test_events_name_the_adapter_as_vllms_own_do():
    models = object.__new__(OpenAIServingModels)
    models.base_model_paths = [SimpleNamespace(name="base")]
    models.lora_requests = {"signed": SimpleNamespace(lora_name="signed")}
    serving = SimpleNamespace(
        models=models,
        renderer=SimpleNamespace(get_tokenizer=lambda: None),
        engine_client=SimpleNamespace(),
    )
    for asked, said in ((None, "base"), ("base", "base"), ("signed", "signed")):
        of_model = request(model=asked, stop_token_ids=None, ignore_eos=True)
        assert streaming._writer(serving, None, "a-0", of_model)._stream.model == said


def test_where_nobody_watches_traces_are_taken_out_of_the_whole_message(monkeypatch):
    """vLLM reads it in slices, and drops a request whose last token it has read."""
    frame = frame_output("a", {"is_final": False})
    message = EngineCoreOutputs(outputs=[EngineCoreOutput("a", [5]), frame])

    async def arrives(client: Any) -> EngineCoreOutputs:
        return message

    monkeypatch.setattr(AsyncMPClient, "get_output_async", arrives)
    llm = SimpleNamespace(
        engine_core=object.__new__(streaming.CanvasClient),
        output_processor=SimpleNamespace(request_states={}),
        vllm_config=SimpleNamespace(additional_config={}),
    )
    params = SamplingParams(extra_args={"diffusion_trace": True})
    streaming.start_watching(llm, params, "a")
    asyncio.run(llm.engine_core.get_output_async())
    assert [output.new_token_ids for output in message.outputs] == [[5]]

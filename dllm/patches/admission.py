"""In the API server: what cannot be served is refused, with HTTP 400 and a reason."""

import importlib.util
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from vllm import envs
from vllm.logger import init_logger
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from dllm import LOGGER
from dllm.api.pins import check_length
from dllm.api.structured_outputs import spec_of
from dllm.models import settings_of, takes_images
from dllm.patches.drafts import draft_of
from dllm.patches.replace import replaces
from dllm.patches.served import Server
from dllm.patches.streaming import refuse_unseen_canvases
from dllm.settings.admission import (
    admit,
    admit_ids,
    admit_next_tokens,
    admit_prompt,
    check_sizes,
    refuse_beams,
)
from dllm.settings.pins import without_noise
from dllm.settings.request import has_structured_outputs, of_one_canvas, refuse, with_edits
from dllm.settings.server import options_of
from dllm.settings.thoughts import admit_budget

logger = init_logger(LOGGER)

# What vLLM refuses for diffusion models and our sampler serves; by name, a value that it takes.
SERVED: dict[str, Any] = {
    "temperature": 1.0,
    "min_p": 0.0,
    "seed": None,
    "min_tokens": 0,
    "logit_bias": None,
    "bad_words": [],
    "allowed_token_ids": None,
    "structured_outputs": None,
}


def prepare(processor: "TargetInputs", prompt: Any, params: Any) -> Any:
    """Check a request where it comes in, and complete its sampling parameters.

    Called when a route starts a request, before the first byte of a stream (``async_llm``), and by
    ``LLMEngine.add_request`` (``grammars``). To prepare the result again changes nothing.

    Args:
        params: stay as they are, because one object may belong to several requests.

    Raises:
        VLLMValidationError: it cannot be served; the client gets HTTP 400.
    """
    return processor.prepared(prompt, params) if isinstance(params, SamplingParams) else params


class TargetInputs(InputProcessor):
    """Of any server of ours."""

    def prepared(self, prompt: Any, params: Any) -> Any:
        _refuse_beside_drafts(params, self.vllm_config)
        return params

    def _validate_params(self, params: Any, supported_tasks: Any) -> Any:
        """Model Runner V2 honours min_p and logit_bias beside drafts; vLLM refuses them."""
        is_drafted = draft_of(self.vllm_config.speculative_config) is not None
        if not is_drafted or not isinstance(params, SamplingParams):
            return super()._validate_params(params, supported_tasks)
        params._validate_logit_bias(self.model_config)
        return self._validate_rest(params, {"min_p": 0.0, "logit_bias": None}, supported_tasks)

    def _validate_rest(self, params: Any, taken: Mapping[str, Any], supported_tasks: Any) -> Any:
        """vLLM checks all but what is served here; ``taken``: values of that which it takes."""
        rest = copy(params)
        for name, value in taken.items():
            setattr(rest, name, value)
        watermarking = super()._validate_params(rest, supported_tasks)
        # An array, in which form alone the engine core reads it.
        params.prompt_logprob_token_ids = rest.prompt_logprob_token_ids
        return watermarking

    def process_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM adds ends and makes ids of words here; some are outside of the vocabulary."""
        request = super().process_inputs(*args, **kwargs)
        if request.sampling_params is not None:
            drop_impossible_ids(request.sampling_params, self.model_config.get_vocab_size())
        return request


class TokenInputs(TargetInputs):
    """Of a model that is served token by token."""

    def prepared(self, prompt: Any, params: Any) -> Any:
        params = super().prepared(prompt, params)
        admit_next_tokens(params)
        self._validate_params(params, ("generate",))
        check_sizes(with_resolved_ids(self, params))
        return params


class CanvasInputs(TargetInputs):
    """Of a diffusion model."""

    def prepared(self, prompt: Any, params: Any) -> Any:
        """In this order:

        1. What our model does not serve, or what the worker's tables cannot hold, is refused.
        2. So is a thinking budget that this server cannot keep, and what nobody would see.
        3. vLLM checks the rest.
        4. Stop tokens and bad words become ids, unless their text is too long for a table.
        5. Our own arguments become vLLM's edits of logits.
        6. Ids that are too many, and edits that leave no token, are refused.
        """
        settings, vocab_size = settings_of(self.vllm_config), self.model_config.get_vocab_size()
        if isinstance(prompt, dict) and prompt.get("prompt_token_ids") is not None:
            admit_prompt(prompt["prompt_token_ids"], vocab_size)
        options = admit(params, settings, vocab_size)
        admit_budget(params, self.vllm_config)
        refuse_unseen_canvases(params, self.vllm_config)
        _check_grammar(params, self.tokenizer)
        self._validate_params(params, ("generate",))
        _check_length_of_words(self, params)
        params = of_one_canvas(params, options.canvas_width)
        params = with_edits(with_resolved_ids(self, params))
        admit_ids(params, settings, vocab_size)
        return params

    def resolve_watermarking(self, params: Any) -> bool:
        """What ``LLM.beam_search`` asks first; its requests of one token look like any others."""
        if isinstance(params, BeamSearchParams):
            refuse_beams()
        return super().resolve_watermarking(params)

    def _validate_params(self, params: Any, supported_tasks: Any) -> Any:
        """vLLM refuses what our sampler serves, and ids of a first canvas that stand for noise."""
        if not isinstance(params, SamplingParams):
            return super()._validate_params(params, supported_tasks)
        ids = without_noise(params.extra_args or {})
        return self._validate_rest(params, SERVED | {"extra_args": ids}, supported_tasks)


def _check_grammar(params: Any, tokenizer: Any) -> None:
    """Refuse a grammar that is none. The process that compiles it checks the rest.

    vLLM would ask xgrammar, in the thread that serves all requests.
    """
    if not has_structured_outputs(params):
        return
    if tokenizer is None:
        refuse("structured_outputs", "Structured outputs need a tokenizer. Serve with one.")
    spec_of(params.structured_outputs, is_compact=False)


def refuse_grammar_of_piece(processor: TargetInputs, params: Any) -> None:
    """Of streamed input: vLLM keeps the grammar of the first piece, and compiles none of ours."""
    if isinstance(processor, CanvasInputs) and has_structured_outputs(params):
        refuse(
            "structured_outputs",
            "Structured outputs are not served with streamed input. Send the whole text.",
        )


def _check_length_of_words(processor: Any, params: Any) -> None:
    if params.bad_words and processor.tokenizer is not None:
        num_chars = sum(len(word) for word in params.bad_words)
        most = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        check_length("bad_words", num_chars, most, processor.tokenizer)


def _refuse_beside_drafts(params: Any, vllm_config: Any) -> None:
    """Model Runner V2 admits logprob_token_ids, and returns no such logprobs.

    vLLM leaves out drafts that the grammar forbids before they are verified. The token in their
    place is then drawn from p, where exact rejection sampling draws from max(p - q, 0).
    """
    speculative = vllm_config.speculative_config
    if params.logprob_token_ids and draft_of(speculative) is not None:
        refuse(
            "logprob_token_ids",
            f"logprob_token_ids = {params.logprob_token_ids}: steps that verify drafts return no "
            "logprobs of chosen tokens. Leave it out, or ask for the likeliest (logprobs).",
        )
    if speculative is None or not has_structured_outputs(params):
        return
    is_ratio = options_of(vllm_config).drafter.verification == "rejection"
    if is_ratio and speculative.draft_sample_method == "probabilistic":
        refuse(
            "structured_outputs",
            "structured_outputs, response_format and strict tools are not served here: this server "
            "verifies sampled drafts by rejection sampling, which is not exact under a grammar. "
            "Leave them out, or ask a server with another verification or draft_sample_method.",
        )


def with_resolved_ids(processor: Any, params: Any) -> Any:
    """vLLM makes ids of stop tokens and bad words only later."""
    params = params.clone()
    params.update_from_generation_config(
        processor.generation_config_fields, processor.renderer.get_eos_token_id()
    )
    if processor.tokenizer is not None:
        params.update_from_tokenizer(processor.tokenizer)
    drop_impossible_ids(params, processor.model_config.get_vocab_size())
    return params


def drop_impossible_ids(params: Any, vocab_size: int) -> None:
    """Leave out ends and bad words outside of the vocabulary, in place: the worker's tables have no
    place for them. They come from a generation config or a tokenizer, which vLLM does not check.
    """

    def is_possible(token: Any) -> bool:
        return isinstance(token, int) and 0 <= token < vocab_size

    impossible = {one for one in params.all_stop_token_ids if not is_possible(one)}
    if impossible:
        logger.warning_once(
            "dllm: the end tokens %s of the generation config or the tokenizer are outside of the "
            "vocabulary (%s tokens), and end no request",
            ", ".join(sorted(map(str, impossible))),
            vocab_size,
        )
        params._all_stop_token_ids = params.all_stop_token_ids - impossible
        params.stop_token_ids = [*filter(is_possible, params.stop_token_ids or ())]
    if params.eos_token_id in impossible:
        params._eos_token_id = None
    if words := params.bad_words_token_ids:
        params._bad_words_token_ids = [word for word in words if all(map(is_possible, word))]


def explain_missing_images() -> None:
    """vLLM only says that the model is not multimodal."""
    from vllm.multimodal.registry import MultiModalRegistry

    @replaces(MultiModalRegistry, of=Server.CANVASES)
    def create_processor(theirs: Any, self: Any, model_config: Any, **kwargs: Any) -> Any:
        if not model_config.is_multimodal_model or not takes_images(model_config.hf_config):
            refuse("messages", _text_only_message(model_config.hf_config))
        return theirs(self, model_config, **kwargs)


def begin_responses_once() -> None:
    """As chats: the template has written the token that begins a text."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    @replaces(ResponsesRequest, of=Server.CANVASES)
    def build_tok_params(theirs: Any, self: Any, model_config: Any) -> Any:
        return replace(theirs(self, model_config), add_special_tokens=False)


def _text_only_message(hf_config: Any) -> str:
    why = "the model is served without its vision tower"
    if getattr(hf_config, "vision_config", None) is None:
        why = "the model has no vision tower"
    elif importlib.util.find_spec("torchvision") is None:
        why = "images need torchvision, which is not installed here"
    return f"This server is text-only: {why}; audio and video are never served. Send text alone."

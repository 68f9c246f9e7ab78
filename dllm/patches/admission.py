"""Patches of the API server: what cannot be served is refused there, with HTTP 400 and a reason."""

import importlib.util
from copy import copy
from typing import Any

from vllm.logger import init_logger

from dllm import LOGGER
from dllm.models import AUTOREGRESSIVE, FAMILIES, settings_of, takes_images
from dllm.patches.contract import CPU_WORKER, GPU_WORKER
from dllm.patches.replace import replaces
from dllm.patches.streaming import refuse_unseen_canvases
from dllm.settings.server import options_of

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


def prepare(processor: Any, prompt: Any, params: Any) -> Any:
    """Check a request where it comes in, and complete its sampling parameters.

    Called when a route starts a request, before the first byte of a stream (``async_llm``), and by
    ``LLMEngine.add_request`` (``grammars``). Nothing else checks a request of the engine.

    1. What our model does not serve, or what the worker's tables cannot hold, is refused.
    2. So is a thinking budget that this server cannot keep, and what nobody would see.
    3. vLLM checks the rest.
    4. Stop tokens and bad words become ids, unless their text is too long for a table.
    5. Our own arguments become vLLM's edits of logits.
    6. Ids that are too many, and edits that leave no token, are refused.

    Of a model that is served token by token, steps 2 and 5 are vLLM's; of other models, all are,
    but for grammars beside drafts that are sampled. To prepare the result again changes nothing.

    Args:
        processor: vLLM's InputProcessor.
        params: stay as they are, because one object may belong to several requests.

    Raises:
        VLLMValidationError: it cannot be served; the client gets HTTP 400.
    """
    from vllm.sampling_params import SamplingParams

    from dllm.settings.admission import admit, admit_ids, admit_next_tokens, check_sizes
    from dllm.settings.request import constrained, of_one_canvas
    from dllm.settings.thoughts import admit_budget

    if not isinstance(params, SamplingParams):
        return params
    model, tasks = processor.model_config, ("generate",)
    _refuse_grammar_of_sampled_drafts(params, processor.vllm_config)
    if model.architecture in AUTOREGRESSIVE:
        admit_next_tokens(params)
        processor._validate_params(params, tasks)
        check_sizes(with_resolved_ids(processor, params))
    if model.architecture not in FAMILIES:
        return params
    if isinstance(prompt, dict) and prompt.get("prompt_token_ids") is not None:
        processor.renderer.validate_token_ids(prompt["prompt_token_ids"])
    settings, vocab_size = settings_of(processor.vllm_config), model.get_vocab_size()
    options = admit(params, settings, vocab_size)
    admit_budget(params, processor.vllm_config)
    refuse_unseen_canvases(params, processor.vllm_config)
    _check_grammar(params, processor.tokenizer)
    processor._validate_params(params, tasks)
    _check_length_of_words(processor, params)
    params = of_one_canvas(params, options.canvas_width)
    params = constrained(with_resolved_ids(processor, params))
    admit_ids(params, settings, vocab_size)
    return params


def _check_grammar(params: Any, tokenizer: Any) -> None:
    """Refuse a grammar that is none. The process that compiles it checks the rest.

    vLLM would ask xgrammar, in the thread that serves all requests.
    """
    from dllm.api.structured_outputs import spec_of
    from dllm.settings.request import has_structured_outputs, refuse

    if not has_structured_outputs(params):
        return
    if tokenizer is None:
        refuse("structured_outputs", "Structured outputs need a tokenizer. Serve with one.")
    spec_of(params.structured_outputs, is_compact=False)


def _check_length_of_words(processor: Any, params: Any) -> None:
    from vllm import envs

    from dllm.api.pins import check_length

    if params.bad_words and processor.tokenizer is not None:
        num_chars = sum(len(word) for word in params.bad_words)
        most = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        check_length("bad_words", num_chars, most, processor.tokenizer)


def check_requests_at_admission() -> None:
    _keep_to_vllms_checks()
    _explain_refusals()
    _explain_missing_images()


def _keep_to_vllms_checks() -> None:
    """vLLM refuses parameters of diffusion models that our sampler applies, and ids of a first
    canvas that stand for noise. Behind its checks it makes ids of stop tokens and bad words.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    from dllm.settings.pins import without_noise

    @replaces(InputProcessor)
    def _validate_params(theirs: Any, self: Any, params: Any, supported_tasks: Any) -> Any:
        is_ours = self.model_config.architecture in FAMILIES
        if not is_ours or not isinstance(params, SamplingParams):
            return theirs(self, params, supported_tasks)
        rest = copy(params)
        for name, taken in SERVED.items():
            setattr(rest, name, taken)
        rest.extra_args = without_noise(rest.extra_args or {})
        watermarking = theirs(self, rest, supported_tasks)
        # An array, in which form alone the engine core reads it.
        params.prompt_logprob_token_ids = rest.prompt_logprob_token_ids
        return watermarking

    @replaces(InputProcessor)
    def process_inputs(theirs: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        request = theirs(self, *args, **kwargs)
        worker = self.vllm_config.parallel_config.worker_cls
        is_ours = self.model_config.architecture in FAMILIES or worker in (CPU_WORKER, GPU_WORKER)
        if is_ours and request.sampling_params is not None:
            drop_impossible_ids(request.sampling_params, self.model_config.get_vocab_size())
        return request


def _refuse_grammar_of_sampled_drafts(params: Any, vllm_config: Any) -> None:
    """Raises VLLMValidationError for a grammar with rejection sampling of sampled drafts.

    vLLM leaves out drafts that the grammar forbids before they are verified. The token in their
    place is then drawn from p, where exact rejection sampling draws from max(p - q, 0).
    """
    from dllm.settings.request import has_structured_outputs, refuse

    speculative = vllm_config.speculative_config
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
    """Leave out ends and bad words that no output can hold, in place.

    Their ids are outside of the vocabulary, and so of the worker's tables. They come from a
    generation config or a tokenizer; vLLM checks only what a request itself names.
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


def _explain_missing_images() -> None:
    """vLLM only says that the model is not multimodal."""
    from vllm.exceptions import VLLMValidationError
    from vllm.multimodal.registry import MultiModalRegistry

    @replaces(MultiModalRegistry)
    def create_processor(theirs: Any, self: Any, model_config: Any, **kwargs: Any) -> Any:
        if model_config.architecture in FAMILIES and (
            not model_config.is_multimodal_model or not takes_images(model_config.hf_config)
        ):
            message = _text_only_message(model_config.hf_config)
            raise VLLMValidationError(message, parameter="messages")
        return theirs(self, model_config, **kwargs)


def _text_only_message(hf_config: Any) -> str:
    why = "the model is served without its vision tower"
    if getattr(hf_config, "vision_config", None) is None:
        why = "the model has no vision tower"
    elif importlib.util.find_spec("torchvision") is None:
        why = "images need torchvision, which is not installed here"
    return f"This server is text-only: {why}; audio and video are never served. Send text alone."


def _explain_refusals() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.base import BaseRenderer

    @replaces(BaseRenderer)
    def validate_token_ids(
        theirs: Any, self: Any, token_ids: Any, *, parameter: str | None = None
    ) -> None:
        if self.model_config.architecture in FAMILIES:
            if len(token_ids) == 0:
                raise VLLMValidationError(
                    "prompt has 0 tokens; allowed: 1 and more. Send a token or a text.",
                    parameter=parameter or "prompt",
                )
            vocab_size = self.model_config.get_vocab_size()
            for token in (min(token_ids), max(token_ids)):
                if not 0 <= token < vocab_size:
                    raise VLLMValidationError(
                        f"prompt token id {token} is out of the vocabulary; allowed: 0 to "
                        f"{vocab_size - 1}. Send ids of this model's tokenizer (POST /tokenize).",
                        parameter=parameter or "prompt",
                    )
        theirs(self, token_ids, parameter=parameter)

"""Patches of the API server: what cannot be served is refused there, with HTTP 400 and a reason."""

import importlib.util
import weakref
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from dllm import LOGGER
from dllm.models import AUTOREGRESSIVE, FAMILIES, settings_of, takes_images
from dllm.patches.contract import CPU_WORKER, GPU_WORKER
from dllm.settings.denoising import DenoiseSettings

logger = init_logger(LOGGER)

# In the ``__dict__`` of parameters that were checked a moment ago: what vLLM's check returned.
VERDICT = "dllm_verdict"
# The settings of a server, by its InputProcessor.
_settings: weakref.WeakKeyDictionary[Any, DenoiseSettings] = weakref.WeakKeyDictionary()


def check_requests_at_admission() -> None:
    """Refuse requests that cannot be served, with HTTP 400.

    The message says what was given, what is allowed and what to do.
    """
    _parse_requests()
    _explain_refusals()
    _explain_missing_images()


def _parse_requests() -> None:
    """Check every request with ``settings.admission``.

    vLLM's own check of diffusion requests is left out for our architectures: it refuses parameters
    that our sampler applies.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    from dllm.settings.request import constrained

    validate_params = InputProcessor._validate_params
    validate_diffusion = SamplingParams._validate_diffusion
    process = InputProcessor.process_inputs

    def _validate_params(self: Any, params: Any, supported_tasks: Any) -> Any:
        def validate() -> Any:
            return validate_params(self, params, supported_tasks)

        if not isinstance(params, SamplingParams):
            return validate()
        if VERDICT in vars(params):
            return vars(params).pop(VERDICT)
        if self.model_config.architecture in AUTOREGRESSIVE:
            return _admit_next_tokens(self, params, validate)
        if self.model_config.architecture in FAMILIES:
            return _admit_canvases(self, params, validate)
        return validate()

    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process(self, *args, **kwargs)
        if request.sampling_params is None:
            return request
        is_canvas = self.model_config.architecture in FAMILIES
        if is_canvas or self.vllm_config.parallel_config.worker_cls in (CPU_WORKER, GPU_WORKER):
            drop_impossible_ids(request.sampling_params, self.model_config.get_vocab_size())
        if is_canvas:
            # Here and not in the worker: vLLM's detokenizer, which finds stop strings, is to see
            # the same `min_tokens`.
            request.sampling_params = constrained(request.sampling_params)
        return request

    def _validate_diffusion(self: Any, model_config: Any) -> None:
        if model_config.architecture not in FAMILIES:
            validate_diffusion(self, model_config)

    InputProcessor._validate_params = _validate_params  # type: ignore[method-assign]
    InputProcessor.process_inputs = process_inputs  # type: ignore[method-assign]
    SamplingParams._validate_diffusion = _validate_diffusion  # type: ignore[method-assign]


def _admit_next_tokens(processor: Any, params: Any, validate: Callable[[], Any]) -> Any:
    """What vLLM's check (``validate``) returns for a request of an autoregressive model."""
    from dllm.settings.admission import admit_next_tokens, check_sizes

    admit_next_tokens(params)
    is_watermarked = validate()
    check_sizes(with_resolved_ids(processor, params))
    return is_watermarked


def _admit_canvases(processor: Any, params: Any, validate: Callable[[], Any]) -> Any:
    """What vLLM's check (``validate``) returns for a request of a diffusion model."""
    from vllm import envs

    from dllm.api.pins import check_length
    from dllm.settings.admission import admit, admit_ids
    from dllm.settings.pins import without_noise
    from dllm.settings.request import constrained
    from dllm.settings.thoughts import admit_budget

    settings = _settings.get(processor)
    if settings is None:
        settings = _settings[processor] = settings_of(processor.vllm_config)
    vocab_size = processor.model_config.get_vocab_size()
    admit(params, settings, vocab_size)
    admit_budget(params, processor.vllm_config)
    extra = params.extra_args
    params.extra_args = without_noise(extra) if extra else extra
    try:
        is_watermarked = validate()
    finally:
        params.extra_args = extra
    if params.bad_words and processor.tokenizer is not None:
        num_chars = sum(len(word) for word in params.bad_words)
        most = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        check_length("bad_words", num_chars, most, processor.tokenizer)
    # Without any of these, each position has a possible token, and the tables are large enough.
    if params.extra_args or params.min_tokens or params.bad_words or params.allowed_token_ids:
        admit_ids(constrained(with_resolved_ids(processor, params)), settings, vocab_size)
    return is_watermarked


def with_resolved_ids(processor: Any, params: Any) -> Any:
    """A copy with stop tokens and bad words as ids; vLLM makes these ids only later."""
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
    """Say why an image cannot be served; vLLM only says that the model is not multimodal."""
    from vllm.exceptions import VLLMValidationError
    from vllm.multimodal.registry import MultiModalRegistry

    create = MultiModalRegistry.create_processor

    def create_processor(self: Any, model_config: Any, **kwargs: Any) -> Any:
        if model_config.architecture in FAMILIES and (
            not model_config.is_multimodal_model or not takes_images(model_config.hf_config)
        ):
            message = _text_only_message(model_config.hf_config)
            raise VLLMValidationError(message, parameter="messages")
        return create(self, model_config, **kwargs)

    MultiModalRegistry.create_processor = create_processor  # type: ignore[method-assign]


def _text_only_message(hf_config: Any) -> str:
    why = "the model is served without its vision tower"
    if getattr(hf_config, "vision_config", None) is None:
        why = "the model has no vision tower"
    elif importlib.util.find_spec("torchvision") is None:
        why = "images need torchvision, which is not installed here"
    return f"This server is text-only: {why}; audio and video are never served. Send text alone."


def _explain_refusals() -> None:
    """Say what is allowed and what to do where vLLM's own refusals do not."""
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.base import BaseRenderer

    validate_token_ids = BaseRenderer.validate_token_ids
    beam_search = BeamSearchOnlineMixin.beam_search

    def checked_token_ids(self: Any, token_ids: Any, *, parameter: str | None = None) -> None:
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
        validate_token_ids(self, token_ids, parameter=parameter)

    async def checked_beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model_config.architecture in FAMILIES:
            raise VLLMValidationError(
                "use_beam_search = True; allowed: False, because a canvas has no next token to "
                "branch on. Leave it out; n = 2 asks for two samples.",
                parameter="use_beam_search",
            )
        async for output in beam_search(self, *args, **kwargs):
            yield output

    BeamSearchOnlineMixin.beam_search = checked_beam_search  # type: ignore[method-assign]
    BaseRenderer.validate_token_ids = checked_token_ids  # type: ignore[method-assign]

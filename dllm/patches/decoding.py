"""Patches for a diffusion model that is an autoregressive one, too: the option ``decoding``.

Served as such it is a causal language model to vLLM, with whatever vLLM does for one. With
``self_speculation`` it drafts for itself, as a "custom_class" of ``--speculative-config``.
"""

from collections.abc import Iterator
from typing import Any

from vllm.transformers_utils.config import get_config

from dllm.models import AUTOREGRESSIVE, FAMILIES, SERVED, Served
from dllm.patches.cpu import choose_dtype, register_model
from dllm.patches.drafting import always_has_our_worker, draft_limits, may_be_ours
from dllm.patches.drafts import SELF_DRAFTER
from dllm.patches.neighbours import explain_refusal
from dllm.patches.replace import replaces
from dllm.settings.server import WHERE, PluginOptions, options_of


def serve_decodings() -> None:
    for architecture, path in AUTOREGRESSIVE.items():
        register_model(architecture, path)
    _choose_model_config()


def configure_self_drafting(vllm_config: Any) -> None:
    """Raises ValueError if an option or a flag does not work with a self-drafting model."""
    from dllm.drafter.pair import refuse_other_rules, refuse_pilot

    speculative, options = vllm_config.speculative_config, options_of(vllm_config).drafter
    model = vllm_config.model_config
    if (widest := getattr(model.hf_config, "widest_canvas", None)) is None:
        raise ValueError(
            f"--speculative-config names {SELF_DRAFTER}, and {model.architecture} does not draft "
            f"for itself; allowed: {', '.join(AUTOREGRESSIVE)}."
        )
    most = widest - 1
    if speculative.num_speculative_tokens > most:
        raise ValueError(
            f"num_speculative_tokens = {speculative.num_speculative_tokens}; allowed: at most "
            f"{most}, because the model was trained with canvases of {most + 1} tokens."
        )
    refuse_other_rules(speculative, vllm_config.watermark_config is not None)
    options.check_against(
        speculative.num_speculative_tokens, speculative.enable_adaptive_verification
    )
    refuse_pilot(vllm_config)


def self_drafting_attention(vllm_config: Any) -> None:
    """vLLM's, of a kind that can draft on a canvas."""
    vllm_config.attention_config.use_non_causal = True


def self_drafting_limits(vllm_config: Any) -> Iterator[tuple[Any, str, str]]:
    """As ``kinds.Kind.refuses`` says."""
    yield from draft_limits(vllm_config)
    parallel, why = vllm_config.parallel_config, "it reads its own KV, which is divided"
    is_decode = parallel.decode_context_parallel_size > 1
    yield is_decode, "--decode-context-parallel-size", why
    yield parallel.prefill_context_parallel_size > 1, "--prefill-context-parallel-size", why


def adapter_limits(vllm_config: Any) -> Iterator[tuple[Any, str, str]]:
    """As ``kinds.Kind.refuses``, of models that have canvases and are served token by token."""
    is_given = vllm_config.lora_config is not None
    why = "on a CPU vLLM adapts answers that ask for no adapter; canvases work"
    yield is_given and always_has_our_worker(vllm_config), "--enable-lora", why


def _choose_model_config() -> None:
    """Let our option choose the model class, and the CPU its dtype; say why a model is refused."""
    from vllm.engine.arg_utils import EngineArgs

    @replaces(EngineArgs)
    def create_model_config(theirs: Any, self: Any) -> Any:
        decoding = PluginOptions.from_additional_config(self.additional_config).decoding
        try:
            config = theirs(self)
        except Exception:
            explain_refusal(self)
            raise
        if config.using_transformers_backend():
            explain_refusal(self)
        served = SERVED.get(config.architecture)
        if decoding != "diffusion":
            config = _token_by_token(theirs, self, config, served, decoding)
            _choose_speculator(self, config, decoding)
        _choose_draft_length(self)
        choose_dtype(self, config, is_ours=served is not None)
        return config


def _token_by_token(
    theirs: Any, arguments: Any, config: Any, served: Served | None, decoding: str
) -> Any:
    """The model's configuration, of its class for ``decoding``. Raises ValueError: it has none."""
    if served is None or served.autoregressive is None:
        both = ", ".join(name for name, one in FAMILIES.items() if one.autoregressive)
        raise ValueError(
            f"{WHERE}: decoding = {decoding!r}, and {config.architecture} has one way to "
            f"decode; allowed for {both}. Leave it out."
        )
    if config.architecture == served.autoregressive:
        return config
    if callable(arguments.hf_overrides):
        raise ValueError(
            f"{WHERE}: decoding = {decoding!r} beside hf_overrides that are a function; allowed: "
            "a dict. Write one."
        )
    arguments.hf_overrides = {**(arguments.hf_overrides or {}), "canvas_length": None}
    return theirs(arguments)


def _choose_draft_length(arguments: Any) -> None:
    """A DFlash drafter of ours drafts the block that it was trained with, unless the user says."""
    given = arguments.speculative_config or {}
    method, model = (
        getattr(arguments, flag) or given.get(name)
        for flag, name in (("spec_method", "method"), ("spec_model", "model"))
    )
    is_open = arguments.spec_tokens is None and "num_speculative_tokens" not in given
    if method == "dflash" and model and is_open and may_be_ours(arguments):
        block_size = getattr(get_config(model, arguments.trust_remote_code), "block_size", None)
        arguments.spec_tokens = block_size and block_size - 1


def _choose_speculator(arguments: Any, config: Any, decoding: str) -> None:
    """With ``self_speculation``, let the model draft for itself. ValueError: it may not."""
    if decoding != "self_speculation":
        return
    if (given := arguments.speculative_config) and given.get("model") != SELF_DRAFTER:
        raise ValueError(
            f"{WHERE}: decoding = 'self_speculation' beside --speculative-config; allowed: one "
            "of them, because both say what drafts. Leave that flag out, or choose 'ar'."
        )
    if given is None:
        arguments.speculative_config = {
            "method": "custom_class",
            "model": SELF_DRAFTER,
            "num_speculative_tokens": config.hf_config.widest_canvas - 1,
            "draft_sample_method": "probabilistic",
        }

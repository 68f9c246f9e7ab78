"""Patches for a diffusion model that is an autoregressive one, too: the option ``decoding``.

Served as such it is a causal language model to vLLM, with whatever vLLM does for one. With
``self_speculation`` it drafts for itself, as a "custom_class" of ``--speculative-config``.
"""

from collections.abc import Iterator
from typing import Any

from vllm import platforms
from vllm.transformers_utils.config import get_config

from dllm.models import AUTOREGRESSIVE, FAMILIES
from dllm.patches.contract import CPU_WORKER
from dllm.patches.cpu import choose_dtype
from dllm.patches.drafting import draft_limits, may_be_ours
from dllm.patches.drafts import NOISE_DRAFTER, SELF_DRAFTER
from dllm.patches.neighbours import explain_refusal
from dllm.patches.replace import replaces
from dllm.patches.served import Server, model_of
from dllm.settings.server import WHERE, PluginOptions, options_of

ADAPTER = "draft_adapter"  # in ``additional_config``, beside our options: the adapter's digest
# Options of ``--speculative-config`` with the method "uno" in vLLM's open change
# (vllm-project/vllm #55947), and ours.
UNO = {
    "uno_lora_path": "adapter",
    "uno_mask_token_id": "uno_mask_token_id",
    "uno_noise_seed": "uno_noise_seed",
}


def configure_self_drafting(vllm_config: Any) -> None:
    """Raises ValueError if an option or a flag does not work with a self-drafting model."""
    from dllm.drafter.pair import refuse_pilot

    speculative, model = vllm_config.speculative_config, vllm_config.model_config
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
    _configure_rule(vllm_config)
    refuse_pilot(vllm_config)
    vllm_config.attention_config.use_non_causal = True  # a kind that can draft on a canvas


def configure_noise_drafting(vllm_config: Any) -> None:
    """Raises ValueError: an option does not work."""
    # Which vLLM's speculator asks for. Noise stands there.
    vllm_config.model_config.hf_config.ptd_token_id = 0
    _configure_rule(vllm_config)


def _configure_rule(vllm_config: Any) -> None:
    """What all models that draft for themselves have in common."""
    from dllm.drafter.adapter import adapter_folder, digest_of
    from dllm.drafter.pair import check_options

    check_options(vllm_config)
    if options_of(vllm_config).drafter.adapter is not None:
        # vLLM keeps compiled code by its configuration. That of another adapter is other code.
        vllm_config.additional_config[ADAPTER] = digest_of(adapter_folder(vllm_config))


def self_drafting_limits(vllm_config: Any) -> Iterator[tuple[Any, str, str]]:
    """As ``kinds.Kind.refuses`` says."""
    yield from draft_limits(vllm_config)
    parallel, why = vllm_config.parallel_config, "it reads its own KV, which is divided"
    is_decode = parallel.decode_context_parallel_size > 1
    yield is_decode, "--decode-context-parallel-size", why
    yield parallel.prefill_context_parallel_size > 1, "--prefill-context-parallel-size", why


def noise_drafting_limits(vllm_config: Any) -> Iterator[tuple[Any, str, str]]:
    """As ``kinds.Kind.refuses`` says."""
    yield from self_drafting_limits(vllm_config)
    model, why = vllm_config.model_config, "noise is drafted with text and full attention alone"
    yield model.is_multimodal_model, model.architecture, why
    yield model.is_hybrid or model.get_sliding_window() is not None, model.architecture, why


def adapter_limits(vllm_config: Any) -> Iterator[tuple[Any, str, str]]:
    """As ``kinds.Kind.refuses``, of models that are served token by token."""
    is_given = vllm_config.lora_config is not None
    is_on_cpu = vllm_config.parallel_config.worker_cls == CPU_WORKER
    why = "on a CPU vLLM adapts answers that ask for no adapter; canvases work"
    yield is_given and is_on_cpu, "--enable-lora", why


def choose_model_config() -> None:
    """Let our option choose the model class, and the CPU its dtype; say why a model is refused."""
    from vllm.engine.arg_utils import EngineArgs

    @replaces(EngineArgs)
    def create_model_config(theirs: Any, self: Any) -> Any:
        _choose_noise(self)
        decoding = PluginOptions.from_additional_config(self.additional_config).decoding
        try:
            config = theirs(self)
        except Exception:
            explain_refusal(self)
            raise
        if config.using_transformers_backend():
            explain_refusal(self)
        served, is_on_cpu = model_of(config), platforms.current_platform.is_cpu()
        if decoding != "diffusion":
            config = _token_by_token(theirs, self, config, served, decoding)
            _choose_speculator(self, config, decoding)
            served = Server.TOKENS
        if served is Server.TOKENS and is_on_cpu and self.worker_cls == "auto":
            self.worker_cls = CPU_WORKER
        _choose_draft_length(self)
        choose_dtype(self, config, is_ours=served is not None)
        return config


def _token_by_token(
    theirs: Any, arguments: Any, config: Any, served: Server | None, decoding: str
) -> Any:
    """The model's configuration, of its class for ``decoding``. Raises ValueError: it has none."""
    if served is None or getattr(config.hf_config, "widest_canvas", None) is None:
        both = ", ".join(name for name, one in FAMILIES.items() if one.autoregressive)
        raise ValueError(
            f"{WHERE}: decoding = {decoding!r}, and {config.architecture} has one way to "
            f"decode; allowed for {both}. Leave it out."
        )
    if not config.is_diffusion:
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


def _choose_noise(arguments: Any) -> None:
    """Write the method "uno" as a class of ours and its options. Raises ValueError: no adapter."""
    given = dict(arguments.speculative_config or {})
    if given.get("method") != "uno":
        return
    named = {UNO[name]: given.pop(name) for name in UNO.keys() & given.keys()}
    ours = (arguments.additional_config or {}).get("dllm") or {}
    drafter = {**(ours.get("drafter") or {}), **named}
    if not drafter.get("adapter"):
        raise ValueError(
            '--speculative-config: method = "uno" without uno_lora_path; needed: the folder of an '
            "adapter for it."
        )
    kept = {**(arguments.additional_config or {}), "dllm": {**ours, "drafter": drafter}}
    arguments.additional_config = kept
    arguments.speculative_config = {
        "draft_sample_method": "probabilistic",
        **given,
        "method": "custom_class",
        "model": NOISE_DRAFTER,
    }


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

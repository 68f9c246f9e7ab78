"""Patches for drafting: our drafter network and speculator serve DFlash drafters, if asked for.

On CUDA a ``drafter`` among our options asks for them, else vLLM's own serve. On a CPU vLLM's do not
run in Model Runner V2, and ours always serve. Servers with another method, or without a drafter,
behave as without these patches, except that our CPU worker verifies the drafts of every method by
our rule.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from dllm.patches.cpu import is_cpu_without_triton, register_model
from dllm.patches.remote import drafts_remotely, run_custom_speculators_on_v2
from dllm.settings.drafting import DRAFTER_ARCHITECTURE, OUR_DRAFTER, WHERE, always_verifies_all
from dllm.settings.server import options_of

DRAFTER_MODEL = "dllm.drafter.network:DFlashDrafter"
SELF_DRAFTER = "dllm.drafter.self_drafter.SelfDrafter"


def serve_drafters() -> None:
    """Let this process serve DFlash drafters with our classes, where a server asks for them."""
    register_model(OUR_DRAFTER, DRAFTER_MODEL)
    run_custom_speculators_on_v2(
        lambda speculative: drafts_remotely(speculative) or drafts_itself(speculative)
    )
    _admit_all_sampling_parameters()


def drafts_itself(speculative_config: Any) -> bool:
    method = getattr(speculative_config, "method", None)
    return method == "custom_class" and bool(speculative_config.model == SELF_DRAFTER)


def asks_for_our_drafter(vllm_config: Any) -> bool:
    """Whether a server has a DFlash drafter that our classes are to serve."""
    from vllm.platforms import current_platform

    if not _names(vllm_config.speculative_config, DRAFTER_ARCHITECTURE):
        return False
    given = vllm_config.additional_config
    ours = given.get("dllm") if isinstance(given, Mapping) else None
    return current_platform.is_cpu() or (ours or {}).get("drafter") is not None


def drafts_with_ours(speculative_config: Any) -> bool:
    return drafts_itself(speculative_config) or _names(speculative_config, OUR_DRAFTER)


def _names(speculative_config: Any, architecture: str) -> bool:
    if speculative_config is None or speculative_config.method != "dflash":
        return False
    return architecture in (speculative_config.draft_model_config.architectures or ())


def draft_limits(vllm_config: Any) -> Iterator[tuple[Any, str, str]]:
    """As ``kinds.Kind.refuses`` says."""
    why = "they are made for the weights without an adapter"
    yield vllm_config.lora_config is not None, "--enable-lora", why


def configure_drafting(vllm_config: Any) -> None:
    """Let vLLM load our classes for a drafter, and read its configuration as ours do.

    Raises:
        ValueError: target and drafter do not fit each other, or a flag does not work with drafting.
    """
    from dllm.drafter.pair import refuse_mismatch

    drafter = refuse_mismatch(vllm_config)
    speculative = vllm_config.speculative_config
    hf_config = speculative.draft_model_config.hf_config
    hf_config.architectures = [OUR_DRAFTER]
    speculative.update_arch_()
    _write_resolved_fields(hf_config, drafter.mask_token_id)


def why_steps_wait(vllm_config: Any) -> str | None:
    """As ``kinds.Kind.waits`` says, of a server that drafts or records."""
    options, speculative = options_of(vllm_config).drafter, vllm_config.speculative_config
    if speculative is not None and not always_verifies_all(
        options, speculative.num_speculative_tokens
    ):
        return 'how many drafts are verified is decided after each step ("policy" and "width")'
    if options.record is not None:
        # Scheduled ahead, a step behind the end of a text would be recorded, too.
        return 'whether a text has ended is known after each step ("record")'
    return None


def configure_recording(vllm_config: Any) -> None:
    """Check a server without a drafter that records (``drafter.recording``).

    Raises:
        ValueError: the server cannot record what is asked for.
    """
    from dllm.drafter.recording import refuse_unrecordable

    refuse_unrecordable(vllm_config)
    if not (is_cpu_without_triton() or vllm_config.use_v2_model_runner):
        raise ValueError(
            f"{WHERE}: record needs vLLM's Model Runner V2, and this server would run another one."
        )


def _write_resolved_fields(hf_config: Any, mask_token_id: int) -> None:
    """Put the mask token and what is causal into the fields that vLLM's own code reads."""
    from dllm.drafter.checkpoint import SPECULATORS

    dflash = dict(getattr(hf_config, "dflash_config", None) or {})
    dflash["mask_token_id"] = mask_token_id
    if hf_config.model_type == SPECULATORS and dflash.get("causal"):
        # With this key vLLM would make full layers causal, too. Without it only sliding ones are.
        del dflash["causal"]
    hf_config.dflash_config = dflash


def draft_attention(vllm_config: Any) -> None:
    """On a GPU, let the drafter use our attention backend, unless the user asks for another.

    Raises:
        ValueError: the backend that the user asks for cannot serve this drafter.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dllm.drafter.pair import drafter_config

    if current_platform.is_cpu():
        return
    speculative = vllm_config.speculative_config
    if speculative.attention_backend is None:
        speculative.attention_backend = AttentionBackendEnum.CUSTOM
    is_anchored = any(layer.is_anchored for layer in drafter_config(vllm_config).layers)
    if is_anchored and speculative.attention_backend != AttentionBackendEnum.CUSTOM:
        raise ValueError(
            f"attention_backend {speculative.attention_backend.name} of --speculative-config has "
            "no draft window. Leave it out, or leave the drafter's window out."
        )


def _admit_all_sampling_parameters() -> None:
    """Admit the sampling parameters that work with drafts, and refuse the one that does not.

    vLLM refuses min_p and logit_bias with speculative decoding, but its Model Runner V2 applies
    them correctly. It admits logprob_token_ids, but returns no such logprobs: refused here.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    validate = SamplingParams._validate_spec_decode

    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if not (drafts_with_ours(speculative_config) or drafts_remotely(speculative_config)):
            validate(self, speculative_config)
        elif self.logprob_token_ids:
            raise VLLMValidationError(
                f"logprob_token_ids = {self.logprob_token_ids}: steps that verify drafts return no "
                "logprobs of chosen tokens. Leave it out, or ask for the likeliest (logprobs).",
                parameter="logprob_token_ids",
            )

    SamplingParams._validate_spec_decode = _validate_spec_decode  # type: ignore[method-assign]


@functools.cache
def make_our_speculators() -> None:
    """Let Model Runner V2 make our speculators. Called by a worker."""
    from vllm.v1.worker.gpu import model_runner

    from dllm.drafter.self_drafter import SelfDrafter
    from dllm.drafter.speculator import Drafter
    from dllm.remote.speculator import RemoteDrafts

    init_speculator = model_runner.init_speculator

    def init_ours(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if drafts_with_ours(vllm_config.speculative_config):
            kind = SelfDrafter if drafts_itself(vllm_config.speculative_config) else Drafter
            return kind(vllm_config, device, req_states)
        if drafts_remotely(vllm_config.speculative_config):
            return RemoteDrafts(vllm_config, device)
        return init_speculator(vllm_config, device, req_states)

    model_runner.init_speculator = init_ours

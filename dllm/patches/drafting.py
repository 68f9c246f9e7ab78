"""Patches for drafting: our drafter network and speculator serve DFlash drafters, if asked for.

On CUDA a ``drafter`` among our options asks for them, else vLLM's own serve. On a CPU vLLM's do not
run in Model Runner V2, and ours always serve. Servers with another method, or without a drafter,
behave as without these patches, except that our CPU worker verifies the drafts of every method by
our rule.
"""

import functools
from collections.abc import Mapping
from typing import Any

from dllm.models import FAMILIES
from dllm.patches.contract import DRAFTING_SCHEDULER
from dllm.patches.cpu import register_model
from dllm.patches.decoding import (
    configure_self_drafting,
    drafts_itself,
    use_v2_for_autoregressive,
)
from dllm.patches.remote import (
    configure_remote,
    drafts_remotely,
    run_our_speculators_on_v2,
)
from dllm.patches.serving import use_our_worker
from dllm.settings.drafting import DRAFTER_ARCHITECTURE, OUR_DRAFTER

DRAFTER_MODEL = "dllm.drafter.network:DFlashDrafter"


def serve_drafters() -> None:
    """Let this process serve DFlash drafters with our classes, where a server asks for them."""
    from vllm.config import VllmConfig

    register_model(OUR_DRAFTER, DRAFTER_MODEL)
    verify_and_update = VllmConfig.try_verify_and_update_config

    def try_verify_and_update_config(self: Any) -> None:
        is_first = not getattr(self.model_config, "config_updated", True)
        verify_and_update(self)
        if is_first and drafts_itself(self.speculative_config):
            configure_self_drafting(self)
            _choose_classes(self)
        elif is_first and _asks_for_our_drafter(self):
            _configure_drafting(self)
        elif is_first and not configure_remote(self):
            use_v2_for_autoregressive(self)
            _configure_recording(self)

    VllmConfig.try_verify_and_update_config = try_verify_and_update_config  # type: ignore[method-assign]
    run_our_speculators_on_v2()
    _admit_all_sampling_parameters()


def _asks_for_our_drafter(vllm_config: Any) -> bool:
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


def _configure_drafting(vllm_config: Any) -> None:
    """Choose worker, attention backend and scheduler of a server with a drafter.

    Raises:
        ValueError: target and drafter do not fit each other, or a flag does not work with drafting.
    """
    from vllm.platforms import current_platform

    from dllm.drafter.pair import refuse_mismatch

    drafter = refuse_mismatch(vllm_config)
    speculative = vllm_config.speculative_config
    hf_config = speculative.draft_model_config.hf_config
    hf_config.architectures = [OUR_DRAFTER]
    speculative.update_arch_()
    _write_resolved_fields(hf_config, drafter.mask_token_id)
    if not current_platform.is_cpu():
        _choose_draft_attention(speculative, any(layer.is_anchored for layer in drafter.layers))
    _choose_classes(vllm_config)


def _choose_classes(vllm_config: Any) -> None:
    from vllm.platforms import current_platform

    from dllm.drafter.pair import drafter_options
    from dllm.settings.drafting import always_verifies_all

    if vllm_config.lora_config is not None:
        raise ValueError(
            "--enable-lora does not work with --speculative-config: a drafter, also a model that "
            "drafts for itself, drafts for the weights without an adapter. Leave one of them out."
        )
    use_our_worker(
        vllm_config,
        "drafting needs",
        "Leave the flag out, or set DLLM_DISABLE=1 for vLLM's own drafter.",
    )
    speculative, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    options = drafter_options(vllm_config)
    verifies_all = always_verifies_all(options, speculative.num_speculative_tokens)
    if (current_platform.is_cpu() or not verifies_all) and scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = DRAFTING_SCHEDULER
    if not verifies_all:
        _schedule_synchronously(
            vllm_config,
            "how many drafts are verified is decided after each step",
            '"policy" and "width"',
        )
    if options.record is not None:
        _record_synchronously(vllm_config)


def _schedule_synchronously(vllm_config: Any, why: str, options: str) -> None:
    scheduler = vllm_config.scheduler_config
    if scheduler.async_scheduling:
        raise ValueError(
            f"--async-scheduling: {why}, and this schedules the next one before. Leave the flag "
            f"out, or leave {options} out of the drafter's options."
        )
    scheduler.async_scheduling = False


def _record_synchronously(vllm_config: Any) -> None:
    """With asynchronous scheduling one step too many would be recorded of a text that has ended."""
    _schedule_synchronously(
        vllm_config, "whether a text has ended is known after each step", '"record"'
    )


def _configure_recording(vllm_config: Any) -> None:
    """Choose the worker of a server without a drafter that records (``drafter.recording``).

    Raises:
        ValueError: the server cannot record what is asked for.
    """
    from dllm.drafter.recording import refuse_unrecordable
    from dllm.settings.drafting import WHERE
    from dllm.settings.server import PluginOptions

    options = PluginOptions.from_vllm(vllm_config).drafter
    if options.renew is not None:
        raise ValueError(f"{WHERE}: renew without a DFlash drafter. Leave it out.")
    if options.record is None:
        return
    is_diffusion = vllm_config.model_config.architecture in FAMILIES
    if vllm_config.speculative_config is not None or is_diffusion:
        raise ValueError(
            f"{WHERE}: record works for autoregressive targets, with a DFlash drafter or without "
            "--speculative-config. Leave it out."
        )
    refuse_unrecordable(vllm_config)
    use_our_worker(vllm_config, "recording needs")
    _record_synchronously(vllm_config)
    if not vllm_config.use_v2_model_runner:
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


def _choose_draft_attention(speculative: Any, is_anchored: bool) -> None:
    """Let the drafter use our attention backend, unless the user asks for another."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if speculative.attention_backend is None:
        speculative.attention_backend = AttentionBackendEnum.CUSTOM
    elif is_anchored and speculative.attention_backend != AttentionBackendEnum.CUSTOM:
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

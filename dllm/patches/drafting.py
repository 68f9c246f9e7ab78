"""Patches for drafting: our network serves DFlash drafters, and ours steers vLLM's speculators.

With the method "ngram" and ``prompt_lookup`` there is no network: drafts are looked up alone.

On CUDA a ``drafter`` among our options asks for both. On a CPU ours always serves DFlash drafters,
because vLLM's do not run in Model Runner V2 there, and steers what our worker serves.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from vllm import platforms

from dllm.patches.contract import (
    ASYNC_DRAFTING_SCHEDULER,
    CPU_WORKER,
    DRAFTING_SCHEDULER,
    GPU_WORKER,
)
from dllm.patches.cpu import is_cpu_without_triton, schedules_no_step_ahead
from dllm.patches.drafts import LOOKUP, NOISE_DRAFTER, Draft, draft_of
from dllm.patches.neighbours import vllm_version
from dllm.patches.replace import replaces
from dllm.settings.drafting import (
    DRAFTER_ARCHITECTURE,
    OUR_DRAFTER,
    WHERE,
    always_verifies_all,
    has_drafter,
)
from dllm.settings.server import options_of

DRAFTER_MODEL = "dllm.drafter.network:DFlashDrafter"
# Methods of vLLM that ours steers (``drafter.steering``), and drafters of the method "dflash".
SOURCES = ("draft_model", "eagle3", "mtp", "dspark")
SELECTORS = ["DFlash2DraftModel", "LiLiCorrDraftModel"]


def asks_for_our_drafter(vllm_config: Any) -> bool:
    """Whether a server has a DFlash drafter that our classes are to serve."""
    is_dflash = has_drafter(vllm_config.speculative_config, [DRAFTER_ARCHITECTURE])
    return is_dflash and may_be_ours(vllm_config)


def may_be_ours(given: Any) -> bool:
    """Whether our classes serve DFlash drafters with these arguments, or this configuration."""
    return platforms.current_platform.is_cpu() or _has_options(given)


def asks_for_steering(vllm_config: Any) -> bool:
    """Our CPU worker has kernels for the sources that ours steers, and for no others."""
    return vllm_config.speculative_config is not None and bool(_asks_for_ours(vllm_config))


def _asks_for_ours(vllm_config: Any) -> list[str]:
    worker = vllm_config.parallel_config.worker_cls
    chosen = [f"the worker {worker}"] * (worker in (CPU_WORKER, GPU_WORKER))
    return [WHERE] * _has_options(vllm_config) + chosen


def _has_options(vllm_config: Any) -> bool:
    given = vllm_config.additional_config
    ours = given.get("dllm") if isinstance(given, Mapping) else None
    return (ours or {}).get("drafter") is not None


def draft_limits(vllm_config: Any) -> Iterator[tuple[Any, str, str]]:
    """As ``kinds.Kind.refuses`` says."""
    from dllm.drafter.widths.make import may_skip_passes

    why = "drafts are made, or their use is learned, for the weights without an adapter"
    yield vllm_config.lora_config is not None, "--enable-lora", why
    speculative, options = vllm_config.speculative_config, options_of(vllm_config).drafter
    is_unseen = (
        speculative.use_local_argmax_reduction
        and options.policy == "adaptive"
        and schedules_no_step_ahead(vllm_config, why_steps_wait(vllm_config))
    )
    why = 'the policy "adaptive" reads how likely drafts are, which is not computed'
    yield is_unseen, "use_local_argmax_reduction", why
    named = vllm_config.scheduler_config.scheduler_cls
    why = f"it chooses widths; allowed: subclasses of {DRAFTING_SCHEDULER}"
    yield _chooses_widths(vllm_config) and _is_other(named), f"--scheduler-cls {named}", why
    is_idle = options.prompt_lookup and not may_skip_passes(vllm_config)
    why = "ranks would verify other numbers of drafts, or leave out a pass alone, with "
    why += "--prefill-context-parallel-size, or with --data-parallel-size of a target with experts"
    yield is_idle, "prompt_lookup", why


def _chooses_widths(vllm_config: Any) -> bool:
    """Whether a scheduler cuts drafts. A pilot's blocks come as long as it says."""
    options = options_of(vllm_config).drafter
    num_drafts = vllm_config.speculative_config.num_speculative_tokens
    return options.policy != "pilot" and not always_verifies_all(options, num_drafts)


def _is_other(scheduler: Any) -> bool:
    if scheduler in (None, DRAFTING_SCHEDULER, ASYNC_DRAFTING_SCHEDULER):
        return False
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from dllm.drafter.scheduler import DraftingScheduler

    found = resolve_obj_by_qualname(scheduler) if isinstance(scheduler, str) else scheduler
    return not issubclass(found, DraftingScheduler)


def configure_drafting(vllm_config: Any) -> None:
    """Raises ValueError if target and drafter, or a flag and drafting, do not fit."""
    from dllm.drafter.pair import refuse_mismatch

    drafter = refuse_mismatch(vllm_config)
    speculative = vllm_config.speculative_config
    hf_config = speculative.draft_model_config.hf_config
    hf_config.architectures = [OUR_DRAFTER]
    speculative.update_arch_()
    _write_resolved_fields(hf_config, drafter.mask_token_id)
    _choose_attention(vllm_config)


def steering_limits(vllm_config: Any) -> Iterator[tuple[Any, str, str]]:
    """As ``kinds.Kind.refuses`` says."""
    yield from draft_limits(vllm_config)
    speculative = vllm_config.speculative_config
    is_sampled = speculative.draft_sample_method == "probabilistic"
    flag = 'draft_sample_method "probabilistic"'
    why = "a selector of candidates cannot draw with the target's random numbers"
    yield is_sampled and has_drafter(speculative, SELECTORS), flag, why
    why = "a DSpark drafter of a reduced vocabulary cannot draw with the target's random numbers"
    yield is_sampled and _has_reduced_vocabulary(vllm_config), flag, why
    if speculative.method == LOOKUP:
        yield is_sampled, flag, "drafts that are looked up are not drawn"


def _has_reduced_vocabulary(vllm_config: Any) -> bool:
    """A larger one is padded, and its ids are the target's."""
    speculative = vllm_config.speculative_config
    if speculative.method != "dspark":
        return False
    config = speculative.draft_model_config.hf_config
    size = getattr(config, "draft_vocab_size", None) or config.vocab_size
    return bool(size < vllm_config.model_config.get_vocab_size())


def configure_steering(vllm_config: Any) -> None:
    """Raises ValueError: the draft source cannot be steered, or an option does not work with it."""
    from dllm.drafter.pair import check_options
    from dllm.drafter.recording import layers_of_drafter

    _refuse_source(vllm_config)
    if options_of(vllm_config).drafter.record is not None:
        layers_of_drafter(vllm_config)
    check_options(vllm_config)


def _refuse_source(vllm_config: Any) -> None:
    """Raises ValueError for a draft source that ours cannot steer."""
    speculative = vllm_config.speculative_config
    looks_up = speculative.method == LOOKUP and options_of(vllm_config).drafter.prompt_lookup
    is_known = looks_up or speculative.method in SOURCES or has_drafter(speculative, SELECTORS)
    is_special = speculative.use_multi_module_mtp() or speculative.use_gemma4_mtp()
    if not is_known or is_special:
        drafter = ""
        if speculative.method in ("dflash", "mtp"):
            drafter = f" of {', '.join(speculative.draft_model_config.architectures or ())}"
        raise ValueError(
            f"--speculative-config: method = {speculative.method!r}{drafter} with "
            f"{' and '.join(_asks_for_ours(vllm_config))}; "
            f"allowed: {', '.join(SOURCES)} (of one MTP module), dflash of "
            f"{', '.join((DRAFTER_ARCHITECTURE, *SELECTORS))}, and {LOOKUP} with the option "
            '"prompt_lookup". Name one of these, or leave --speculative-config out.'
        )
    unsupported = vllm_config._get_v2_model_runner_unsupported_features()
    if unsupported or not (is_cpu_without_triton() or vllm_config.use_v2_model_runner):
        raise ValueError(
            f"{WHERE} needs vLLM's Model Runner V2, and this server would run another one"
            f"{': ' * bool(unsupported)}{', '.join(unsupported)}."
        )


def why_steps_wait(vllm_config: Any) -> str | None:
    """As ``kinds.Kind.why_synchronous`` says, of a server that drafts or records."""
    from vllm.v1.executor.abstract import Executor

    options, speculative = options_of(vllm_config).drafter, vllm_config.speculative_config
    if options.record is not None:
        # Scheduled ahead, a step behind the end of a text would be recorded, too.
        return 'whether a text has ended is known after each step ("record")'
    if speculative is None:
        return None
    is_narrow = not always_verifies_all(options, speculative.num_speculative_tokens)
    scheduler = vllm_config.scheduler_config
    # A small model's own configuration is made of the target's, which has its scheduler already.
    is_other = scheduler.scheduler_cls not in (None, ASYNC_DRAFTING_SCHEDULER)
    executor = Executor.get_class(vllm_config)
    # vLLM has a check of its own for the last two, but runs it when the scheduler has been chosen.
    whys = {
        'a pilot chooses widths behind a prompt ("policy")': options.policy == "pilot",
        'drafts are looked up behind each step ("prompt_lookup")': options.prompt_lookup,
        'whether the drafter is a new one is known behind each step ("renew")': (
            options.renew is not None and options.policy == "adaptive"
        ),
        "only our scheduler chooses widths ahead, and --scheduler-cls names another one": (
            is_narrow and is_other
        ),
        "disable_padded_drafter_batch with vLLM 0.32": (
            speculative.disable_padded_drafter_batch and vllm_version().startswith("0.32.")
        ),
        "--distributed-executor-backend supports none": not executor.supports_async_scheduling(),
    }
    return next((why for why, is_given in whys.items() if is_given), None)


def configure_recording(vllm_config: Any) -> None:
    """A server without a drafter (``drafter.recording``). Raises ValueError if it cannot record."""
    from dllm.drafter.recording import refuse_unrecordable

    refuse_unrecordable(vllm_config)
    if not (is_cpu_without_triton() or vllm_config.use_v2_model_runner):
        raise ValueError(
            f"{WHERE}: record needs vLLM's Model Runner V2, and this server would run another one."
        )


def _write_resolved_fields(hf_config: Any, mask_token_id: int) -> None:
    """Into the fields that vLLM's own code reads."""
    from dllm.drafter.checkpoint import SPECULATORS

    dflash = dict(getattr(hf_config, "dflash_config", None) or {})
    dflash["mask_token_id"] = mask_token_id
    if hf_config.model_type == SPECULATORS and dflash.get("causal"):
        # With this key vLLM would make full layers causal, too. Without it only sliding ones are.
        del dflash["causal"]
    hf_config.dflash_config = dflash


def _choose_attention(vllm_config: Any) -> None:
    """Ours, unless the user asks for another. Raises ValueError if that cannot serve it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dllm.drafter.pair import drafter_config

    is_fused = options_of(vllm_config).drafter.fused_context
    if platforms.current_platform.is_cpu():
        if is_fused:
            raise ValueError(
                f"{WHERE}: fused_context on a CPU; allowed: on a GPU, because it is a Triton "
                "kernel. Leave it out."
            )
        return
    speculative = vllm_config.speculative_config
    if speculative.attention_backend is None:
        speculative.attention_backend = AttentionBackendEnum.CUSTOM
    if speculative.attention_backend == AttentionBackendEnum.CUSTOM:
        return
    name = speculative.attention_backend.name
    if any(layer.mask.is_anchored for layer in drafter_config(vllm_config).layers):
        raise ValueError(
            f"attention_backend {name} of --speculative-config has no draft window. Leave it out, "
            "or leave the drafter's window out."
        )
    if is_fused:
        raise ValueError(
            f"{WHERE}: fused_context with attention_backend {name} of --speculative-config; "
            "allowed: our own, whose pages the kernel writes. Leave one of them out."
        )


@functools.cache
def make_our_speculators() -> None:
    from vllm.v1.worker.gpu import model_runner

    from dllm.drafter.scheduled import ScheduledDrafts
    from dllm.drafter.self_drafter import NoiseDrafter, SelfDrafter
    from dllm.drafter.sources import make_steered
    from dllm.drafter.speculator import Drafter

    @replaces(model_runner)
    def init_speculator(theirs: Any, vllm_config: Any, device: Any, req_states: Any) -> Any:
        draft = draft_of(vllm_config.speculative_config)
        if draft is None:
            return theirs(vllm_config, device, req_states)
        if draft is Draft.ITSELF:
            is_noise = vllm_config.speculative_config.model == NOISE_DRAFTER
            return (NoiseDrafter if is_noise else SelfDrafter)(vllm_config, device)
        if draft is Draft.NETWORK:
            return Drafter(vllm_config, device)
        make = make_steered if draft is Draft.SOURCE else ScheduledDrafts
        return make(vllm_config, device)

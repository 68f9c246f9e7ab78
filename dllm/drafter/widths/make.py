"""Makes the width policy that a server's options ask for."""

from typing import Any

from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.pilot import PilotWidth
from dllm.drafter.widths.policy import FixedWidth, WidthPolicy
from dllm.settings.drafting import DrafterOptions
from dllm.settings.remote import RemoteOptions


def make_policy(
    options: DrafterOptions | RemoteOptions,
    num_drafts: int,
    num_slots: int,
    reads_confidence: bool = True,
) -> WidthPolicy:
    """
    Args:
        num_slots: requests that the policy tells apart.
        reads_confidence: whether the drafter's probabilities are known where it is asked.
    """
    if options.policy == "adaptive":
        return AdaptiveWidth(num_drafts, num_slots, reads_confidence, options.hysteresis)
    if isinstance(options, DrafterOptions) and options.policy == "pilot":
        assert options.pilot is not None, "checked by DrafterOptions"
        return PilotWidth(num_drafts, num_slots, options.pilot)
    assert options.policy == "fixed", options.policy
    return FixedWidth(num_drafts, options.width)


def may_skip_passes(vllm_config: Any) -> bool:
    """Whether a step can go without a draft pass.

    Where replicas share experts all of them take part in every draft pass, and with prefill context
    parallelism all ranks of a prompt. Then no single one of them may leave a pass out. Replicas of
    other targets are servers of their own.
    """
    parallel = vllm_config.parallel_config
    num_replicas = parallel.data_parallel_size if vllm_config.model_config.is_moe else 1
    return bool(num_replicas == parallel.prefill_context_parallel_size == 1)

"""Makes the width policy that a server's options ask for, and its driver."""

from typing import Any

from dllm.drafter.widths.adaptive import AdaptiveWidth, LookupWidth
from dllm.drafter.widths.driver import WidthDriver
from dllm.drafter.widths.policy import FixedWidth, WidthPolicy
from dllm.engine.metrics import Counts
from dllm.settings.drafting import DrafterOptions
from dllm.settings.remote import RemoteOptions
from dllm.settings.server import options_of


def make_driver(vllm_config: Any, counts: Counts, reads_confidence: bool) -> WidthDriver:
    """``reads_confidence``: the drafter's probabilities are known where widths are chosen."""
    options, speculative = options_of(vllm_config), vllm_config.speculative_config
    num_slots = vllm_config.scheduler_config.max_num_seqs
    num_drafts = speculative.num_speculative_tokens
    if speculative.method == "ngram":
        policy: WidthPolicy = LookupWidth(num_drafts, num_slots)
    else:
        policy = make_policy(
            options.remote or options.drafter, num_drafts, num_slots, reads_confidence
        )
    policy.may_skip = may_skip_passes(vllm_config)
    return WidthDriver(policy, num_slots, counts)


def make_policy(
    options: DrafterOptions | RemoteOptions,
    num_drafts: int,
    num_slots: int,
    reads_confidence: bool = True,
) -> WidthPolicy:
    if options.policy == "adaptive":
        return AdaptiveWidth(num_drafts, num_slots, reads_confidence)
    return FixedWidth(num_drafts, options.width)  # of a pilot's blocks: all that was drafted


def may_skip_passes(vllm_config: Any) -> bool:
    """Whether a step can go without a draft pass.

    Where replicas share experts all of them take part in every draft pass, and with prefill context
    parallelism all ranks of a prompt. Then no single one of them may leave a pass out. Replicas of
    other targets are servers of their own.
    """
    parallel = vllm_config.parallel_config
    num_replicas = parallel.data_parallel_size if vllm_config.model_config.is_moe else 1
    return bool(num_replicas == parallel.prefill_context_parallel_size == 1)

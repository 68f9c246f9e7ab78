"""Which of vLLM's Triton kernels are replaced on a CPU, and by what."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from dllm.cpu import batch, draft_model, drafting, eagle, edits, logits, sampling

# A function that replaces a Triton kernel. It takes the arguments of the launch, without the grid.
Kernel = Callable[..., None]

# By the module of vLLM's Model Runner V2 that has kernels of these names.
_REPLACED: dict[str, tuple[Kernel, ...]] = {
    "block_table": (
        batch._gather_block_tables_kernel,
        batch._compute_slot_mappings_kernel,
    ),
    "buffer_utils": (batch._apply_write_kernel,),
    "input_batch": (
        batch._prepare_prefill_inputs_kernel,
        batch._prepare_pos_seq_lens_kernel,
        batch._combine_sampled_and_draft_tokens_kernel,
        batch._expand_idx_mapping_kernel,
        batch._post_update_kernel,
        batch._post_update_num_computed_tokens_kernel,
        sampling._get_num_sampled_and_rejected_kernel,
    ),
    "metrics.logits": (sampling._num_nans_kernel,),
    "sample.bad_words": (edits._bad_words_kernel,),
    "sample.gumbel": (sampling._gumbel_sample_kernel, sampling._temperature_kernel),
    "sample.logit_bias": (edits._bias_kernel,),
    "sample.logprob": (
        logits._topk_log_softmax_kernel,
        logits._ranks_kernel,
        logits._fill_logprob_token_ids_kernel,
    ),
    "sample.min_p": (sampling._min_p_kernel,),
    "sample.penalties": (edits._penalties_kernel, edits._bincount_kernel),
    "sample.prompt_logprob": (edits._prompt_logprobs_token_ids_kernel,),
    "spec_decode.dflash.speculator": (drafting._prepare_dflash_inputs_kernel,),
    "spec_decode.dflash2.speculator": (drafting._selector_walk_kernel,),
    "spec_decode.rejection_sampler": (
        drafting._flatten_sampled_kernel,
        drafting._gather_draft_sampled_kernel,
    ),
    "spec_decode.standalone_ar.speculator": (draft_model._prepare_prefill_inputs_kernel,),
    "spec_decode.target_dependent_ar.speculator": (
        eagle._prepare_prefill_inputs_kernel,
        eagle._prepare_decode_inputs_kernel,
        eagle._update_draft_inputs_kernel,
    ),
    "structured_outputs": (logits._apply_grammar_bitmask_kernel,),
}

KERNELS: dict[str, Kernel] = {
    f"vllm.v1.worker.gpu.{module}.{kernel.__name__}": kernel
    for module, kernels in _REPLACED.items()
    for kernel in kernels
}


def kernels(is_0_32: bool) -> dict[str, Kernel]:
    """``KERNELS``, as vLLM 0.33 or 0.32 calls them."""
    if not is_0_32:
        return KERNELS
    drafted, sampled = drafting._prepare_dflash_inputs_kernel, sampling._gumbel_sample_kernel
    differ: dict[Kernel, Kernel] = {
        drafted: _without(drafted, "out_is_padding_ptr"),
        sampled: partial(sampled, SEED_HAS_STEP=False),
    }
    return {name: differ.get(kernel, kernel) for name, kernel in KERNELS.items()}


def _without(kernel: Kernel, name: str) -> Kernel:
    """A kernel whose callers know nothing of one of its parameters, which is None."""
    signature = inspect.signature(kernel)
    known = [one for one in signature.parameters.values() if one.name != name]
    known_signature = signature.replace(parameters=known)

    def call(*args: Any, **named: Any) -> None:
        kernel(**known_signature.bind(*args, **named).arguments, **{name: None})

    call.__signature__ = known_signature  # type: ignore[attr-defined]
    return call

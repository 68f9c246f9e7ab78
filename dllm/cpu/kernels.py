"""Which of vLLM's Triton kernels are replaced on a CPU, and by what."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from dllm.cpu import batch, draft_model, drafting, eagle, edits, logits, sampling

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
    "model_states.prompt_embeds": (batch._apply_prompt_embeds_kernel,),
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
    "sample.thinking_budget": (
        edits._update_committed_marker_cache_kernel,
        edits._thinking_budget_kernel,
    ),
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
KERNELS["vllm.v1.worker.utils._zero_kv_blocks_kernel"] = batch._zero_kv_blocks_kernel
GUMBEL = "vllm.v1.worker.gpu.sample.gumbel._gumbel_sample_kernel"


def kernels(parameters_of: Callable[[str], Sequence[str]], is_0_32: bool) -> dict[str, Kernel]:
    """By the names of the kernels that they replace, as vLLM launches these.

    Args:
        parameters_of: of a kernel of the vLLM that is installed, by its name.
        is_0_32: whether that is vLLM 0.32, where seeds of drafts do not hold their step.
    """
    found = {name: _launched(kernel, parameters_of(name)) for name, kernel in KERNELS.items()}
    if is_0_32:
        sampled = partial(KERNELS[GUMBEL], SEED_HAS_STEP=False)
        found[GUMBEL] = _launched(sampled, parameters_of(GUMBEL))
    return found


def _launched(kernel: Kernel, theirs: Sequence[str]) -> Kernel:
    """Called as vLLM calls its own kernel, with what ours has a parameter for."""
    ours = frozenset(inspect.signature(kernel).parameters)

    def launch(*args: Any, **named: Any) -> None:
        given = chain(zip(theirs, args, strict=False), named.items())
        kernel(**{name: value for name, value in given if name in ours})

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    launch.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # vLLM compares it
        [inspect.Parameter(name, kind) for name in theirs]
    )
    return launch

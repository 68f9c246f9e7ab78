"""The drafter's KV cache beside a target's whose dtype is another one.

The drafter keeps keys and values in the model's dtype, whatever ``--kv-cache-dtype`` says about the
target: its cache is small. ``kv_cache_dtype`` of ``--speculative-config`` may say another one.

If some layers have a window, all pages get the size of the largest in bytes: a page that divides it
holds more tokens, any other one is padded (vLLM's ``unify_kv_cache_spec_page_size``). FP8 pages
divide the drafter's; packed ones can become several times as large.
"""

import copy

from vllm.config import SpeculativeConfig, VllmConfig

# What our attention backends keep, as ``attention.backend`` says, which needs Triton.
OWN_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")


def refuse_cache_dtype(speculative: SpeculativeConfig) -> None:
    """Raises ValueError for a ``kv_cache_dtype`` of ``--speculative-config`` that is not kept."""
    dtype, backend = speculative.kv_cache_dtype, speculative.attention_backend
    if dtype in (None, *OWN_DTYPES) or (backend is not None and backend.name != "CUSTOM"):
        return
    raise ValueError(
        f"kv_cache_dtype = {dtype!r} of --speculative-config; the drafter's attention keeps one of "
        f"{', '.join(OWN_DTYPES)}. Leave it out: the drafter's cache then has the model's dtype, "
        "whatever --kv-cache-dtype is."
    )


def with_own_cache(vllm_config: VllmConfig) -> VllmConfig:
    """A shallow copy for the drafter's layers, without the target's cache dtype and window."""
    speculative = vllm_config.speculative_config
    assert speculative is not None, "no drafter"
    own = copy.copy(vllm_config)
    own.cache_config = cache = copy.copy(vllm_config.cache_config)
    cache.cache_dtype = speculative.kv_cache_dtype or "auto"
    cache.sliding_window = None
    return own

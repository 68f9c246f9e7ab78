"""On a CPU a page of the KV cache is cleared before a request gets it.

vLLM's attention kernel for CPUs reads whole pages, and multiplies what is behind a sequence's end
by 0. If that is NaN, because the page's last request was not finite, the next one is not, either.
vLLM itself clears pages for some kinds of models.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from dllm.patches.replace import replaces
from dllm.settings.vllm_names import kv_cache_planning


class ClearedPages(KVCacheConfig):
    needs_kv_cache_zeroing = True


def clear_pages(is_served: Callable[[Any], bool]) -> None:
    """``is_served``: whether our kernels serve a configuration."""

    @replaces(kv_cache_planning)
    def get_kv_cache_config_from_groups(
        theirs: Any, vllm_config: Any, *args: Any, **kwargs: Any
    ) -> KVCacheConfig:
        config: KVCacheConfig = theirs(vllm_config, *args, **kwargs)
        return ClearedPages(**vars(config)) if is_served(vllm_config) else config

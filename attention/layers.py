"""What a model asks of its attention layers beyond what vLLM's ``Attention`` offers.

Each function changes one layer, on a GPU and on a CPU. Call it before the KV cache is allocated.
Other models in the process keep vLLM's backends.
"""

from vllm.model_executor.layers.attention import Attention

from dllm.attention.masks import Mask


def see(layer: Attention, *, is_anchored: bool = False, block_length: int = 1) -> None:
    """Let a layer's rows see what `masks.Mask` says, beside the window that vLLM gave it."""
    if is_anchored or block_length > 1:
        impl = layer.impl
        impl.mask = Mask(max(impl.sliding_window or 0, 0) or None, is_anchored, block_length)


def bound_queries(layer: Attention, max_query_len: int) -> None:
    """Promise that no sequence has more query rows, so that tiles are no higher than these need."""
    if layer.attn_backend.get_name() == "CUSTOM":
        layer.impl.max_query_len = max_query_len

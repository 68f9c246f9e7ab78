"""What a model asks of its attention layers beyond what vLLM's ``Attention`` offers.

Each function changes one layer, on a GPU and on a CPU. Call it before the KV cache is allocated.
Other models in the process keep vLLM's backends.
"""

from dataclasses import replace

from vllm.model_executor.layers.attention import Attention


def use_anchored_window(layer: Attention) -> None:
    """Give canvases of a sliding-window layer a first visible key (`masks.py`).

    Without this call the window is symmetric.
    """
    if layer.attn_backend.get_name() == "CPU_ATTN":
        from dllm.attention.cpu_backend import translate

        translate(layer, is_anchored=True)
    else:
        assert layer.impl.options.window is not None, "only sliding-window layers can be anchored"
        layer.impl.is_anchored = True


def see_blocks(layer: Attention, block_size: int) -> None:
    """Let causal rows see their whole block of ``block_size`` positions (`masks.py`)."""
    if block_size == 1:
        return
    if layer.attn_backend.get_name() == "CPU_ATTN":
        from dllm.attention.cpu_backend import translate

        translate(layer, block_size=block_size)
    else:
        layer.impl.options = replace(layer.impl.options, block_size=block_size)


def bound_queries(layer: Attention, max_query_len: int) -> None:
    """Promise that no sequence has more query rows, so that tiles are no higher than these need."""
    if layer.attn_backend.get_name() == "CUSTOM":
        layer.impl.max_query_len = max_query_len

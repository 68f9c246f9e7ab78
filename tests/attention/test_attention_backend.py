"""What can be seen of our attention backend in a CUDA server without one.

That vLLM's selector accepts it for the layers of the 26B model, and that a captured graph would
read nothing but persistent tensors. When it is chosen, ``tests/patches/test_cuda_start.py`` shows.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.v1.attention.backend import CommonAttentionMetadata

from dllm.attention.masks import Mask
from tests.support.recorded_calls import record_calls


@pytest.mark.parametrize(
    ("causal", "heads", "kind", "ahead"),
    [
        (True, None, "causal", 0),
        (False, None, "canvases", 8),
        ("flags", None, "mixed", 8),
        ("flags", [True, True], "causal", 0),
        ("flags", [False, False], "canvases", 8),
        ("flags", [False, True], "mixed", 2),
    ],
)
def test_what_the_host_knows_of_a_batch(causal, heads, kind, ahead):
    """Its kind, and how far ahead of a row the keys lie that it sees."""
    from dllm.attention.backend import _kind_of, _max_ahead

    flags = torch.tensor([0, 1]) if causal == "flags" else causal
    heads = None if heads is None else torch.tensor(heads)
    starts = torch.tensor([0, 3, 12])
    common = SimpleNamespace(
        causal=flags, is_prefilling=heads, query_start_loc_cpu=starts, max_query_len=9
    )
    assert _kind_of(common) == kind
    assert _max_ahead(common, kind) == ahead


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(("head_size", "is_sliding"), [(256, True), (512, False)])
def test_vllm_accepts_our_backend_for_the_layers_of_the_26b_model(
    head_size, is_sliding, cache_dtype
):
    """The released config lets image rows see each other (use_mm_prefix)."""
    from dllm.attention.backend import CanvasAttentionBackend

    asked = {
        name: False
        for name in inspect.signature(CanvasAttentionBackend.validate_configuration).parameters
    } | {
        "head_size": head_size,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": cache_dtype,
        "block_size": 32,
        "device_capability": None,
        "attn_type": "decoder",
        "has_sliding_window": is_sliding,
        "use_non_causal": True,
        "use_mm_prefix": True,
        "use_batch_invariant": True,
    }
    assert CanvasAttentionBackend.validate_configuration(**asked) == []
    assert CanvasAttentionBackend.validate_configuration(**(asked | {"use_mla": True})) != []


def server(is_anchored=False, **layer):
    """What the builder and the layers read of a server's configuration, with one layer."""
    impl = SimpleNamespace(max_query_len=None, head_size=64, kv_cache_dtype="auto")
    impl.mask = Mask(24, is_anchored)
    vars(impl).update(layer)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=512),
        model_config=SimpleNamespace(
            max_model_len=8192, is_mm_prefix_lm=False, dtype=torch.bfloat16
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(impl=impl)}
        ),
        attention_config=SimpleNamespace(flash_attn_version=None),
        diffusion_config=None,
    )


def batch_of(metadata):
    """What our kernel gets, if it serves all rows."""
    (call,) = metadata.calls
    assert not call.is_flash
    return call.batch


def test_the_memory_profile_counts_the_largest_workspace(monkeypatch):
    """vLLM profiles without attention, and gives what is left to the KV cache."""
    from dllm.attention import backend

    config = server()
    monkeypatch.setattr(backend, "get_current_vllm_config_or_none", lambda: config)
    allocated = record_calls(monkeypatch, torch.Tensor, "new_empty")
    layer = backend.CanvasAttentionImpl(16, 512, 1.0, 2)
    query, output = torch.zeros(9, 16, 512, dtype=torch.bfloat16), torch.ones(9, 16, 512)
    layer.forward(None, query, None, None, None, None, output)
    assert not output.any()
    config.model_config.max_model_len = 64  # no sequence is split
    backend.CanvasAttentionImpl(16, 512, 1.0, 2).forward(
        None, query, None, None, None, None, output
    )
    sizes = [given[1] for given, _ in allocated]
    assert sizes[0] > 512 * 16 * 512 and sizes[1] == 0


def test_canvases_of_an_anchored_layer_have_a_first_key_and_nothing_else_has():
    """A canvas near the start, one behind it, a causal sequence, an image, a padded sequence."""
    from dllm.attention.backend import CanvasAttentionMetadataBuilder

    config = server(is_anchored=True)
    builder = CanvasAttentionMetadataBuilder(None, ["layer"], config, torch.device("cpu"))
    starts = torch.tensor([0, 16, 32, 48, 60, 60], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([30, 116, 116, 112, 0], dtype=torch.int32),
        num_reqs=5,
        num_actual_tokens=60,
        max_query_len=16,
        max_seq_len=116,
        block_table_tensor=torch.zeros(5, 8, dtype=torch.int32),
        slot_mapping=torch.zeros(60, dtype=torch.int64),
        causal=torch.tensor([0, 0, 1, 0, 0], dtype=torch.int32),
        mm_req_doc_ranges={3: [(100, 111)]},
    )
    first_keys = [batch_of(builder.build(0, common)).first_keys for _ in range(2)]
    assert first_keys[0].tolist() == [0, 100 - 23, -1, -1, 0]
    assert first_keys[0].data_ptr() == first_keys[1].data_ptr(), "a graph reads the same memory"


def test_a_cache_that_vllm_drops_is_freed():
    """As that of its memory profile: nothing of ours keeps it."""
    from dllm.attention.backend import CanvasAttentionImpl

    impl = CanvasAttentionImpl(2, 16, 1.0, 2)
    cache = torch.zeros(3, 2, 32, 32)
    views = impl.paged_kv(None, cache)
    views.key[1, 4, 1], views.value[1, 4, 1] = 1.0, 2.0
    assert cache[1, 1, 4].tolist() == [1.0] * 16 + [2.0] * 16
    assert impl.paged_kv(None, cache) is views
    memory = StorageWeakRef(cache.untyped_storage())
    del cache, views
    assert memory.expired()

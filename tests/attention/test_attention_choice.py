"""Which kernel serves which batch, and the call of vLLM's FlashAttention, without a GPU."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import vllm

from dllm.attention import choice, flash
from dllm.attention.choice import KINDS, MIXED, choose_kernel, mask_of
from dllm.attention.reference import gather_pages
from dllm.engine.attention_layers import Layer
from dllm.engine.kernel_checks import Wrong, attention
from tests.support.fake_cuda import GPUS
from tests.support.process import ROOT

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
UNBOUNDED, SYMMETRIC = mask_of(None, False, 1), mask_of(1024, False, 1)
ANCHORED, BLOCKS = mask_of(1024, True, 1), mask_of(None, False, 32)
SIZES = (64, 128, 256, 512)
# The rows of the table in docs/serving.md, by the words of their second column.
LAYERS = {
    "16-bit KV cache, `symmetric` window or none": [
        (size, dtype, mask)
        for size in SIZES
        for dtype in (BF16, torch.float16)
        for mask in (UNBOUNDED, SYMMETRIC)
    ],
    "FP8 KV cache, `anchored` window, or a model with blocks": [
        *((size, FP8, mask) for size in SIZES for mask in (UNBOUNDED, SYMMETRIC)),
        *((size, BF16, mask) for size in SIZES for mask in (ANCHORED, BLOCKS)),
    ],
}
LAYERS["any"] = [case for cases in LAYERS.values() for case in cases]


def arch_of(gpu: str) -> int:
    major, minor = GPUS[gpu].capability
    return 10 * major + minor


def documented() -> list[list[str]]:
    lines = re.findall(r"^\| .*`CUSTOM`.*\|$", (ROOT / "docs/serving.md").read_text(), re.M)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_says_what_the_function_chooses():
    rows = documented()
    gpus = {name.strip().lower().replace(" ", "") for row in rows for name in row[0].split(",")}
    assert gpus == set(GPUS)
    for names, layers, *kernels in rows:
        for gpu in names.lower().replace(" ", "").split(","):
            for size, dtype, mask in LAYERS[layers]:
                chosen = [
                    choose_kernel(arch_of(gpu), size, dtype, mask, kind, True, None)
                    for kind in ("canvases", "causal", MIXED)
                ]
                assert chosen == [name.strip("`") for name in kernels], (gpu, size, dtype, mask)


@pytest.mark.parametrize("gpu", GPUS)
def test_without_flash_attention_and_on_request_ours_serves_all(gpu):
    for size, dtype, mask in LAYERS["any"]:
        for kind in KINDS:
            for has_flash, option in ((False, None), (False, "CUSTOM"), (True, "CUSTOM")):
                chosen = choose_kernel(arch_of(gpu), size, dtype, mask, kind, has_flash, option)
                assert chosen == choice.OURS


@pytest.mark.parametrize(
    ("option", "gpu", "size", "dtype", "mask", "has_flash", "serves"),
    [
        ("TRITON_ATTN", "a100", 512, BF16, SYMMETRIC, False, True),
        ("TRITON_ATTN", "a100", 512, BF16, ANCHORED, False, False),
        ("TRITON_ATTN", "a100", 512, BF16, BLOCKS, False, False),
        ("FLASH_ATTN", "h200", 512, BF16, SYMMETRIC, True, True),
        ("FLASH_ATTN", "h200", 512, BF16, ANCHORED, True, False),
        ("FLASH_ATTN", "h200", 512, BF16, SYMMETRIC, False, False),
        ("FLASH_ATTN", "h200", 256, FP8, SYMMETRIC, True, False),
        ("FLASH_ATTN", "b200", 128, BF16, UNBOUNDED, True, True),
        ("FLASH_ATTN", "b200", 512, BF16, UNBOUNDED, True, False),
        ("FLASHINFER", "h200", 128, BF16, UNBOUNDED, True, False),
    ],
)
def test_another_backend_serves_all_batches_or_is_refused(
    option, gpu, size, dtype, mask, has_flash, serves
):
    asked = arch_of(gpu), size, dtype, mask
    if serves:
        assert {choose_kernel(*asked, kind, has_flash, option) for kind in KINDS} == {option}
    else:
        with pytest.raises(ValueError, match=f"--attention-backend {option}"):
            choose_kernel(*asked, MIXED, has_flash, option)


# --- the call -------------------------------------------------------------------------------------


def flash_forward(q, k, v, *, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table,
                  softmax_scale, causal, dynamic_causal, softcap, window_size_left,
                  window_size_right, out, **rest):  # fmt: skip
    """FlashAttention 4 as vLLM's docstring of ``flash_attn_varlen_func`` defines it, densely."""
    assert (causal, window_size_left is None) in ((True, True), (False, False))
    starts = cu_seqlens_q.tolist()
    for index, length in enumerate(seqused_k.tolist()):
        rows = slice(starts[index], starts[index + 1])
        query = q[rows].float()
        assert len(query) <= max_seqlen_q and length <= max_seqlen_k
        key, value = (gather_pages(each, page_table[index], length).float() for each in (k, v))
        group = query.shape[1] // key.shape[1]
        logits = torch.einsum("ihd,khd->hik", query, key.repeat_interleave(group, 1))
        logits *= softmax_scale
        ahead = torch.arange(length) - (torch.arange(len(query)) + length - len(query))[:, None]
        sees = torch.ones_like(ahead, dtype=torch.bool)
        if window_size_left is not None:
            sees = (ahead >= -window_size_left) & (ahead <= window_size_right)
        if dynamic_causal[index]:
            sees &= ahead <= 0
        probs = logits.masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num()
        out[rows] = torch.einsum("hik,khd->ihd", probs, value.repeat_interleave(group, 1))
    return out, None, None, None


@pytest.fixture
def plant(monkeypatch):
    """Puts a function in the place of FlashAttention 4, behind vLLM's own wrapper."""

    def planted(forward):
        folder = Path(vllm.__file__).parent / "vllm_flash_attn"
        spec = importlib.util.spec_from_file_location(
            "flash_wrapper", folder / "flash_attn_interface.py"
        )
        wrapper = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(wrapper)
        interface = ModuleType("vllm.vllm_flash_attn.cute.interface")
        interface._flash_attn_fwd = forward
        for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, interface.__name__, interface)
        monkeypatch.setattr(
            flash.fa_utils, "flash_attn_varlen_func", wrapper.flash_attn_varlen_func, raising=False
        )

    return planted


CHECKED = [
    Layer(head_size=16, context=70, window=window, num_kv_heads=kv_heads)
    for window in (None, 48)
    for kv_heads in (1, 2)
]


@pytest.mark.parametrize("layer", CHECKED, ids=str)
def test_our_call_means_what_our_definition_says(plant, layer, monkeypatch):
    """Canvases and a prompt chunk, through the check that runs before a GPU serves."""
    write_pages(monkeypatch)
    plant(flash_forward)
    attention(layer, torch.device("cpu"), flash.flash_attention)


def deaf_to_flags(*given, dynamic_causal, **rest):
    return flash_forward(*given, dynamic_causal=0 * dynamic_causal, **rest)


def one_key_short(*given, window_size_left, **rest):
    return flash_forward(*given, window_size_left=window_size_left - 1, **rest)


@pytest.mark.parametrize("wrong", [deaf_to_flags, one_key_short])
def test_a_wrong_one_is_noticed(plant, wrong, monkeypatch):
    write_pages(monkeypatch)
    plant(wrong)
    with pytest.raises(Wrong):
        attention(CHECKED[-1], torch.device("cpu"), flash.flash_attention)


def write_pages(monkeypatch):
    """Triton writes the cache on a GPU; here torch does."""
    from dllm.engine import kernel_checks

    def write(key, value, cache, slots):
        cache.key.view(-1, *key.shape[1:])[slots] = key
        cache.value.view(-1, *key.shape[1:])[slots] = value

    monkeypatch.setattr(kernel_checks, "write_kv", write)

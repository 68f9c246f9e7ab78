"""Which kernel serves which batch, and the call of vLLM's FlashAttention, without a GPU."""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import vllm

from dllm.attention import choice, flash
from dllm.attention.cases import Wrong
from dllm.attention.choice import CANVASES, CAUSAL, KINDS, choose_kernel
from dllm.attention.inputs import Layer
from dllm.attention.masks import ALL, Mask, QuerySpan, visible_range
from dllm.attention.reference import gather_pages, paged_attention
from dllm.engine import kernel_checks
from tests.attention.test_attention_reference import torch_attention
from tests.support.fake_cuda import GPUS
from tests.support.process import ROOT

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SYMMETRIC, ANCHORED, BLOCKS = Mask(1024), Mask(1024, is_anchored=True), Mask(block_length=32)
SIZES = (64, 128, 256, 512)
# The rows of the table in docs/serving.md, by the words of their second column.
LAYERS = {
    "16-bit KV cache, `symmetric` window or none": [
        Layer(head_size=size, dtype=dtype, mask=mask)
        for size in SIZES
        for dtype in (BF16, torch.float16)
        for mask in (ALL, SYMMETRIC)
    ],
    "16-bit KV cache, `anchored` window": [
        Layer(head_size=size, mask=ANCHORED, dtype=BF16) for size in SIZES
    ],
    "FP8 KV cache, or a model with blocks": [
        *(
            Layer(head_size=size, mask=mask, cache_dtype=FP8)
            for size in SIZES
            for mask in (ALL, SYMMETRIC, ANCHORED)
        ),
        *(Layer(head_size=size, mask=BLOCKS, dtype=BF16) for size in SIZES),
    ],
}
LAYERS["any"] = [case for cases in LAYERS.values() for case in cases]


def arch_of(gpu: str) -> int:
    major, minor = GPUS[gpu].capability
    return 10 * major + minor


def documented() -> list[list[str]]:
    rows = r"^\| .*(?:`CUSTOM`|`FLASH_ATTN`) \|$"
    lines = re.findall(rows, (ROOT / "docs/serving.md").read_text(), re.M)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_says_what_the_function_chooses():
    rows = documented()
    gpus = {name.strip().lower().replace(" ", "") for row in rows for name in row[0].split(",")}
    assert gpus == set(GPUS)
    for names, layers, *kernels in rows:
        for gpu in names.lower().replace(" ", "").split(","):
            for layer in LAYERS[layers]:
                chosen = [
                    choose_kernel(layer, kind, arch_of(gpu), True, None)
                    for kind in (CANVASES, CAUSAL)
                ]
                assert chosen == [name.strip("`") for name in kernels], (gpu, layer)


@pytest.mark.parametrize("gpu", GPUS)
def test_without_flash_attention_and_on_request_ours_serves_all(gpu):
    for layer in LAYERS["any"]:
        for kind in KINDS:
            for has_flash, option in ((False, None), (False, "CUSTOM"), (True, "CUSTOM")):
                chosen = choose_kernel(layer, kind, arch_of(gpu), has_flash, option)
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
        ("FLASH_ATTN", "b200", 128, BF16, ALL, True, True),
        ("FLASH_ATTN", "b200", 512, BF16, ALL, True, False),
        ("FLASHINFER", "h200", 128, BF16, ALL, True, False),
    ],
)
def test_another_backend_serves_all_rows_or_is_refused(
    option, gpu, size, dtype, mask, has_flash, serves
):
    layer, asked = Layer(head_size=size, mask=mask, cache_dtype=dtype), (arch_of(gpu), has_flash)
    if serves:
        assert {choose_kernel(layer, kind, *asked, option) for kind in KINDS} == {option}
    else:
        with pytest.raises(ValueError, match=f"--attention-backend {option}"):
            choose_kernel(layer, CANVASES, *asked, option)


# --- the call -------------------------------------------------------------------------------------


def flash_forward(q, k, v, *, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table,
                  softmax_scale, causal, dynamic_causal, softcap, window_size_left,
                  window_size_right, out, **rest):  # fmt: skip
    """FlashAttention 4 as vLLM's docstring of ``flash_attn_varlen_func`` defines it, densely."""
    assert (causal, window_size_left is None) in ((True, True), (False, False))
    assert dynamic_causal is not None, "it would run the kernel of calls with flags"
    starts = cu_seqlens_q.tolist()
    for index, length in enumerate(seqused_k.tolist()):
        rows = slice(starts[index], starts[index + 1])
        query = q[rows].float()
        assert len(query) <= max_seqlen_q and length <= max_seqlen_k
        key, value = (gather_pages(each, page_table[index], length).float() for each in (k, v))
        ahead = torch.arange(length) - (torch.arange(len(query)) + length - len(query))[:, None]
        sees = torch.ones_like(ahead, dtype=torch.bool)
        if window_size_left is not None:
            sees = (ahead >= -window_size_left) & (ahead <= window_size_right)
        if dynamic_causal[index]:
            sees &= ahead <= 0
        out[rows] = torch_attention(query, key, value, sees, softmax_scale).nan_to_num()
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


CPU = torch.device("cpu")
WINDOW, CONTEXT = 48, 70
# Pages of 16 keys lie in front of the window.
CHECKED = [
    Layer(head_size=16, mask=mask, num_kv_heads=kv_heads, dtype=BF16)
    for mask in (ALL, Mask(WINDOW))
    for kv_heads in (1, 2)
]


@pytest.mark.parametrize(
    "layer", [*CHECKED, replace(CHECKED[-1], mask=Mask(WINDOW, is_anchored=True))], ids=str
)
def test_our_calls_mean_what_our_definition_says(plant, layer, monkeypatch):
    """Canvases and a prompt chunk, through the check that runs before a GPU serves."""
    without_triton(monkeypatch)
    plant(flash_forward)
    kernel_checks.flash(layer, CPU, CONTEXT)


def test_through_a_window_few_keys_are_read(plant, monkeypatch):
    """FlashAttention reads all keys of a canvas, and those ahead of a causal row."""
    without_triton(monkeypatch)
    calls = []

    def noted(*given, **named):
        calls.append(named)
        return flash_forward(*given, **named)

    plant(noted)
    kernel_checks.flash(CHECKED[-1], CPU, CONTEXT)
    causal, mixed = calls
    assert (causal["window_size_left"], causal["window_size_right"]) == (WINDOW - 1, 0)
    assert (mixed["window_size_left"], mixed["window_size_right"]) == (WINDOW - 1, 32 - 1)
    assert mixed["seqused_k"].tolist() == [64, 70 + 32 - 16, 64]  # 23 keys lie in front
    assert mixed["max_seqlen_k"] == 102


def deaf_to_flags(*given, dynamic_causal, **rest):
    return flash_forward(*given, dynamic_causal=0 * dynamic_causal, **rest)


def one_key_short(*given, window_size_left, **rest):
    return flash_forward(*given, window_size_left=window_size_left - 1, **rest)


def of_the_first_window(*given, window_size_right, **rest):
    """As if a kernel were compiled for the first window that it is called with."""
    return flash_forward(*given, window_size_right=0 * window_size_right, **rest)


@pytest.mark.parametrize("wrong", [deaf_to_flags, one_key_short, of_the_first_window])
def test_a_wrong_one_is_noticed(plant, wrong, monkeypatch):
    without_triton(monkeypatch)
    plant(wrong)
    with pytest.raises(Wrong):
        kernel_checks.flash(CHECKED[-1], CPU, CONTEXT)


def without_triton(monkeypatch):
    """Triton writes the cache on a GPU, chooses pages and serves canvases; here torch does."""

    def write(key, value, cache, slots):
        cache.key.view(-1, *key.shape[1:])[slots] = key
        cache.value.view(-1, *key.shape[1:])[slots] = value

    def visible_pages(window, page_size, *others):
        def shorten(batch):
            lens, tables = batch.seq_lens.clone(), batch.block_tables.clone()
            for seq, rows in enumerate(batch.query_start_loc.diff().tolist()):
                first_row = QuerySpan(rows, int(lens[seq]), is_causal=False)
                hidden = visible_range(0, first_row, Mask(window))[0] // page_size
                lens[seq] -= hidden * page_size
                tables[seq] = tables[seq].roll(-hidden)
            return replace(batch, seq_lens=lens, block_tables=tables)

        return shorten

    def attend(query, cache, batch, options, out):
        starts = batch.query_start_loc.tolist()
        for seq, length in enumerate(batch.seq_lens.tolist()):
            rows = slice(starts[seq], starts[seq + 1])
            span = QuerySpan(rows.stop - rows.start, length, is_causal=bool(batch.is_causal[seq]))
            if length:
                pages = cache.key, cache.value, batch.block_tables[seq : seq + 1]
                (out[rows],) = paged_attention(query[rows], *pages, [span], options)

    monkeypatch.setattr(kernel_checks, "write_kv", write)
    monkeypatch.setattr(kernel_checks, "VisiblePages", visible_pages)
    monkeypatch.setattr(kernel_checks, "canvas_attention", attend)

"""Kernels beside their definitions, right and wrong ones; tests/test_kernel_suites.py runs this."""

import pytest
import torch

from dllm.attention.cases import Wrong
from dllm.attention.inputs import Layer
from dllm.attention.masks import Mask
from dllm.engine import kernel_checks as kernels
from tests.support.interpreter import DEVICE, round_to_fp8, speed_up

speed_up()
round_to_fp8()
DEVICE = torch.device(DEVICE)
CONTEXT, SIZE = 70, {"head_size": 16, "dtype": torch.bfloat16, "page_size": 64}
LAYERS = [
    Layer(**SIZE),
    Layer(head_size=16, mask=Mask(48)),
    Layer(**SIZE, mask=Mask(48, is_anchored=True)),
    Layer(**SIZE, mask=Mask(block_length=32)),
    Layer(head_size=16, dtype=torch.bfloat16),
    Layer(**SIZE, mask=Mask(48), cache_dtype=torch.float8_e4m3fn),
]


@pytest.mark.parametrize("layer", LAYERS)
def test_right_attention(layer):
    kernels.attention(layer, DEVICE, kernels.canvas_attention, CONTEXT)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_right_context_of_a_drafter(is_neox, cache_dtype):
    layer = Layer(dtype=torch.bfloat16, cache_dtype=cache_dtype)
    kernels.drafter_context(layer, 48, is_neox, DEVICE)


@pytest.mark.parametrize("trial", ["row_statistics", "soft_embeddings", "grammar_paths"])
def test_right_kernels(trial):
    getattr(kernels, trial)(DEVICE)


def spoiled(name, monkeypatch, spoil):
    """A kernel's wrapper that calls ``spoil`` with what the kernel returned and was given."""
    true = getattr(kernels, name)

    def wrong(*given):
        returned = true(*given)
        return spoil(returned, *given) or returned

    monkeypatch.setattr(kernels, name, wrong)


def nudge(returned, query, cache, batch, options, out):
    out[40, 1, 3] += 0.05


def lose_a_key(returned, key, value, cache, slots):
    cache.key[0, 5] = 0


def another_sample(returned, *given):
    returned[1][3] += 1


def another_entropy(returned, *given):
    returned[2][3] += 1e-3


def lose_a_turn(returned, hidden, positions, weights, caches, slots):
    caches[1].key[0, 5, 1] = caches[1].key[0, 5, 1].roll(1)


def a_value_too_many(returned, hidden, positions, weights, caches, slots):
    caches[0].value[0, 0, 0, 0] = 1


def another_embedding(returned, *given):
    returned[3, 5] += 0.1


def another_path(returned, *given):
    returned.tokens[4] += 1


def an_unmasked_row(returned, logits, *given):
    logits[4] = 0


def attention():
    kernels.attention(LAYERS[0], DEVICE, kernels.canvas_attention, CONTEXT)


def context():
    kernels.drafter_context(LAYERS[0], 48, True, DEVICE)


WRONG = [
    (context, "write_context_kv", lose_a_turn),
    (context, "write_context_kv", a_value_too_many),
    (attention, "canvas_attention", nudge),
    (attention, "write_kv", lose_a_key),
    (lambda: kernels.row_statistics(DEVICE), "row_stats_kernels", another_sample),
    (lambda: kernels.row_statistics(DEVICE), "row_stats_kernels", another_entropy),
    (lambda: kernels.soft_embeddings(DEVICE), "tile_product_kernels", another_embedding),
    (lambda: kernels.grammar_paths(DEVICE), "write_paths", another_path),
    (lambda: kernels.grammar_paths(DEVICE), "write_paths", an_unmasked_row),
]


@pytest.mark.parametrize(("trial", "name", "spoil"), WRONG)
def test_a_wrong_kernel_is_noticed(trial, name, spoil, monkeypatch):
    spoiled(name, monkeypatch, spoil)
    with pytest.raises(Wrong):
        trial()


def test_one_that_does_not_compile_is_named(monkeypatch):
    def broken(*given):
        raise RuntimeError("out of resources: shared memory\nand more")

    launched = "canvas_attention", "flash_attention", "row_stats_kernels"
    for name in (*launched, "tile_product_kernels", "write_paths"):
        monkeypatch.setattr(kernels, name, broken)
    monkeypatch.setattr(kernels, "_check_write", lambda *given: None)  # of a context of 5,000 keys
    layers = {"full": LAYERS[0]}
    found = dict(kernels.checks(kernels.canvas_trials(layers, layers, DEVICE)))
    attentions = {"attention, full", "FlashAttention 4, full"}
    assert set(found) == attentions | {"row statistics", "soft embeddings", "grammar paths"}
    assert set(found.values()) == {"out of resources: shared memory"}


def test_flash_attention_is_tried_as_steps_call_it(monkeypatch):
    """In a layer with an anchored window it serves causal sequences, and ours the canvases."""
    calls, ours = [], kernels.canvas_attention
    for name in ("flash_attention", "canvas_attention"):

        def attend(*given, name=name):
            calls.append(name)
            ours(*given)

        monkeypatch.setattr(kernels, name, attend)
    kernels.flash(LAYERS[2], DEVICE, CONTEXT)
    assert calls == ["flash_attention", "flash_attention", "canvas_attention"]

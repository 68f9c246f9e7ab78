"""The kernel of the drafter's context; tests/test_kernel_suites.py runs this.

vLLM's operations, which compute the same, are held to the same definition.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as ops

from dllm.attention import context_kv
from dllm.attention.context_kv import ContextTiles, context_tiles, write_context_kv
from dllm.attention.inputs import FP8_OF, PagedKV
from dllm.drafter.network import DrafterNetwork
from dllm.engine.kernel_checks import compare_context
from tests.support.context_network import (
    FP8_SCALE,
    POSITIONS,
    Sizes,
    Step,
    cached,
    make_network,
    make_step,
)
from tests.support.interpreter import DEVICE, UNIT_ROUNDOFF, round_to_fp8, speed_up

speed_up()
round_to_fp8()
SMALL = Sizes(21, 48, 2, 2, 64, 64, dtype=torch.float32)
UNTOUCHED = 77  # of a cache: as a number, and as the bits of one


def step_of(sizes: Sizes) -> Step:
    """Slots that differ from layer to layer. A third of the tokens has none, and is NaN."""
    step = make_step(sizes, DEVICE)
    skipped = torch.arange(sizes.num_tokens, device=DEVICE) % 3 == 1
    if sizes.num_tokens > 1:
        step.hidden[skipped] = float("nan")
        step.positions[skipped] = 10**12
    slots = [each.roll(layer).masked_fill(skipped, -1) for layer, each in enumerate(step.slots)]
    return step._replace(slots=slots)


def fused(sizes: Sizes) -> DrafterNetwork:
    """A network whose caches are full of what nobody may overwrite."""
    network = make_network(sizes, DEVICE, is_fused=True)
    for layer in network._attn_layers:
        layer.kv_cache.fill_(UNTOUCHED)
    return network


def normalized(network: DrafterNetwork, step: Step) -> Tensor:
    normed = torch.empty_like(step.hidden)
    ops.rms_norm(normed, step.hidden, network._hidden_norm_weight, network._rms_norm_eps)
    return normed


def check(network: DrafterNetwork, sizes: Sizes, step: Step) -> None:
    """Every stored number within the tolerance, everything else of the caches as it was."""
    stored_as = FP8_OF.get(sizes.cache, sizes.dtype)
    roundoff = UNIT_ROUNDOFF.get(stored_as, torch.finfo(stored_as).eps / 2)
    blank = torch.tensor(UNTOUCHED, dtype=network._attn_layers[0].kv_cache.dtype).view(stored_as)
    unit = FP8_SCALE if sizes.cache in FP8_OF else 1.0
    given = normalized(network, step), step.positions, network._weights_of_kernel()
    compare_context(*given, caches_of(network), step.slots, unit * float(blank), roundoff)


def caches_of(network: DrafterNetwork) -> list[PagedKV]:
    return [layer.impl.paged_kv(layer, layer.kv_cache) for layer in network._attn_layers]


BF16 = SMALL._replace(dtype=torch.bfloat16)
SIZES = {
    "head size 64": SMALL,
    "head size 128": SMALL._replace(head_size=128, rotary_size=128),
    "interleaved": SMALL._replace(is_neox=False),
    "half of a head turned": SMALL._replace(rotary_size=32),
    "half of a head turned, interleaved": SMALL._replace(rotary_size=32, is_neox=False),
    "head size 80, which is padded": SMALL._replace(head_size=80, rotary_size=80, num_kv_heads=1),
    "head size 80, a quarter turned": SMALL._replace(head_size=80, rotary_size=20, num_kv_heads=3),
    "bias": SMALL._replace(has_bias=True),
    "bias, interleaved, padded": SMALL._replace(
        has_bias=True, is_neox=False, head_size=48, rotary_size=48
    ),
    "hidden size that is no multiple of a tile": SMALL._replace(hidden=144),
    "one token": SMALL._replace(num_tokens=1),
    "many token tiles": SMALL._replace(num_tokens=300, layers=1, num_kv_heads=1),
    "three layers": SMALL._replace(layers=3, num_kv_heads=1),
    "pages of 48": SMALL._replace(page_size=48),
    "fp16": SMALL._replace(dtype=torch.float16),
    "bf16": BF16,
    "bf16, many tokens": BF16._replace(num_tokens=150, layers=1),
    "bf16, fp8 cache": BF16._replace(cache="fp8"),
    "fp32, fp8_e5m2 cache, interleaved": SMALL._replace(cache="fp8_e5m2", is_neox=False),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_kernel_computes_the_definition(sizes: Sizes) -> None:
    network, step = fused(sizes), step_of(sizes)
    network.precompute_and_store_context_kv(*step)
    check(network, sizes, step)
    assert network.context_weights is not None


@pytest.mark.parametrize("is_neox", [True, False])
def test_vllms_operations_compute_the_definition_too(is_neox: bool) -> None:
    """On the same case: a reader of the other test may believe the tolerance."""
    sizes = SMALL._replace(is_neox=is_neox, has_bias=True)
    network, step = fused(sizes), step_of(sizes)
    step.positions.clamp_(max=POSITIONS - 1)  # they compute also what has no slot
    network.context_weights = None
    network.precompute_and_store_context_kv(*step)
    check(network, sizes, step)


@pytest.mark.parametrize("is_neox", [True, False])
def test_groups_of_tiles_cover_everything_once(
    is_neox: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full groups and a smaller one at the end."""
    monkeypatch.setattr(context_kv, "TILE_GROUP", 2)
    tiles = ContextTiles(16, 16, 4, 1)
    monkeypatch.setattr(context_kv, "context_tiles", lambda *sizes: tiles)
    sizes = SMALL._replace(num_tokens=16 * 5 + 3, num_kv_heads=1, hidden=32, is_neox=is_neox)
    network, step = fused(sizes), step_of(sizes)
    network.precompute_and_store_context_kv(*step)
    check(network, sizes, step)


def test_large_numbers_become_the_largest_of_an_fp8_cache() -> None:
    sizes = BF16._replace(cache="fp8", has_bias=True)
    network, step = fused(sizes), step_of(sizes)
    network._fused_kv_bias *= 1000
    network.precompute_and_store_context_kv(*step)
    check(network, sizes, step)
    assert (cached(network).abs() == FP8_SCALE * 448).any()


def test_nothing_is_written_without_tokens_slots_or_pages() -> None:
    """The last is a profiling run, which has no caches yet."""
    network, none = fused(SMALL), step_of(SMALL)
    network.precompute_and_store_context_kv(*step_of(SMALL._replace(num_tokens=0)))
    for slots in none.slots:
        slots.fill_(-1)
    network.precompute_and_store_context_kv(*none)
    check(network, SMALL, none)
    for layer in network._attn_layers:
        layer.kv_cache = torch.tensor([])
    network.precompute_and_store_context_kv(none.hidden, none.positions, None)
    assert network.context_weights is not None


def test_slots_that_are_a_part_of_a_buffer() -> None:
    """As vLLM passes the context behind what a CUDA graph stores; int32, and shared by layers."""
    sizes = SMALL._replace(num_tokens=33, layers=3)
    network, whole = fused(sizes), step_of(sizes)
    shared = [whole.slots[index].int() for index in (0, 1)]
    whole = whole._replace(slots=[shared[0], shared[1], shared[0]])
    for part in (slice(0, 5), slice(5, 33)):
        slots = {id(each): each[part] for each in shared}
        given = whole.hidden[part], whole.positions[part], [slots[id(s)] for s in whole.slots]
        network.precompute_and_store_context_kv(*given)
    check(network, sizes, whole)


def other_backend(network: DrafterNetwork) -> None:
    real = network._attn_layers[1].attn_backend
    network._attn_layers[1].attn_backend = type("Other", (real,), {"get_name": lambda: "OTHER"})


def other_pages(network: DrafterNetwork) -> None:
    """Twice as long, as where vLLM equals page sizes of several groups."""
    longer = make_network(SMALL._replace(page_size=32), DEVICE, is_fused=True)
    network._attn_layers[1] = longer._attn_layers[1]
    network._attn_layers[1].kv_cache.fill_(UNTOUCHED)


@pytest.mark.parametrize("change", [other_backend, other_pages])
def test_pages_that_the_kernel_cannot_write_are_left_to_vllm(change: Any) -> None:
    network, step = fused(SMALL), step_of(SMALL)
    step.positions.clamp_(max=POSITIONS - 1)
    change(network)
    network.precompute_and_store_context_kv(*step)
    assert network.context_weights is None
    check(network, SMALL, step)


def test_quantized_weights_are_refused() -> None:
    network = fused(SMALL)
    network._fused_kv_weight = None
    with pytest.raises(ValueError, match=r"fused_context .* quantized"):
        network._weights_of_kernel()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda hidden, positions, slots: (hidden, positions[:5], slots), "hidden is"),
        (lambda hidden, positions, slots: (hidden, positions, slots[:1]), "slots of 1 layers"),
        (lambda hidden, positions, slots: (hidden.half(), positions, slots), "expected .*float32"),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, words: str) -> None:
    network, step = fused(SMALL), step_of(SMALL)
    caches = caches_of(network)
    hidden, positions, slots = change(*step)
    with pytest.raises(ValueError, match=words):
        write_context_kv(hidden, positions, network.context_weights, caches, slots)


def test_few_tokens_have_their_own_tiles() -> None:
    assert context_tiles(16, 128, 2).tokens == 16
    assert context_tiles(17, 128, 2).tokens == 128
    assert context_tiles(1000, 256, 2).tokens == 64

"""The drafter's context: what waits until somebody drafts, and its keys and values."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding import get_rope

from dllm.drafter.context import NO_SLOT, DeferredContext, last_of_each_slot
from dllm.drafter.network import DrafterNetwork
from dllm.drafter.step import TargetStep
from tests.support.watched_device import DeviceWatch, on_device


def step(lengths: list[int], hidden: list[torch.Tensor], rejected: list[int]) -> TargetStep:
    """What is read of a step; its tensors are overwritten by the next one."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    batch: Any = SimpleNamespace(
        num_reqs=len(lengths),
        num_tokens=int(starts[-1]),
        num_draft_tokens=sum(rejected),
        query_start_loc=torch.from_numpy(np.append(starts, starts[-1])),  # padded
        positions=torch.arange(int(starts[-1]) + 2),
    )
    nothing = torch.zeros(0)
    return TargetStep(batch, hidden, nothing, torch.tensor(rejected), nothing)


@pytest.mark.parametrize("rejected", [[0, 0], [1, 2]])
def test_nobody_waits_for_the_device(rejected):
    hidden = on_device([torch.ones(9, 2)] * 2)
    waiting = step([4, 5], hidden, rejected)
    tensors = on_device((waiting.batch.query_start_loc, waiting.batch.positions))
    waiting.batch.query_start_loc, waiting.batch.positions = tensors
    waiting = replace(waiting, num_rejected=on_device(waiting.num_rejected))
    slots = on_device(torch.arange(27).view(3, 9))
    with DeviceWatch() as watch:
        deferred = DeferredContext()
        for _ in range(2):
            deferred.append(waiting, slots, [0, 2])
        context = deferred.take()
    assert not watch.findings
    assert (context.slots >= 0).sum() == 2 * (9 - sum(rejected))


def test_a_single_step_is_not_copied_again():
    deferred = DeferredContext()
    deferred.append(step([4], [torch.ones(4, 2)], [0]), torch.arange(4)[None], [0])
    (kept,) = deferred._steps
    assert deferred.take().features is kept.features


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([[4, 5, 6]], [[4, 5, 6]]),
        ([[4, 5, 4, 6, 4]], [[NO_SLOT, 5, NO_SLOT, 6, 4]]),
        ([[1, 2, 1], [7, 8, 8]], [[NO_SLOT, 2, 1], [7, NO_SLOT, 8]]),
        ([[NO_SLOT, 3, NO_SLOT]], [[NO_SLOT, 3, NO_SLOT]]),
    ],
)
def test_of_two_tokens_for_one_place_the_last_is_written(slots, expected):
    assert last_of_each_slot(torch.tensor(slots)).tolist() == expected


# --- keys and values -----------------------------------------------------------------------------

LAYERS, HEADS, HEAD_SIZE, HIDDEN, NUM_TOKENS = 3, 2, 16, 24, 7


def hand_made_network(is_neox: bool, stored: list[tuple[torch.Tensor, torch.Tensor]]):
    """A network of random weights with biases, whose cache is the list ``stored``."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    with set_current_vllm_config(VllmConfig()):
        parameters = {"rope_type": "default", "rope_theta": 10000.0}
        rope = get_rope(HEAD_SIZE, 64, is_neox, parameters, dtype=torch.float32)
        norms = [RMSNorm(size, eps=1e-5) for size in (HIDDEN, *[HEAD_SIZE] * LAYERS)]
    for norm in norms:
        norm.weight.data = 1 + 0.3 * draw(*norm.weight.shape)
    impl = SimpleNamespace(
        do_kv_cache_update=lambda _layer, key, value, *_others: stored.append((key, value))
    )
    size = HEADS * HEAD_SIZE
    network = DrafterNetwork.__new__(DrafterNetwork)
    torch.nn.Module.__init__(network)
    network.hidden_norm, *k_norms = norms
    network.layers = []
    for k_norm in k_norms:
        projection = SimpleNamespace(
            quant_method=UnquantizedLinearMethod(),
            weight=draw(3 * size, HIDDEN),
            bias=draw(3 * size),
        )
        attention = SimpleNamespace(
            qkv_proj=projection, q_norm=k_norm, k_norm=k_norm, rotary_emb=rope, q_size=size,
            attn=SimpleNamespace(impl=impl, kv_cache=None), num_kv_heads=HEADS,
            head_dim=HEAD_SIZE, kv_size=size,
        )  # fmt: skip
        network.layers.append(SimpleNamespace(self_attn=attention))
    return network


@pytest.mark.parametrize("is_neox", [True, False])
def test_keys_and_values_are_those_of_each_layer(is_neox):
    """All layers in one product: the same as each one's own projection, norm and RoPE."""
    stored: list[tuple[torch.Tensor, torch.Tensor]] = []
    network = hand_made_network(is_neox, stored)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    positions, slots = 5 * torch.arange(NUM_TOKENS), torch.arange(NUM_TOKENS)
    network.precompute_and_store_context_kv(hidden, positions, [slots] * LAYERS)
    normed = network.hidden_norm.forward_native(hidden)
    for layer, (key, value) in zip(network.layers, stored, strict=True):
        own = layer.self_attn
        projected = normed @ own.qkv_proj.weight.T + own.qkv_proj.bias
        _, keys, values = projected.view(NUM_TOKENS, 3, HEADS, HEAD_SIZE).unbind(1)
        keys = own.k_norm.forward_native(keys)
        keys, _ = own.rotary_emb.forward_native(positions, keys.flatten(1), keys.flatten(1).clone())
        torch.testing.assert_close(key, keys.view_as(key))
        torch.testing.assert_close(value, values)

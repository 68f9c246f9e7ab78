"""The drafter's network in training, and its acceptance, against a plain reference."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3ForCausalLM

from dllm.drafter.samples import Sample
from dllm.train.acceptance import Acceptance, measure, possible, total
from dllm.train.network import DraftNetwork, count_params, draft_inputs, losses
from tests.support.calibrate_cases import random_samples, read_config, target, target_path
from tests.support.drafter_pairs import MASK, random_drafter
from tests.support.drafter_reference import ReferenceDrafter

__all__ = ["target", "target_path"]  # fixtures

BLOCK = 5
# Sums of 64 to 128 products in another order; 2e-6 was measured.
TOLERANCE = 2e-5


def loaded(**overrides) -> DraftNetwork:
    """The network of the random drafter."""
    network = DraftNetwork(read_config(**overrides))
    network.load_state_dict(random_drafter())
    return network


def reference_of(target_path: Path, **overrides) -> ReferenceDrafter:
    model = Qwen3ForCausalLM.from_pretrained(target_path, dtype=torch.float32)
    return ReferenceDrafter(model, read_config(**overrides), random_drafter())


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
        {"is_causal": True},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "is_causal": False},
    ],
    ids=["full", "mixed", "causal", "symmetric window"],
)
def test_every_block_of_a_pass_is_the_reference(target_path, target, overrides):
    network, reference = loaded(**overrides), reference_of(target_path, **overrides)
    tokens = torch.randint(10, 450, (2, 17), generator=torch.Generator().manual_seed(1))
    anchors = torch.tensor([[1, 6, 11], [12, 4, 4]])
    ids = draft_inputs(tokens, anchors, BLOCK, network.config.mask_token_id)
    with torch.no_grad():
        features = target.hidden_states(tokens, network.config.target_layer_ids)
        logits = network(features, target.embedding[ids], anchors) @ target.head.T
        for row in range(2):
            for at, anchor in enumerate(anchors[row].tolist()):
                block = [int(tokens[row, anchor]), *[MASK] * (BLOCK - 1)]
                expected = reference.logits(tokens[row, :anchor].tolist(), block)
                error = (logits[row, at] - expected).abs().max() / expected.abs().max()
                assert error < TOLERANCE


def test_hidden_states_are_the_outputs_of_the_named_layers(target):
    tokens = torch.arange(30, 42)[None]
    outputs = target.model(tokens, output_hidden_states=True).hidden_states
    expected = torch.cat([outputs[1], outputs[3]], -1)
    assert torch.equal(target.hidden_states(tokens, (0, 2)), expected)


def test_losses_in_parts_are_cross_entropy():
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=draw, requires_grad=True)
    head, labels = torch.randn(20, 8, generator=draw), torch.arange(11)
    whole = torch.nn.functional.cross_entropy(hidden @ head.T, labels, reduction="none")
    (expected,) = torch.autograd.grad(whole.sum(), hidden)
    parts = losses(hidden, head, labels, rows_at_once=4)
    (gradient,) = torch.autograd.grad(parts.sum(), hidden)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(gradient, expected)


class Largest(TorchDispatchMode):
    """The most numbers in a tensor that was made inside the ``with`` block."""

    numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *(tensor.numel() for tensor in tensors)])
        return result


def test_attention_scores_of_all_heads_are_never_in_memory():
    network, length, blocks = loaded(), 400, 24
    features = torch.randn(2, length, network.fc.in_features)
    embeds = torch.randn(2, blocks, BLOCK, network.config.hidden_size)
    with Largest() as found:
        hidden = network(features, embeds, torch.randint(1, length, (2, blocks)))
        hidden.square().sum().backward()
    mask = 2 * blocks * BLOCK * (length + blocks * BLOCK)
    assert found.numel == mask and network.config.num_heads > 1


def test_parameters_are_counted_without_building_the_network():
    built = sum(param.numel() for param in DraftNetwork(read_config()).parameters())
    assert count_params(read_config()) == built
    # Of 8 TB in fp32, which is more than there is.
    assert count_params(read_config(hidden_size=1 << 20, intermediate_size=1 << 20)) > 2e12


# --- acceptance -----------------------------------------------------------------------------------


def test_acceptance_walks_the_steps_of_a_server():
    found = Acceptance()
    # Tokens 0..5 of a response; behind each, this many of 3 drafts agree.
    found.add([2, 9, 9, 0, 1], width=3)
    # Step at 0 keeps 2 and emits 3; step at 3 keeps none and emits 1; step at 4 keeps the last one.
    assert (found.steps, found.tokens) == (3, 5)
    assert found.offered == [3, 2, 1]
    assert found.accepted == [2, 1, 0]
    assert found.length == 5 / 3


def test_a_drafter_that_is_always_right_reaches_what_is_possible():
    sample = Sample(tuple(range(12)), 4, "all")  # 8 tokens of response, 7 behind the first
    best = total(possible([sample], width=3))
    assert (best.steps, best.tokens) == (2, 7)
    assert best.by_position == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("at_once", [64, 2])
def test_measured_acceptance_is_that_of_the_reference(target_path, target, monkeypatch, at_once):
    """Drafts of the reference, verified step by step, of a target and a drafter by chance."""
    monkeypatch.setattr("dllm.train.acceptance.ANCHORS_AT_ONCE", at_once)
    reference, samples = reference_of(target_path), random_samples(target, 2, length=8)
    # Every draft is wrong by chance, so let one response be what the drafter drafts.
    tokens = samples[0].tokens[: samples[0].response_start + 1]
    with torch.no_grad():
        for _ in range(3):
            block = [tokens[-1], *[MASK] * (BLOCK - 1)]
            drafts = reference.logits(tokens[:-1], block)[1:].argmax(-1).tolist()
            tokens = (*tokens, *drafts[:2], (drafts[2] + 1) % 400)
    said = Sample(tokens, samples[0].response_start, "drafted")
    groups = measure(loaded(), target, [*samples, said], BLOCK)
    # Two drafts and the token that the third one was not: three steps of three tokens.
    assert groups["drafted"].length == 3.0
    assert groups["drafted"].by_position[:3] == [1.0, 1.0, 0.0]
    assert groups["all"].length < 1.2

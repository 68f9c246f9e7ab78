"""The first weights of a LLaDA2 or a Nemotron from a dense Qwen3 of the same width and depth.

LLaDA2 itself began as an autoregressive mixture of experts. Here a small dense model is at hand:

- Attention: Glm4Moe rotates half of each head, Qwen3 all of it. The pairs of dimensions that Qwen3
  rotates fastest become the rotated half; with the square root of its rope_theta they turn at the
  same speed as before. The others turn by less than a radian within 100 tokens, and then stand.
- Experts: the neurons of a dense MLP are dealt out. Those with the largest weights become the
  shared expert, the others fill the routed ones, from the first again if there are too few. The
  router begins at random (A. Komatsuzaki et al., Sparse Upcycling, 2023,
  https://arxiv.org/abs/2212.05055, copies a whole MLP into every expert instead).

Nemotron has no norms of queries and keys, an output head of its own, and here narrower MLPs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import Glm4MoeConfig, Ministral3Config


def upcycle(
    dense: Mapping[str, Tensor], fresh: Mapping[str, Tensor], config: Glm4MoeConfig
) -> dict[str, Tensor]:
    """Weights of a Glm4Moe, by name.

    Args:
        dense: of a Qwen3 with the same sizes, whose MLPs are as wide as the dense first layers.
        fresh: of a new Glm4Moe; what has no counterpart in ``dense`` stays as it is there.

    Raises:
        ValueError: the dense model has too few layers, or narrower MLPs than an expert.
    """
    weights = dict(fresh)
    for name, tensor in dense.items():
        if ".q_proj." in name or ".k_proj." in name or "q_norm" in name or "k_norm" in name:
            weights[name] = _fastest_pairs_first(tensor, config.head_dim)
        elif name in fresh:
            weights[name] = tensor
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp."
        if f"{mlp}up_proj.weight" not in dense:
            raise ValueError(f"the dense model has no layer {layer}; give one that is as deep.")
        gate, up, down = (dense[f"{mlp}{part}_proj.weight"] for part in ("gate", "up", "down"))
        for name, tensor in _deal_neurons(gate, up, down, config).items():
            weights[mlp + name] = tensor
    return weights


def without_head_norms(
    dense: Mapping[str, Tensor], fresh: Mapping[str, Tensor], config: Ministral3Config
) -> dict[str, Tensor]:
    """Weights of a Ministral 3, by name: those of ``fresh`` in number and shape.

    A norm of queries or keys becomes a constant factor of its head, which is right on average if
    the layer's inputs point in all directions alike. MLPs keep their strongest neurons.

    Args:
        dense: of a Qwen3 with the same sizes, whose MLPs are at least as wide.

    Raises:
        ValueError: the dense model has too few layers.
    """
    weights = {}
    for name in fresh:
        if name not in dense:
            raise ValueError(f"the dense model has no {name}; give one that is as deep.")
        weights[name] = dense[name]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        gain = dense[f"{prefix}input_layernorm.weight"]
        for kind in ("q", "k"):
            name = f"{prefix}self_attn.{kind}_proj.weight"
            heads = dense[name].view(-1, config.head_dim, len(gain))
            size = (heads * gain).square().sum(dim=2).mean(dim=1).sqrt()
            norm = dense[f"{prefix}self_attn.{kind}_norm.weight"]
            weights[name] = (heads * norm[:, None] / size[:, None, None]).view_as(dense[name])
        names = [f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        gate, up, down = (dense[name] for name in names)
        kept = _by_strength(up, down)[: config.intermediate_size]
        weights |= zip(names, (gate[kept], up[kept], down[:, kept]), strict=True)
    return weights


def _by_strength(up: Tensor, down: Tensor) -> Tensor:
    """Indices of the neurons of an MLP, those with the largest weights first."""
    return (up.norm(dim=1) * down.norm(dim=0)).argsort(descending=True)


def _fastest_pairs_first(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorder the dimensions of every head, which are rows of ``tensor``.

    A pair is (i, i + head_dim / 2), and the first is rotated fastest. The first quarter of the
    pairs becomes the first half of the head, in the order of a rotation of that half alone.
    """
    rotated = torch.arange(head_dim).view(2, 2, head_dim // 4).transpose(0, 1).flatten()
    return tensor.view(-1, head_dim, *tensor.shape[1:])[:, rotated].reshape(tensor.shape)


def _deal_neurons(
    gate: Tensor, up: Tensor, down: Tensor, config: Glm4MoeConfig
) -> dict[str, Tensor]:
    """Weights of a shared expert and of E routed ones of I neurons each, from one MLP.

    Args:
        gate, up: ``[N, H]``; down: ``[H, N]``.
    """
    width, num_experts = config.moe_intermediate_size, config.n_routed_experts
    if width >= len(gate):
        raise ValueError(f"experts of {width} neurons from an MLP of {len(gate)}; allowed: fewer.")
    order = _by_strength(up, down)
    shared, rest = order[:width], order[width:]
    dealt = rest[torch.arange(num_experts * width) % len(rest)].view(num_experts, width)
    return {
        "shared_experts.gate_proj.weight": gate[shared],
        "shared_experts.up_proj.weight": up[shared],
        "shared_experts.down_proj.weight": down[:, shared],
        "experts.gate_up_proj": torch.cat((gate[dealt], up[dealt]), dim=1),
        "experts.down_proj": down[:, dealt].transpose(0, 1),
    }

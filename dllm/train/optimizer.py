"""The optimizers of a run: Muon for matrices, AdamW for the rest, one learning-rate schedule.

Muon (K. Jordan, 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix
by the nearest semi-orthogonal matrix, found with five Newton-Schulz iterations. `torch.optim.Muon`
takes only 2-D parameters, one at a time. Here experts are 3-D, and all matrices of one shape are
orthogonalised in one batch.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dllm.train.precision import product_dtype
from dllm.train.settings import RunSettings

# Coefficients of the iteration, chosen for the largest slope at 0 (same source).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MOMENTUM = 0.95
# Of the learning rate, for matrices of queries and keys that no norm follows: these stay small, and
# an update of constant size would change what they attend to many times as much.
UNNORMED_SHARE = 0.2


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for parameters of 2 or more dimensions (the last two are a matrix).

    Args:
        params: the matrices.
        lr: spectral norm of an update, before it is multiplied by sqrt(max(1, rows / columns)).
            A group of parameters can have a ``share`` of it.
    """

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "share": 1.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, in place."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(param)
                momentum = state["momentum"].lerp_(param.grad, 1 - MOMENTUM)
                update = param.grad.lerp(momentum, MOMENTUM)  # Nesterov
                by_shape.setdefault(param.shape[-2:], []).append((param, update))
            for shape, pairs in by_shape.items():
                stacked = torch.cat([update.reshape(-1, *shape) for _, update in pairs])
                scale = group["lr"] * group["share"] * max(1.0, shape[0] / shape[1]) ** 0.5
                orthogonal = orthogonalize(stacked).mul_(-scale)
                counts = [update.numel() // shape.numel() for _, update in pairs]
                for (param, _), change in zip(pairs, orthogonal.split(counts), strict=True):
                    param.add_(change.view_as(param))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Matrices ``[N, rows, columns]`` with the same singular vectors and singular values near 1.

    Computed in bf16 like the source (an approximation is good enough), or in fp32 on a CPU without
    bf16 units; returned in fp32.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(product_dtype(x.device))
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


def make_optimizers(model: nn.Module, settings: RunSettings) -> list[torch.optim.Optimizer]:
    """Muon over the layers' matrices, AdamW over embeddings, heads, norms, scalars and routers.

    An adapter's low-rank factors are AdamW's, too. Parameters that need no gradient are in neither.
    """
    matrices: list[Tensor] = []
    unnormed: list[Tensor] = []
    others: list[Tensor] = []
    has_norms = any("q_norm" in name for name, _ in model.named_parameters())
    for name, param in model.named_parameters():
        if param.requires_grad:
            is_router = "router" in name or name.endswith("mlp.gate.weight")
            is_token = "embed" in name or "lm_head" in name
            is_factor = "parametrizations" in name
            if param.ndim < 2 or is_token or is_router or is_factor:
                others.append(param)
            elif not has_norms and ("q_proj" in name or "k_proj" in name):
                unnormed.append(param)
            else:
                matrices.append(param)
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": unnormed, "share": UNNORMED_SHARE},
    ]
    adamw = torch.optim.AdamW(others, settings.vector_lr, betas=(0.9, 0.98), weight_decay=0.0)
    filled = [group for group in groups if group["params"]]
    return [Muon(filled, settings.matrix_lr), adamw] if filled else [adamw]


def lr_factor(step: int, settings: RunSettings) -> float:
    """The fraction of the peak learning rate at a step: linear rise, constant, cosine fall."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    progress = step / settings.steps
    if progress <= settings.decay_from:
        return 1.0
    fallen = (progress - settings.decay_from) / (1 - settings.decay_from)
    cosine = 0.5 * (1 + math.cos(math.pi * fallen))
    return settings.final_lr + (1 - settings.final_lr) * cosine


def set_learning_rates(
    optimizers: Iterable[torch.optim.Optimizer], step: int, settings: RunSettings
) -> None:
    """Give every optimizer its learning rate of a step; the one it was made with is the peak."""
    factor = lr_factor(step, settings)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * factor


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, step: int, ema: float) -> None:
    """Move the exponential average of the weights towards the model's, after step ``step``."""
    # In the first steps the average follows faster, so that it forgets the initial weights.
    decay = min(ema, (1 + step) / (10 + step))
    for kept, param in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(param, 1 - decay)

"""The optimizers of a run: Muon for matrices, AdamW for the rest, one learning-rate schedule.

Muon (K. Jordan, 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix
by the nearest semi-orthogonal matrix, found with five Newton-Schulz iterations. `torch.optim.Muon`
does the same, but always in bf16, which is many times slower on a CPU with nothing beyond AVX2.
Matrix products are in bf16 where the device multiplies bf16 numbers itself, else in fp32
(``cpu.instructions``).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dllm.cpu.instructions import FACTS, computes_bf16
from dllm.train.settings import DrafterTraining


def product_dtype(device: torch.device) -> torch.dtype:
    is_slow = device.type == "cpu" and not computes_bf16()
    return torch.float32 if is_slow else torch.bfloat16


def autocast(device: torch.device) -> torch.autocast:
    """A context in which matrix products have ``product_dtype``; other operations stay in fp32."""
    dtype = product_dtype(device)
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def processor(device: torch.device) -> str:
    """The name of the GPU or CPU, for a record of a run; a CPU's is Linux's /proc/cpuinfo's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    text = FACTS.read_text() if FACTS.exists() else ""
    names = [line.split(":", 1)[1] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else "an unnamed CPU"


def device_of(given: str | None) -> str:
    return given or ("cuda" if torch.cuda.is_available() else "cpu")


# Coefficients of the iteration, chosen for the largest slope at 0 (same source).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """``lr``: spectral norm of an update, before its factor sqrt(max(1, rows / columns))."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(param)
                momentum = state["momentum"].lerp_(param.grad, 1 - MOMENTUM)
                update = param.grad.lerp(momentum, MOMENTUM)  # Nesterov
                scale = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
                param.add_(orthogonalize(update), alpha=-group["lr"] * scale)


def orthogonalize(matrix: Tensor) -> Tensor:
    """``[rows, columns]`` in fp32, with the same singular vectors, and singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = (x / (x.norm() + 1e-7)).to(product_dtype(x.device))
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x).float()


def make_optimizers(model: nn.Module, settings: DrafterTraining) -> list[torch.optim.Optimizer]:
    """Muon over matrices, AdamW over norms and biases; frozen parameters are in neither."""
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in trained if param.ndim == 2]
    others = [param for param in trained if param.ndim < 2]
    found: list[torch.optim.Optimizer] = [Muon(matrices, settings.matrix_lr)]
    if others:
        betas = 0.9, 0.98
        found.append(torch.optim.AdamW(others, settings.vector_lr, betas, weight_decay=0.0))
    return found


def lr_factor(step: int, settings: DrafterTraining) -> float:
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
    optimizers: Iterable[torch.optim.Optimizer], step: int, settings: DrafterTraining
) -> None:
    """Give every optimizer its learning rate of a step; the one it was made with is the peak."""
    factor = lr_factor(step, settings)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * factor


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, step: int, ema: float) -> None:
    # In the first steps the average follows faster, so that it forgets the initial weights.
    decay = min(ema, (1 + step) / (10 + step))
    for kept, param in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(param, 1 - decay)

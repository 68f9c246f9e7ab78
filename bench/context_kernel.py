"""Times the kernel of the drafter's context, beside its definition in plain torch.

    python -m bench.context_kernel                 # a drafter of the shape of Qwen3-8B's
    python -m bench.context_kernel --smoke         # a tiny one, in Triton's interpreter

The kernel computes the keys and values of all drafter layers from the target's hidden states and
writes them into the pages (``attention.context_kv``). The definition is what a server without it
does: one product for all layers, then norm, rotation and a copy for each. They must agree before
they are timed. ``of_ceiling`` is the least time that bytes and operations need, at the speed of a
copy and of a bf16 product measured in the same run, divided by the time taken. Written to
--results: context_kernel.csv, after every size. Exits with 1 when they disagree.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bench.context import RESULTS, provenance, write_csv
from bench.roofline import Gpu, linear

if TYPE_CHECKING:
    from dllm.attention.context_kv import ContextWeights
    from dllm.attention.inputs import PagedKV

PAGE_SIZE = 16
THETA = 1e6


@dataclass(frozen=True)
class Drafter:
    """The sizes of a drafter."""

    layers: int
    heads: int
    head_size: int
    hidden: int
    dtype: torch.dtype

    @property
    def columns(self) -> int:
        """Numbers that a token has in all caches together."""
        return self.layers * 2 * self.heads * self.head_size


QWEN3_8B = Drafter(5, 8, 128, 4096, torch.bfloat16)
TINY = Drafter(2, 2, 32, 48, torch.float32)
# Tokens of a step: verified drafts of one and of 32 requests, prompt chunks.
SIZES = (16, 512, 2048, 8192)
SMOKE_SIZES = (5, 21)


@dataclass(frozen=True)
class Inputs:
    """What both are given; each writes into caches of its own."""

    drafter: Drafter
    weights: ContextWeights
    hidden: Tensor  # [tokens, hidden]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]

    def caches(self) -> list[PagedKV]:
        """Of each layer; pages of a head lie together, keys beside values."""
        from dllm.attention.inputs import PagedKV

        one = self.drafter
        shape = (-(-len(self.slots) // PAGE_SIZE), one.heads, PAGE_SIZE, 2 * one.head_size)
        found = []
        for _ in range(one.layers):
            both = torch.zeros(shape, dtype=one.dtype, device=self.hidden.device).transpose(1, 2)
            found.append(PagedKV(both[..., : one.head_size], both[..., one.head_size :]))
        return found


def make_inputs(one: Drafter, num_tokens: int, device: str) -> Inputs:
    """Random weights and hidden states; every token has a slot of its own."""
    from dllm.attention.context_kv import ContextWeights

    random = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=random) * scale).to(one.dtype).to(device)

    num_slots = -(-num_tokens // PAGE_SIZE) * PAGE_SIZE
    frequencies = THETA ** -(torch.arange(0, one.head_size, 2) / one.head_size)
    angles = torch.arange(num_slots)[:, None] * frequencies
    weights = ContextWeights(
        weight=draw(one.columns, one.hidden, scale=one.hidden**-0.5),
        bias=None,
        k_norm=1 + draw(one.layers, one.head_size, scale=0.1),
        eps=1e-6,
        cos_sin=torch.cat([angles.cos(), angles.sin()], 1).to(one.dtype).to(device),
        is_neox=True,
    )
    slots = torch.randperm(num_slots, generator=random)[:num_tokens].to(device)
    positions = torch.arange(num_tokens, device=device)
    return Inputs(one, weights, draw(num_tokens, one.hidden), positions, slots)


def prepare_kernel(inputs: Inputs, caches: list[PagedKV]) -> Callable[[], None]:
    """Ours."""
    from dllm.attention.context_kv import write_context_kv

    slots = [inputs.slots] * inputs.drafter.layers

    def run() -> None:
        write_context_kv(inputs.hidden, inputs.positions, inputs.weights, caches, slots)

    return run


def prepare_torch(inputs: Inputs, caches: list[PagedKV]) -> Callable[[], None]:
    """One product, then norm, rotation and copies."""
    one, weights = inputs.drafter, inputs.weights
    shape = (-1, one.layers, 2, one.heads, one.head_size)
    page, place = inputs.slots // PAGE_SIZE, inputs.slots % PAGE_SIZE

    def run() -> None:
        keys, values = (inputs.hidden @ weights.weight.T).view(shape).unbind(2)
        normed = keys.float()
        normed = normed * (normed.square().mean(-1, keepdim=True) + weights.eps).rsqrt()
        normed = normed * weights.k_norm.float()[:, None]
        angles = weights.cos_sin[inputs.positions].float()[:, None, None]
        cos, sin = angles.chunk(2, -1)
        first, second = normed.chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        turned = turned.to(one.dtype)
        for layer, cache in enumerate(caches):
            cache.key[page, place] = turned[:, layer]
            cache.value[page, place] = values[:, layer]

    return run


def disagreement(ours: list[PagedKV], theirs: list[PagedKV], dtype: torch.dtype) -> float:
    """Largest difference of two caches, relative to the largest number, over the allowed one.

    torch rounds a key before its norm and after its rotation, the kernel once: 1.5 eps at most. The
    other 2.5 are for sums in another order.
    """
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        for mine, expected in ((one.key, other.key), (one.value, other.value)):
            gap = (mine.float() - expected.float()).abs().max() / expected.float().abs().max()
            worst = max(worst, float(gap) if gap == gap else float("inf"))
    return worst / (4 * torch.finfo(dtype).eps)


def measure(one: Drafter, num_tokens: int, device: str, ceilings: Gpu) -> list[dict[str, object]]:
    """A row for each of the two.

    Raises:
        ArithmeticError: they disagree.
    """
    from bench.attention import median_ms

    inputs = make_inputs(one, num_tokens, device)
    caches = {"dllm": inputs.caches(), "torch": inputs.caches()}
    runs = {
        "dllm": prepare_kernel(inputs, caches["dllm"]),
        "torch": prepare_torch(inputs, caches["torch"]),
    }
    for run in runs.values():
        run()
    if (error := disagreement(caches["dllm"], caches["torch"], one.dtype)) > 1:
        raise ArithmeticError(f"{num_tokens} tokens: {error:.2g} times the allowed difference")
    size = one.dtype.itemsize
    least_ms = linear("context", num_tokens, one.hidden, one.columns, size).floor_ms(ceilings)
    times = {name: median_ms(run, device) for name, run in runs.items()}
    return [
        {
            "tokens": num_tokens,
            "implementation": name,
            "p50_ms": p50_ms,
            "of_ceiling": least_ms / p50_ms,
            "ours_is_faster_by": p50_ms / times["dllm"],
        }
        for name, p50_ms in times.items()
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, no GPU, no conclusions")
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu", help="folder of the CSV")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and time every size."""
    options = parse(arguments)
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed", file=sys.stderr)
        return 2
    if not options.smoke and not torch.cuda.is_available():
        print("There is no GPU: --smoke tests the plumbing; nothing else runs.", file=sys.stderr)
        return 2
    if options.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from bench.attention import measure_ceilings

    device = "cpu" if options.smoke else "cuda"
    one, sizes = (TINY, SMOKE_SIZES) if options.smoke else (QWEN3_8B, SIZES)
    ceilings = measure_ceilings(device)
    shared = {"copy": ceilings.copy, "bf16": ceilings.bf16} | provenance("bench.context_kernel")
    rows: list[dict[str, object]] = []
    for num_tokens in sizes:
        try:
            new = measure(one, num_tokens, device, ceilings)
        except ArithmeticError as error:
            print(error, file=sys.stderr)
            return 1
        for row in new:
            line = "{tokens:6} tokens  {implementation:6} {p50_ms:9.3f} ms"
            print(line.format_map(row), flush=True)
        rows += [row | shared for row in new]
        write_csv(options.results / "context_kernel.csv", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Times single kernels beside what else computes the same.

    python -m bench.kernels sampler                 # the sampling step; on a CPU, too
    python -m bench.kernels attention context       # on a GPU
    python -m bench.kernels --smoke                 # tiny, in Triton's interpreter: no conclusions

    attention   our kernel, torch's SDPA with a dense mask, vLLM's Triton kernel, on canvases of the
                26B model's layers. vLLM's has no anchored window and takes the symmetric one, which
                is less work
    context     the keys and values of all layers of a drafter like Qwen3-8B's: one kernel, or one
                product with norm, rotation and copies behind it
    sampler     everything between the logits of the canvas rows and the next canvas: vLLM's
                built-in functions, and our denoise step with the sparse and with the exact soft
                embedding

Outputs are compared with those of the first before anything is timed; if they differ by more than
rounding, the exit code is 1 and there is no row. Each round runs all of them, every other one in
the opposite order. ``faster`` is the time of the first over that of this one, in the same round:
median, smallest and largest. A time on a GPU is the median that ``triton.testing.do_bench`` finds
for a CUDA graph, with a cold L2. Written to --results: NAME_DEVICE.csv, after every shape.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.context import command_line, provenance, write_csv
from bench.sampler import sampler_cases
from bench.tables import Spread
from dllm.attention.masks import QuerySpan, anchor

CANVAS = 256


class Case(NamedTuple):
    """Implementations of one shape, by name; each is called with nothing and returns its result.

    ``problem(first, other)`` says what is wrong with a result, or nothing.
    """

    about: dict[str, object]
    runs: Mapping[str, Callable[[], Any]]
    problem: Callable[[Any, Any], str]


# --- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Heads and window of one kind of layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    is_anchored: bool = False
    page_size: int = 64  # keys of a page


SLIDING = Layer("sliding-anchored", 16, 8, 256, 1024, is_anchored=True)
SYMMETRIC = replace(SLIDING, name="sliding-symmetric", is_anchored=False)
FULL = Layer("full", 16, 2, 512, page_size=128)  # vLLM: as many bytes as a sliding layer's
DRAFTER = Layer("drafter", 32, 8, 128, page_size=16)


def attention_cases(smoke: bool, device: str) -> Iterator[Case]:
    """Canvases behind a context: one request, then many."""
    if smoke:
        small = Layer("full", 4, 2, 32)
        yield attention_case(small, 2, 48, 8, torch.float32, device)
        window = replace(small, name="sliding", window=16)
        yield attention_case(window, 2, 48, 8, torch.float32, device)
        return
    for batch, context in ((1, 65536), (1, 1024), (8, 8192), (8, 65536), (32, 1024), (32, 8192)):
        for layer in (FULL, SLIDING, SYMMETRIC):
            yield attention_case(layer, batch, context, CANVAS, torch.bfloat16, device)
        yield attention_case(DRAFTER, batch, context, 16, torch.bfloat16, device)


def attention_case(
    layer: Layer, batch: int, context: int, width: int, dtype: torch.dtype, device: str
) -> Case:
    """``batch`` canvases, each behind as much context; pages in random order."""
    from dllm.attention.canvas_attention import canvas_attention
    from dllm.attention.inputs import AttentionOptions, PagedKV, RaggedBatch

    length = context + width
    pages_each = -(-length // layer.page_size)
    shape = (batch * pages_each, layer.page_size, layer.num_kv_heads, 2 * layer.head_size)
    key, value = torch.randn(shape, dtype=dtype, device=device).split(layer.head_size, dim=-1)
    query = torch.randn(batch * width, layer.num_heads, layer.head_size, dtype=dtype, device=device)
    tables = torch.randperm(batch * pages_each, device=device).int().view(batch, pages_each)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * width
    lens = torch.full((batch,), length, dtype=torch.int32, device=device)
    is_causal = torch.zeros(batch, dtype=torch.int32, device=device)
    first_key = _first_key(layer, context, width)
    first_keys = None if first_key is None else torch.full_like(lens, first_key)
    ragged = RaggedBatch(starts, lens, tables, is_causal, width, first_keys)
    options = AttentionOptions(layer.head_size**-0.5, layer.window)
    cache = PagedKV(key, value)
    ours, theirs = torch.empty_like(query), torch.empty_like(query)
    is_visible = _visible(layer, context, width, device)

    def heads_first(one: Tensor) -> Tensor:
        return one.reshape(batch, -1, one.shape[-2], layer.head_size).transpose(1, 2).contiguous()

    dense = [heads_first(query), *(heads_first(one[tables.long()]) for one in (key, value))]
    dense[1:] = [one[:, :, :length] for one in dense[1:]]

    def sdpa() -> Tensor:
        found = torch.nn.functional.scaled_dot_product_attention(
            dense[0], dense[1], dense[2], attn_mask=is_visible, scale=options.scale, enable_gqa=True
        )
        return found.transpose(1, 2).flatten(0, 1)

    def dllm() -> Tensor:
        canvas_attention(query, cache, ragged, options, ours)
        return ours

    def vllm_unified() -> Tensor:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        unified_attention(
            q=query, k=key, v=value, out=theirs, cu_seqlens_q=starts, max_seqlen_q=width,
            seqused_k=lens, max_seqlen_k=length, softmax_scale=options.scale, causal=is_causal,
            window_size=(layer.window - 1, 0) if layer.window else (-1, -1),
            block_table=tables, softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
        )  # fmt: skip
        return theirs

    runs = {"sdpa": sdpa, "dllm": dllm}
    if device == "cuda" and not layer.is_anchored:
        runs["vllm_unified"] = vllm_unified
    about = {"layer": layer.name, "batch": batch, "context": context, "rows": width}
    return Case(about, runs, functools.partial(_far_apart, dtype))


def _first_key(layer: Layer, context: int, width: int) -> int | None:
    """The first visible key of a canvas; None where the symmetric window decides, or none."""
    if not layer.is_anchored or layer.window is None:
        return None
    return anchor(QuerySpan(width, context + width, is_causal=False), layer.window)


def _visible(layer: Layer, context: int, width: int, device: str) -> Tensor:
    """Which keys each row of a canvas sees, ``[width, context + width]``."""
    position = torch.arange(context + width, device=device)
    row = torch.arange(width, device=device)[:, None] + context
    if layer.window is None:
        return torch.ones(width, context + width, dtype=torch.bool, device=device)
    first_key = _first_key(layer, context, width)
    if first_key is not None:
        return (position >= first_key).expand(width, -1)
    return (position - row).abs() < layer.window


def _far_apart(dtype: torch.dtype, first: Tensor, other: Tensor) -> str:
    """Rows may differ by the rounding of probabilities and of the result, in both, and of sums."""
    gap = (first.float() - other.float()).norm(dim=-1) / first.float().norm(dim=-1)
    allowed = 4 * torch.finfo(dtype).eps + 2e-5
    return "" if float(gap.max()) <= allowed else f"{float(gap.max()):.2g} apart; {allowed:.2g}"


# --- the drafter's context -----------------------------------------------------------------------


def context_cases(smoke: bool, device: str) -> Iterator[Case]:
    """Tokens of a step: drafts of one and of 32 requests, prompt chunks."""
    for tokens in (5, 21) if smoke else (16, 512, 2048, 8192):
        sizes = (2, 2, 32, 48) if smoke else (5, 8, 128, 4096)
        yield context_case(tokens, *sizes, torch.float32 if smoke else torch.bfloat16, device)


def context_case(
    tokens: int, layers: int, heads: int, size: int, hidden: int, dtype: torch.dtype, device: str
) -> Case:
    """Random weights and hidden states; every token has a slot of its own."""
    from dllm.attention.context_kv import ContextWeights, write_context_kv
    from dllm.attention.inputs import PagedKV

    random = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=random) * scale).to(dtype).to(device)

    pages = -(-tokens // 16)
    angles = torch.arange(pages * 16)[:, None] * 1e6 ** -(torch.arange(0, size, 2) / size)
    weights = ContextWeights(
        weight=draw(layers * 2 * heads * size, hidden, scale=hidden**-0.5),
        bias=None,
        k_norm=1 + draw(layers, size, scale=0.1),
        eps=1e-6,
        cos_sin=torch.cat([angles.cos(), angles.sin()], 1).to(dtype).to(device),
        is_neox=True,
    )
    states, positions = draw(tokens, hidden), torch.arange(tokens, device=device)
    slots = torch.randperm(pages * 16, generator=random)[:tokens].to(device)
    both = torch.zeros(2, layers, pages, 16, heads, 2 * size, dtype=dtype, device=device)
    caches = [PagedKV(*one.split(size, dim=-1)) for one in both[0]]

    def dllm() -> Tensor:
        write_context_kv(states, positions, weights, caches, [slots] * layers)
        return both[0]

    def plain() -> Tensor:
        keys, values = (states @ weights.weight.T).view(tokens, layers, 2, heads, size).unbind(2)
        normed = keys.float()
        normed = normed * (normed.square().mean(-1, keepdim=True) + weights.eps).rsqrt()
        normed = normed * weights.k_norm.float()[:, None]
        cos, sin = weights.cos_sin[positions].float()[:, None, None].chunk(2, -1)
        left, right = normed.chunk(2, -1)
        turned = torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(dtype)
        for layer in range(layers):
            both[1, layer, slots // 16, slots % 16] = torch.cat(
                [turned[:, layer], values[:, layer]], -1
            )
        return both[1]

    def problem(first: Tensor, other: Tensor) -> str:
        # torch rounds a key before its norm and after its rotation, the kernel once: 1.5 eps at
        # most. The other 2.5 are for sums in another order.
        gap = float((first.float() - other.float()).abs().max() / first.float().abs().max())
        return "" if gap <= 4 * torch.finfo(dtype).eps else f"{gap:.2g} apart"

    return Case({"tokens": tokens}, {"torch": plain, "dllm": dllm}, problem)


# --- times ---------------------------------------------------------------------------------------


def sampling_cases(smoke: bool, device: str) -> Iterator[Case]:
    """Those of ``bench.sampler``."""
    return (Case(*one) for one in sampler_cases(smoke, device))


CASES = {"attention": attention_cases, "context": context_cases, "sampler": sampling_cases}


def milliseconds(run: Callable[[], object], device: str) -> float:
    """Of a call; on a GPU as a CUDA graph, with a cold L2 before each."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    from triton.testing import do_bench

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found: float = do_bench(graph.replay, warmup=20, rep=100, return_mode="median")
    return found


def measure(case: Case, rounds: int, device: str) -> list[dict[str, object]]:
    """A row for each implementation.

    Raises:
        ArithmeticError: one computes something else than the first.
    """
    names = list(case.runs)
    expected = case.runs[names[0]]()
    for name in names[1:]:
        if problem := case.problem(expected, case.runs[name]()):
            raise ArithmeticError(f"{case.about}, {name}: {problem}")
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[:: 1 if number % 2 == 0 else -1]:
            times[name].append(milliseconds(case.runs[name], device))
    rows = []
    for name in names:
        faster = [a / b for a, b in zip(times[names[0]], times[name], strict=True)]
        spread = Spread.of(faster)
        ends = {"faster": spread.median, "faster_low": spread.low, "faster_high": spread.high}
        p50_ms = statistics.median(times[name])
        rows.append(case.about | {"implementation": name, "p50_ms": p50_ms} | ends)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, print and write every shape."""
    parser = command_line(__doc__)
    parser.add_argument("kernels", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stop-after-s", type=float, default=1e9, help="start no shape after")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, no conclusions")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if unknown := set(options.kernels) - set(CASES):
        parser.error(f"{min(unknown)}; allowed: {', '.join(CASES)}.")
    chosen = options.kernels or list(CASES)
    if device == "cpu" and not options.smoke and chosen != ["sampler"]:
        parser.error("there is no GPU; allowed: sampler, or --smoke.")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    about, started = provenance("bench.kernels"), time.monotonic()
    for name in chosen:
        rows: list[dict[str, object]] = []
        for case in CASES[name](options.smoke, device):
            if time.monotonic() - started > options.stop_after_s:
                break
            try:
                new = measure(case, 1 if options.smoke else options.rounds, device)
            except ArithmeticError as error:
                print(error, file=sys.stderr)
                return 1
            for row in new:
                print(*row.values(), flush=True)
            rows += [row | about for row in new]
            write_csv(options.results / f"{name}_{device}.csv", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

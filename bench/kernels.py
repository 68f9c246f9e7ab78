"""Times single kernels beside what else computes the same.

    python -m bench.kernels sampler                 # the sampling step; on a CPU, too
    python -m bench.kernels attention context       # on a GPU
    python -m bench.kernels --smoke                 # tiny, in Triton's interpreter: no conclusions

    attention   vLLM's Triton kernel, FlashAttention 4 and ours, on canvases of the 26B model's
                layers. The others have no anchored window: compare them on the symmetric one
    context     a drafter's context, of all its layers: vLLM's operations (one product, norm, RoPE,
                a cache write for each layer), and the one kernel of ``fused_context``
    sampler     everything between the logits of the canvas rows and the next canvas: vLLM's
                built-in functions, and our denoise step with each of its soft embeddings

Outputs are compared before anything is timed; if they differ by more than rounding, the exit code
is 1 and there is no row. Each round runs all of them, every other one in the opposite order.
``faster`` is the time of the first over that of this one, in the same round: median, smallest and
largest. A time on a GPU is the median of ``triton.testing.do_bench`` for a CUDA graph, with a cold
L2. Written to --results: NAME_DEVICE.csv, after every shape.
"""

from __future__ import annotations

import importlib
import os
import sys
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.context import GateError, Row, command_line, publish, reporting_failures
from dllm.attention.masks import ALL, Mask, QuerySpan

CANVAS = 256


class Case(NamedTuple):
    """Implementations of one shape, by name; each is called with nothing and returns its result.

    ``problem(expected(), result)`` says what is wrong with a result, or nothing. One of them may be
    what is expected.
    """

    about: dict[str, object]
    runs: Mapping[str, Callable[[], Any]]
    expected: Callable[[], Any]
    problem: Callable[[Any, Any], str]


# --- attention -----------------------------------------------------------------------------------


class Layer(NamedTuple):
    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    mask: Mask = ALL
    page_size: int = 64  # keys of a page


SLIDING = Layer("sliding-anchored", 16, 8, 256, Mask(1024, is_anchored=True))
SYMMETRIC = SLIDING._replace(name="sliding-symmetric", mask=Mask(1024))
FULL = Layer("full", 16, 2, 512, page_size=128)  # vLLM: as many bytes as a sliding layer's
DRAFTER = Layer("drafter", 32, 8, 128, page_size=16)


def attention_cases(smoke: bool, device: str) -> Iterator[Case]:
    """Canvases behind a context: one request, then many."""
    if smoke:
        small = Layer("full", 4, 2, 32)
        for layer in (small, small._replace(name="sliding", mask=Mask(16))):
            yield attention_case(layer, 2, 48, 8, torch.float32, device)
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
    from dllm.attention.reference import paged_attention

    length = context + width
    pages_each = -(-length // layer.page_size)
    shape = (batch * pages_each, layer.page_size, layer.num_kv_heads, 2 * layer.head_size)
    key, value = torch.randn(shape, dtype=dtype, device=device).split(layer.head_size, dim=-1)
    query = torch.randn(batch * width, layer.num_heads, layer.head_size, dtype=dtype, device=device)
    tables = torch.randperm(batch * pages_each, device=device).int().view(batch, pages_each)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * width
    lens = torch.full((batch,), length, dtype=torch.int32, device=device)
    is_causal = torch.zeros(batch, dtype=torch.int32, device=device)
    span = QuerySpan(width, length, is_causal=False)
    first_key = layer.mask.first_key(span)
    first_keys = None if first_key is None else torch.full_like(lens, first_key)
    ragged = RaggedBatch(starts, lens, tables, is_causal, width, first_keys)
    options = AttentionOptions(layer.head_size**-0.5, layer.mask)
    cache = PagedKV(key, value)
    ours, theirs = torch.empty_like(query), torch.empty_like(query)

    def dllm() -> Tensor:
        canvas_attention(query, cache, ragged, options, ours)
        return ours

    def vllm_unified() -> Tensor:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        unified_attention(
            q=query, k=key, v=value, out=theirs, cu_seqlens_q=starts, max_seqlen_q=width,
            seqused_k=lens, max_seqlen_k=length, softmax_scale=options.scale, causal=is_causal,
            window_size=(layer.mask.window - 1, 0) if layer.mask.window else (-1, -1),
            block_table=tables, softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
        )  # fmt: skip
        return theirs

    def definition() -> Tensor:
        return torch.cat(paged_attention(query, key, value, tables, [span] * batch, options))

    runs: dict[str, Callable[[], Tensor]] = {}
    if device == "cuda" and not layer.mask.is_anchored:
        from dllm.attention.flash import flash_attention, has_flash_attention
        from dllm.attention.visible_pages import VisiblePages

        def flash() -> Tensor:
            flash_attention(query, cache, shorter, options, theirs)
            return theirs

        runs["vllm_unified"] = vllm_unified
        if has_flash_attention() and torch.cuda.get_device_capability()[0] == 9:
            shorter = replace(ragged, max_seq_len=length, max_ahead=width - 1)
            if layer.mask.window is not None:  # once a step, for all such layers
                sizes = layer.mask.window, layer.page_size, batch, width
                shorter = VisiblePages(*sizes, query.device)(shorter)
            runs["flash_attention_4"] = flash
    runs["dllm"] = dllm
    about = {"layer": layer.name, "batch": batch, "context": context, "rows": width}
    return Case(about, runs, definition, partial(_far_apart, dtype))


def _far_apart(dtype: torch.dtype, expected: Tensor, found: Tensor) -> str:
    """Rows may differ by the rounding of probabilities and of the result, and of sums."""
    gap = (expected - found.float()).norm(dim=-1) / expected.norm(dim=-1)
    allowed = 4 * torch.finfo(dtype).eps + 2e-5
    return "" if float(gap.max()) <= allowed else f"{float(gap.max()):.2g} apart; {allowed:.2g}"


def cases_of(module: str, smoke: bool, device: str) -> Iterator[Case]:
    """Those of another file, which is imported late: it imports Triton."""
    cases = importlib.import_module(module).cases
    return (Case(*case) for case in cases(smoke, device))


CASES: dict[str, Callable[[bool, str], Iterator[Case]]] = {
    "attention": attention_cases,
    "context": partial(cases_of, "bench.context_kv"),
    "sampler": partial(cases_of, "bench.sampling_step"),
}

# --- times ---------------------------------------------------------------------------------------


def milliseconds(run: Callable[[], object], device: str) -> float:
    """The time of a call; on a GPU as a CUDA graph, with a cold L2 before each."""
    if device == "cpu":
        return 1e3 * timeit.timeit(run, number=1)
    from triton.testing import do_bench

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(do_bench(graph.replay, warmup=20, rep=100, return_mode="median"))


def measure(case: Case, rounds: int, device: str) -> list[Row]:
    """A row for each. Raises GateError: one computes something else than expected."""
    names, expected = list(case.runs), case.expected()
    for name, run in case.runs.items():
        if run is not case.expected and (problem := case.problem(expected, run())):
            raise GateError(f"{case.about}, {name}: {problem}")
    del expected  # may be large
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            times[name].append(milliseconds(case.runs[name], device))
    rows = []
    for name, own in times.items():
        faster = [first / one for first, one in zip(times[names[0]], own, strict=True)]
        row = {"implementation": name, "p50_ms": median(own), "faster": median(faster)}
        rows.append(case.about | row | {"faster_low": min(faster), "faster_high": max(faster)})
    return rows


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("kernels", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, no conclusions")
    options = parser.parse_args(arguments)
    if unknown := set(options.kernels) - set(CASES):
        parser.error(f"{min(unknown)}; allowed: {', '.join(CASES)}.")
    chosen, device = options.kernels or list(CASES), "cuda"
    if not torch.cuda.is_available():
        device = "cpu"
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        if not options.smoke and chosen != ["sampler"]:
            parser.error("there is no GPU; allowed: sampler, or --smoke.")
    for name in chosen:
        rows: list[Row] = []
        for case in CASES[name](options.smoke, device):
            for row in measure(case, 1 if options.smoke else options.rounds, device):
                print(*row.values(), flush=True)
                rows.append(row)
            publish(options.results / f"{name}_{device}.csv", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Times the attention kernel on the shapes of the 26B model and of the drafter.

    python -m bench.attention                            # all shapes, beside SDPA and vLLM's kernel
    python -m bench.attention --only full/denoise --peers sdpa
    python -m bench.attention --smoke                    # tiny shapes, Triton's interpreter, no GPU

    dllm          our kernel
    sdpa          torch.nn.functional.scaled_dot_product_attention with a dense mask; K and V are
                  gathered beforehand, for free
    vllm_unified  vLLM's Triton kernel, on the shapes whose sequences are causal or bidirectional as
                  a whole; it has no anchored window and takes the symmetric one, which is less work

For every shape the output of each is compared with the dense fp32 reference first; what is wrong
has no time. A call is timed as a CUDA graph, as a server runs it, with a cold L2. `of_ceiling` is
the time that the least bytes or operations of the shape would need, at the speed of a copy and of a
bf16 product measured in the same run, divided by the time taken. The CSV has a line for each shape
and implementation and is written after every shape; no shape begins after --stop-after-s. Exits
with 1 when ours was wrong or did not run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bench.attention_shapes import Inputs, Shape, make_inputs, smoke_table, table
from bench.context import RESULTS, provenance, write_csv
from bench.roofline import Gpu, Work
from dllm.attention.masks import Window
from dllm.attention.reference import dense_attention, gather_pages

Run = Callable[[], Tensor]

OURS = "dllm"
# Unit roundoff of a dtype.
ROUNDOFF = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}


class CannotExpressError(Exception):
    """This implementation cannot compute this shape; the message says why."""


# --- implementations: prepare once, then call ----------------------------------------------------


def prepare_ours(shape: Shape, inputs: Inputs) -> Run:
    """Our kernel with the committed tiles and its workspace allocated beforehand."""
    from dllm.attention.canvas_attention import batch_shape, canvas_attention, default_plan

    tensors = inputs.query, inputs.cache, inputs.batch
    plan = default_plan(*tensors, inputs.options)
    needed = plan.workspace_elements(batch_shape(*tensors))
    out = torch.full_like(inputs.query, float("nan"))
    workspace = torch.full((needed,), float("nan"), device=out.device)

    def run() -> Tensor:
        canvas_attention(*tensors, inputs.options, out, plan, workspace)
        return out

    return run


def prepare_sdpa(shape: Shape, inputs: Inputs) -> Run:
    """torch's own attention; its mask is dense, so it computes every pair."""
    layer, length = shape.layer, shape.context + shape.query_len
    query = inputs.query.view(shape.batch, shape.query_len, layer.num_heads, layer.head_size)

    def gather(cache: Tensor) -> Tensor:  # [batch, kv_heads, keys, size]
        pages = [gather_pages(cache, one, length) for one in inputs.batch.block_tables]
        return torch.stack(pages).transpose(1, 2).contiguous()

    query = query.transpose(1, 2).contiguous()
    key, value = gather(inputs.cache.key), gather(inputs.cache.value)
    visible = torch.tensor(shape.visible(), device=query.device)  # [batch, rows, 2]
    start, stop = visible[:, None, :, :, None].unbind(3)
    position = torch.arange(key.shape[2], device=query.device)
    mask = (position >= start) & (position < stop)  # [batch, 1, rows, keys]
    scale, attention = inputs.options.scale, torch.nn.functional.scaled_dot_product_attention

    def run() -> Tensor:
        out = attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def prepare_vllm_unified(shape: Shape, inputs: Inputs) -> Run:
    """vLLM's kernel; one flag says whether a batch is causal."""
    if inputs.query.device.type == "cpu":
        raise CannotExpressError("needs a GPU")
    if shape.splits not in ((0,), (shape.query_len,)):
        raise CannotExpressError("causal and bidirectional rows in one batch")
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError as error:
        raise CannotExpressError(f"vLLM cannot be imported ({error})") from None
    window, batch = shape.layer.window, inputs.batch
    # A tensor for canvases, as the built-in gives it.
    causal = True if shape.splits[0] > 0 else torch.zeros_like(batch.seq_lens)
    out = torch.empty_like(inputs.query)

    def run() -> Tensor:
        unified_attention(
            q=inputs.query, k=inputs.cache.key, v=inputs.cache.value, out=out,
            cu_seqlens_q=batch.query_start_loc, max_seqlen_q=shape.query_len,
            seqused_k=batch.seq_lens, max_seqlen_k=shape.context + shape.query_len,
            softmax_scale=inputs.options.scale, causal=causal,
            window_size=(-1, -1) if window is None else (window.size - 1, 0),
            block_table=batch.block_tables, softcap=0.0,
            q_descale=None, k_descale=None, v_descale=None,
        )  # fmt: skip
        return out

    return run


PREPARE: dict[str, Callable[[Shape, Inputs], Run]] = {
    OURS: prepare_ours,
    "sdpa": prepare_sdpa,
    "vllm_unified": prepare_vllm_unified,
}


def window_of(name: str, shape: Shape) -> Window | None:
    """The window that an implementation computes."""
    window = shape.layer.window
    if name == "vllm_unified" and window is not None:
        return Window("symmetric", window.size)
    return window


# --- right or wrong ------------------------------------------------------------------------------


def checked_sequences(shape: Shape) -> range:
    """The last three: phases are dealt out in turn, and there are at most three."""
    return range(max(0, shape.batch - 3), shape.batch)


def reference(shape: Shape, inputs: Inputs, window: Window | None) -> Tensor:
    """The dense reference of the checked sequences, ``[seqs, rows, heads, head_size]`` fp32."""
    spans, layer = shape.spans(), shape.layer
    options = replace(inputs.options, window=window)
    group = layer.num_heads // layer.num_kv_heads
    outputs = []
    for index in checked_sequences(shape):
        query = inputs.query[index * shape.query_len : (index + 1) * shape.query_len]
        pages, length = inputs.batch.block_tables[index], spans[index].seq_len
        key = gather_pages(inputs.cache.key, pages, length)
        value = gather_pages(inputs.cache.value, pages, length)
        heads = [  # one KV head at a time: memory
            dense_attention(
                query[:, head * group : (head + 1) * group],
                key[:, head : head + 1],
                value[:, head : head + 1],
                spans[index],
                options,
            )
            for head in range(layer.num_kv_heads)
        ]
        outputs.append(torch.cat(heads, dim=1))
    return torch.stack(outputs)


def row_error(output: Tensor, shape: Shape, expected: Tensor) -> float:
    """Largest |output - expected| / |expected| over rows and heads, in the 2-norm; NaN is inf.

    Relative to the row: over a long context outputs are small, and an absolute bound would let
    anything pass.
    """
    rows = output.view(shape.batch, shape.query_len, *output.shape[1:])
    difference = rows[checked_sequences(shape)].float() - expected
    error = (difference.norm(dim=-1) / expected.norm(dim=-1)).max().item()
    return error if error == error else float("inf")


def tolerance(dtype: torch.dtype) -> float:
    """Largest allowed `row_error`.

    With u the unit roundoff: rounding probability p_k by a factor of 1 + d_k, |d_k| <= u, moves the
    output by sum(p_k d_k v_k), at most u of its norm where the v_k are orthogonal; rounding the
    output adds u. Random v_k are nearly orthogonal: a third u for that. 2e-5: fp32 exponentials.
    """
    return 3 * ROUNDOFF[dtype] + 2e-5


# --- times ---------------------------------------------------------------------------------------


def median_ms(run: Callable[[], object], device: str) -> float:
    """Of a call; on a GPU as a graph, with a cold L2 before each.

    The first call is not captured: libraries set themselves up in it, and kernels are compiled.
    """
    if device == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    from triton.testing import do_bench

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    timed: float = do_bench(graph.replay, warmup=40, rep=200, return_mode="median")
    return timed


def measure_ceilings(device: str) -> Gpu:
    """Copy of 1 GiB and a bf16 product of 8192 x 8192 matrices; small ones on the CPU."""
    is_gpu = device == "cuda"
    source = torch.zeros(2**28 if is_gpu else 2**22, device=device)
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), device)
    size = 8192 if is_gpu else 256
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    product_ms = median_ms(lambda: left @ left, device)
    bf16 = 2e3 * size**3 / product_ms
    return Gpu("this device", copy=2e3 * source.nbytes / copy_ms, bf16=bf16, fp8=bf16)


@dataclass(frozen=True)
class Result:
    """One line of the CSV.

    ``status`` is ok, or, without times, wrong, skipped (why) or failed (why).
    """

    shape: str
    implementation: str
    status: str
    row_error: float | None = None
    p50_ms: float | None = None
    tflops: float | None = None
    of_ceiling: float | None = None
    ours_is_faster_by: float | None = None


def measure_shape(shape: Shape, peers: list[str], device: str, ceilings: Gpu) -> list[Result]:
    """Check, then time, ours and each peer on one shape; without ours there is nothing to compare.

    What fails is a line of its own: one peer that runs out of memory does not end the run.
    """
    inputs = make_inputs(shape, device)
    results: list[Result] = []
    for name in [OURS, *peers]:
        if device == "cuda":
            torch.cuda.empty_cache()
        try:
            result = measure_one(name, shape, inputs, ceilings)
        except CannotExpressError as limit:
            result = Result(shape.name, name, f"skipped: {limit}")
        except Exception as failure:
            reason = f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"
            result = Result(shape.name, name, f"failed: {reason}")
        if result.p50_ms:
            ours_ms = results[0].p50_ms if results else result.p50_ms
            assert ours_ms
            result = replace(result, ours_is_faster_by=result.p50_ms / ours_ms)
        results.append(result)
        if results[0].status != "ok":
            break
    return results


def measure_one(name: str, shape: Shape, inputs: Inputs, ceilings: Gpu) -> Result:
    """One implementation on one shape."""
    window = window_of(name, shape)
    label = name if window == shape.layer.window else f"{name} (symmetric)"
    expected = reference(shape, inputs, window)
    run = PREPARE[name](shape, inputs)
    error = row_error(run(), shape, expected)
    if error > tolerance(shape.dtype):
        return Result(shape.name, label, "wrong", error)
    p50_ms = median_ms(run, inputs.query.device.type)
    least_ms = Work(shape.name, shape.bytes(), shape.flops()).floor_ms(ceilings)
    tflops = shape.flops() / p50_ms / 1e9
    return Result(shape.name, label, "ok", error, p50_ms, tflops, least_ms / p50_ms)


def show(result: Result) -> None:
    """One line for a human."""
    line = f"{result.shape:38} {result.implementation:24} "
    if result.status == "ok":
        line += (
            f"{result.p50_ms:9.3f} ms {result.tflops:7.1f} TFLOPS "
            f"{100 * (result.of_ceiling or 0):5.1f}% x{result.ours_is_faster_by:.2f}"
        )
    else:
        error = result.row_error
        line += result.status + ("" if error is None else f", row error {error:.3g}")
    print(line, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = [name for name in PREPARE if name != OURS]
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers)
    parser.add_argument("--stop-after-s", type=float, default=500.0, help="start no shape after")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, no GPU, no conclusions")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and time every shape; the CSV is written after each."""
    options = parse(arguments)
    if not options.smoke and not torch.cuda.is_available():
        print("There is no GPU: --smoke tests the plumbing; nothing else runs.", file=sys.stderr)
        return 2
    shapes = [s for s in (smoke_table() if options.smoke else table()) if options.only in s.name]
    if not shapes:
        print(f"--only {options.only}: in no shape's name.", file=sys.stderr)
        return 2
    if options.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    device = "cpu" if options.smoke else "cuda"
    path = options.results / f"attention_{'smoke' if options.smoke else 'gpu'}.csv"
    ceilings = measure_ceilings(device)
    shared = {"copy": ceilings.copy, "bf16": ceilings.bf16} | provenance("bench.attention")
    print(f"copy {ceilings.copy / 1e9:.0f} GB/s, bf16 product {ceilings.bf16 / 1e12:.1f} TFLOPS")
    results: list[Result] = []
    started = time.monotonic()
    for shape in shapes:
        if time.monotonic() - started > options.stop_after_s:
            print(f"stopped before {shape.name}: --stop-after-s {options.stop_after_s}")
            break
        lines = measure_shape(shape, options.peers, device, ceilings)
        for line in lines:
            show(line)
        results += lines
        write_csv(path, [asdict(result) | shared for result in results])
    ours = [result.status for result in results if result.implementation == OURS]
    return int(any(status != "ok" for status in ours))


if __name__ == "__main__":
    sys.exit(main())

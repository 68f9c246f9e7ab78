"""Times the attention kernel on the shapes of the 26B model and of the drafter.

    python -m bench.attention                            # all shapes, all peers that are installed
    python -m bench.attention --only full/denoise --peers sdpa vllm_unified
    python -m bench.attention --smoke                    # tiny shapes, Triton's interpreter, no GPU

It needs torch and Triton; ``bench/attention_peers.py`` lists what ours is compared with. For every
shape the output is compared with the dense fp32 reference first; a shape that fails has no time,
and neither has a peer that computes something else. A call is timed as a CUDA graph, as a server
runs it, with a cold L2. Ceilings are measured in the same run: a copy and a bf16 matrix product.
`of_ceiling` is the time that the slower of the two would need for the least bytes and operations of
the shape, divided by the time taken. The CSV has a line for each shape and implementation and is
written after every shape; no shape begins after --stop-after-s. Exits with 1 when a check failed or
ours did not run.
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

from attention.masks import Window
from attention.reference import dense_attention, gather_pages
from bench.attention_peers import PEERS, CannotExpressError, compared_window
from bench.attention_shapes import Inputs, Shape, make_inputs, smoke_table, table
from bench.context import RESULTS, provenance, write_csv

OURS = "dllm"
# Unit roundoff of a dtype.
ROUNDOFF = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}


def tolerance(dtype: torch.dtype) -> float:
    """Largest allowed `row_error`.

    With u the unit roundoff: rounding probability p_k by a factor of 1 + d_k, |d_k| <= u, moves the
    output by sum(p_k d_k v_k), at most u of its norm where the v_k are orthogonal; rounding the
    output adds u. Random v_k are nearly orthogonal: a third u for that. 2e-5: fp32 exponentials.
    """
    return 3 * ROUNDOFF[dtype] + 2e-5


@dataclass(frozen=True)
class Ceilings:
    """What this device reaches: bytes/s of a copy (read + write), operations/s of a product."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float

    def least_ms(self, shape: Shape) -> float:
        """No implementation can be faster than this."""
        by_bytes = shape.bytes() / self.copy_bytes_per_s
        return 1e3 * max(by_bytes, shape.flops() / self.matmul_flops_per_s)


@dataclass(frozen=True)
class Result:
    """One line of the CSV; times in ms.

    ``status`` is ok, or, without times, wrong, skipped (why) or failed (why).
    """

    shape: str
    implementation: str
    status: str
    max_row_error: float | None = None
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    tflops: float | None = None
    of_ceiling: float | None = None
    ours_is_faster_by: float | None = None


def checked_sequences(shape: Shape) -> list[int]:
    """The first and the last three sequences: three, because phases are dealt out in turn."""
    return sorted({0, *range(max(0, shape.batch - 3), shape.batch)})


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


def quantiles_ms(run: Callable[[], Tensor], device: str, budget_ms: float) -> list[float]:
    """p20, p50 and p80 of a call; on a GPU as a graph, with a cold L2 before each.

    A call of more than a second is timed once.
    """
    if device == "cuda":
        from triton.testing import do_bench

        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        once = _seconds(graph.replay)
        if once < 1:
            return do_bench(
                graph.replay, warmup=budget_ms / 5, rep=budget_ms, quantiles=[0.2, 0.5, 0.8]
            )
        return 3 * [1e3 * once]
    times = [1e3 * _seconds(run) for _ in range(2)]
    return torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_ceilings(device: str) -> Ceilings:
    """Copy of 1 GiB and a bf16 product of 8192 x 8192 matrices; small ones on the CPU."""
    is_gpu = device == "cuda"
    source = torch.zeros(2**28 if is_gpu else 2**22, device=device)
    target = torch.empty_like(source)
    copy_ms = quantiles_ms(lambda: target.copy_(source), device, 200)[1]
    size = 8192 if is_gpu else 256
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    matmul_ms = quantiles_ms(lambda: left @ left, device, 400)[1]
    return Ceilings(2 * source.nbytes / copy_ms * 1e3, 2 * size**3 / matmul_ms * 1e3)


def prepare_ours(shape: Shape, inputs: Inputs) -> Callable[[], Tensor]:
    """Our kernel with the committed tiles and its workspace allocated beforehand."""
    from attention.canvas_attention import batch_shape, canvas_attention, default_plan

    out = torch.full_like(inputs.query, float("nan"))
    plan = default_plan(inputs.query, inputs.cache, inputs.batch, inputs.options)
    needed = plan.workspace_elements(batch_shape(inputs.query, inputs.cache, inputs.batch))
    workspace = torch.full((needed,), float("nan"), device=out.device)

    def run() -> Tensor:
        canvas_attention(
            inputs.query, inputs.cache, inputs.batch, inputs.options, out, plan, workspace
        )
        return out

    return run


def measure_shape(
    shape: Shape, peers: list[str], device: str, ceilings: Ceilings, budget_ms: float
) -> list[Result]:
    """Check, then time, ours and each peer on one shape; without ours there is nothing to compare.

    What fails is a line of its own: one peer that runs out of memory does not end the run.
    """
    inputs = make_inputs(shape, device)
    expected: dict[Window | None, Tensor] = {}
    results: list[Result] = []
    for name in [OURS, *peers]:
        window = shape.layer.window if name == OURS else compared_window(name, shape)
        prepare = prepare_ours if name == OURS else PEERS[name]
        run: Callable[[], Tensor] | None = None  # frees the previous one's tensors
        if device == "cuda":
            torch.cuda.empty_cache()
        try:
            if window not in expected:
                expected[window] = reference(shape, inputs, window)
            run = prepare(shape, inputs)
            error = row_error(run(), shape, expected[window])
            if error > tolerance(shape.dtype):
                results.append(Result(shape.name, name, "wrong", max_row_error=error))
            else:
                times = quantiles_ms(run, device, budget_ms)
                results.append(timed(shape, name, error, times, ceilings, results))
        except CannotExpressError as limit:
            results.append(Result(shape.name, name, f"skipped: {limit}"))
        except Exception as failure:
            reason = f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"
            status = "failed" if name == OURS else "skipped"
            results.append(Result(shape.name, name, f"{status}: {reason}"))
        if results[0].status != "ok":
            break
    return results


def timed(
    shape: Shape, name: str, error: float, times: list[float], ceilings: Ceilings,
    before: list[Result],
) -> Result:  # fmt: skip
    """The line of an implementation that is right; ours is the first of ``before``."""
    is_other_mask = name != OURS and compared_window(name, shape) != shape.layer.window
    ours = before[0].p50_ms if before else times[1]
    return Result(
        shape=shape.name,
        implementation=f"{name} (symmetric)" if is_other_mask else name,
        status="ok",
        max_row_error=error,
        p20_ms=times[0],
        p50_ms=times[1],
        p80_ms=times[2],
        tflops=shape.flops() / times[1] / 1e9,
        of_ceiling=ceilings.least_ms(shape) / times[1],
        ours_is_faster_by=times[1] / (ours or times[1]),
    )


def show(result: Result) -> None:
    """One line for a human."""
    line = f"{result.shape:38} {result.implementation:24} "
    if result.status == "ok":
        line += (
            f"{result.p20_ms:9.3f} {result.p50_ms:9.3f} {result.p80_ms:9.3f} ms "
            f"{result.tflops:7.1f} TFLOPS {100 * (result.of_ceiling or 0):5.1f}% "
            f"x{result.ours_is_faster_by:.2f}"
        )
    else:
        error = result.max_row_error
        line += result.status + ("" if error is None else f", row error {error:.3g}")
    print(line, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--budget-ms", type=float, default=200.0, help="timing of one line")
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
    if options.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    device = "cpu" if options.smoke else "cuda"
    path = options.results / f"attention_{'smoke' if options.smoke else 'gpu'}.csv"
    ceilings = measure_ceilings(device)
    shared = asdict(ceilings) | provenance("bench.attention")
    print(
        f"ceilings: copy {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s, "
        f"bf16 product {ceilings.matmul_flops_per_s / 1e12:.1f} TFLOPS"
    )
    print(f"{'shape':38} {'implementation':24} {'p20':>9} {'p50':>9} {'p80':>9}", flush=True)
    results: list[Result] = []
    started = time.monotonic()
    for shape in smoke_table() if options.smoke else table():
        if options.only not in shape.name:
            continue
        if time.monotonic() - started > options.stop_after_s:
            print(f"stopped before {shape.name}: --stop-after-s {options.stop_after_s}")
            break
        lines = measure_shape(shape, options.peers, device, ceilings, options.budget_ms)
        for line in lines:
            show(line)
        results += lines
        write_csv(path, [asdict(result) | shared for result in results])
    return int(any(result.status.startswith(("wrong", "failed")) for result in results))


if __name__ == "__main__":
    sys.exit(main())

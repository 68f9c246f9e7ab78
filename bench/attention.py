"""Times the attention kernel on the shapes of the 26B model and of the drafter.

    python -m bench.attention                            # all shapes, all peers that are installed
    python -m bench.attention --only full/denoise --peers sdpa,vllm_unified
    python -m bench.attention --vllm-source DIR          # vLLM's kernel from its source files
    python -m bench.attention --smoke                    # tiny shapes, Triton's interpreter, no GPU

For every shape the output is compared with the dense fp32 reference first; a shape that fails
prints no time, and neither does a peer that computes something else. Ceilings are measured in the
same run: a copy and a bf16 matrix product. `of_ceiling` is the time the slower of the two would
need for the least bytes and operations of the shape, divided by the time taken. Writes a CSV, one
line a shape and implementation, and a plot of it (SVG). Exits with 1 when any check failed.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from attention.masks import Window
from attention.reference import dense_attention, gather_pages
from bench.attention_plot import write_plot
from bench.attention_shapes import Inputs, Shape, make_inputs, smoke_table, table

ROOT = Path(__file__).resolve().parent.parent
OURS = "dllm"
# 2 * u * max|V|, derived in tests/attention_kernel_suite.py; V is normal, |V| < 6.5 in practice.
TOLERANCE = {torch.bfloat16: 2 * 2**-9 * 6.5, torch.float16: 2 * 2**-12 * 6.5, torch.float32: 1e-4}


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
    """One line of the CSV; times in ms. ``status`` is ok, wrong (no times) or skipped (why)."""

    shape: str
    implementation: str
    status: str
    max_error: float | None = None
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    tflops: float | None = None
    of_ceiling: float | None = None
    ours_is_faster_by: float | None = None


def max_error(output: Tensor, shape: Shape, inputs: Inputs, window: Window | None) -> float:
    """Largest difference from the dense reference, over the first and the last three sequences.

    Three, because phases are dealt out in turn; NaN counts as infinite.
    """
    worst, spans = 0.0, shape.spans()
    options = replace(inputs.options, window=window)
    for index in sorted({0, *range(max(0, shape.batch - 3), shape.batch)}):
        rows = slice(index * shape.query_len, (index + 1) * shape.query_len)
        pages, length = inputs.batch.block_tables[index], spans[index].seq_len
        key = gather_pages(inputs.cache.key, pages, length)
        value = gather_pages(inputs.cache.value, pages, length)
        for head in range(shape.layer.num_kv_heads):  # one KV head at a time: memory
            group = shape.layer.num_heads // shape.layer.num_kv_heads
            heads = slice(head * group, (head + 1) * group)
            expected = dense_attention(
                inputs.query[rows, heads], key[:, head : head + 1], value[:, head : head + 1],
                spans[index], options,
            )  # fmt: skip
            error = (output[rows, heads].float() - expected).abs().max().item()
            worst = max(worst, error if error == error else float("inf"))
    return worst


def quantiles_ms(run: Callable[[], Tensor], device: str, budget_ms: float) -> list[float]:
    """p20, p50 and p80 of a call; on a GPU with a cold L2 before each."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(run, warmup=budget_ms / 5, rep=budget_ms, quantiles=[0.2, 0.5, 0.8])
    times = []
    for _ in range(2):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()


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
    """Check, then time, ours and each peer on one shape."""
    from bench.peers import PEERS, CannotExpressError, compared_window

    inputs = make_inputs(shape, device)
    results: list[Result] = []
    for name in [OURS, *peers]:
        window = shape.layer.window if name == OURS else compared_window(name, shape)
        prepare = prepare_ours if name == OURS else PEERS[name]
        run: Callable[[], Tensor] | None = None  # frees the previous one's tensors
        try:
            run = prepare(shape, inputs)
            error = max_error(run(), shape, inputs, window)
        except CannotExpressError as limit:
            results.append(Result(shape.name, name, f"skipped: {limit}"))
            continue
        except Exception as failure:
            if name == OURS:
                raise
            reason = str(failure).strip().partition("\n")[0]
            results.append(Result(shape.name, name, f"skipped: {type(failure).__name__}: {reason}"))
            continue
        if error > TOLERANCE[shape.dtype]:
            results.append(Result(shape.name, name, "wrong", max_error=error))
            if name == OURS:
                return results
            continue
        low, middle, high = quantiles_ms(run, device, budget_ms)
        results.append(
            Result(
                shape=shape.name,
                implementation=name if window == shape.layer.window else f"{name} (symmetric)",
                status="ok",
                max_error=error,
                p20_ms=low,
                p50_ms=middle,
                p80_ms=high,
                tflops=shape.flops() / middle / 1e9,
                of_ceiling=ceilings.least_ms(shape) / middle,
                ours_is_faster_by=middle / (results[0].p50_ms or middle) if results else 1.0,
            )
        )
    return results


def provenance(device: str) -> dict[str, str]:
    """Commit, hardware and versions, on every line of the CSV."""
    import triton

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return result.stdout.strip()

    is_gpu = device == "cuda"
    return {
        "commit": (git("rev-parse", "--short", "HEAD") or "unknown")
        + ("+" if git("status", "--porcelain", "attention") else ""),
        "hardware": torch.cuda.get_device_name() if is_gpu else f"{platform.machine()} CPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def show(result: Result) -> None:
    """One line for a human."""
    line = f"{result.shape:38} {result.implementation:24} "
    if result.status != "ok":
        reason = f", max error {result.max_error:.3g}" if result.max_error is not None else ""
        print(f"{line}{result.status}{reason}", flush=True)
        return
    print(
        f"{line}{result.p20_ms:9.3f} {result.p50_ms:9.3f} {result.p80_ms:9.3f} ms "
        f"{result.tflops:7.1f} TFLOPS {100 * (result.of_ceiling or 0):5.1f}% "
        f"x{result.ours_is_faster_by:.2f}",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--peers", default="sdpa,flex,vllm_unified,flash_attn")
    parser.add_argument("--vllm-source", type=Path, help="folder that holds vLLM's package")
    parser.add_argument("--budget-ms", type=float, default=200.0, help="timing of one line")
    parser.add_argument("--stop-after-s", type=float, default=0, help="start no shape after this")
    parser.add_argument("--out", type=Path, help="CSV; the plot lies beside it")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, no GPU, no conclusions")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    elif not torch.cuda.is_available():
        print("There is no GPU: --smoke tests the plumbing; nothing else runs.", file=sys.stderr)
        return 2
    device = "cpu" if args.smoke else "cuda"
    if args.vllm_source is not None:
        import bench.peers

        bench.peers.VLLM_SOURCE = args.vllm_source
    shapes = [s for s in (smoke_table() if args.smoke else table()) if args.only in s.name]
    ceilings = measure_ceilings(device)
    print(
        f"ceilings: copy {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s, "
        f"bf16 product {ceilings.matmul_flops_per_s / 1e12:.1f} TFLOPS"
    )
    print(f"{'shape':38} {'implementation':24} {'p20':>9} {'p50':>9} {'p80':>9}", flush=True)
    out = (
        args.out or ROOT / "bench" / "results" / f"attention_{'smoke' if args.smoke else 'gpu'}.csv"
    )
    results: list[Result] = []
    started = time.monotonic()
    for shape in shapes:
        if args.stop_after_s and time.monotonic() - started > args.stop_after_s:
            print(f"stopped before {shape.name}: --stop-after-s {args.stop_after_s:.0f}")
            break
        lines = measure_shape(
            shape, [p for p in args.peers.split(",") if p], device, ceilings, args.budget_ms
        )
        for line in lines:
            show(line)
        results += lines
        write_csv(out, results, provenance(device) | asdict(ceilings))
    write_plot(out.with_suffix(".svg"), [asdict(r) for r in results], OURS)
    return int(any(result.status == "wrong" for result in results))


def write_csv(path: Path, results: list[Result], shared: dict[str, object]) -> None:
    """Everything so far; called after each shape, so that an interrupted run leaves its numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*asdict(results[0]), *shared])
        writer.writeheader()
        for result in results:
            writer.writerow(asdict(result) | shared)


if __name__ == "__main__":
    sys.exit(main())

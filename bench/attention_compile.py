"""What the compiler makes of the attention kernel on Hopper, without a GPU.

    python -m bench.attention_compile                 # the table's rows, to bench/results/
    python -m bench.attention_compile --head-size 256 --tiles 128,64,8,2      # try other tiles

Triton compiles for sm_90 on any machine and its wheel brings ptxas. One line a variant:

    registers       a thread, of 255 (65536 / (32 * num_warps) where that is less)
    stack, spill    bytes a thread that did not fit into registers; 0 is the goal
    shared          bytes a program, of 232448 (227 KiB)
    wgmma           asynchronous tensor-core instructions in the PTX (mma: the older kind)
    cp_async        asynchronous copies from global to shared memory in the PTX

Exits with 1 when a variant does not fit, or spills at head size 256 or 512 with a cache of the
query's dtype. (With an fp8 cache at 512 converting K costs some 150 bytes, few in inner loops.)
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from attention.canvas_attention import canvas_attention_kernel
from attention.tuning import HOPPER, TARGET_PROGRAMS, TileConfig, next_power_of_2

ROOT = Path(__file__).resolve().parent.parent
SHARED_LIMIT = 232448
RESULTS = ROOT / "bench" / "results" / "attention_sm90_compile.csv"


@dataclass(frozen=True)
class Variant:
    """One compiled kernel: shapes of the 26B model and of the drafter."""

    head_size: int
    group: int
    num_kv_heads: int
    dtype: str
    cache_dtype: str
    window: int
    is_split: bool
    page_size: int = 16
    is_anchored: bool = True


@dataclass(frozen=True)
class Report:
    """What came out; see the top of the file."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    wgmma: int
    mma: int
    cp_async: int
    compile_s: float


def variants(head_sizes: list[int]) -> list[Variant]:
    """Sliding layers (256), full layers (512) and the drafter (128); 16-bit and fp8 caches."""
    rows = [
        Variant(256, 2, 8, "bf16", "bf16", 1024, False),
        Variant(256, 2, 8, "bf16", "bf16", 1024, False, is_anchored=False),
        Variant(256, 2, 8, "bf16", "fp8e4nv", 1024, False),
        Variant(256, 2, 8, "bf16", "bf16", 0, True),
        Variant(512, 8, 2, "bf16", "bf16", 0, False),
        Variant(512, 8, 2, "bf16", "bf16", 0, True),
        Variant(512, 8, 2, "bf16", "bf16", 0, True, page_size=64),
        Variant(512, 8, 2, "bf16", "fp8e4nv", 0, True),
        Variant(128, 4, 8, "bf16", "bf16", 0, True),
        Variant(64, 4, 8, "bf16", "bf16", 0, False),
        Variant(32, 2, 2, "bf16", "bf16", 0, False),
        Variant(512, 8, 2, "fp32", "fp32", 0, False),
        Variant(256, 2, 8, "fp32", "fp32", 1024, False),
    ]
    return [row for row in rows if not head_sizes or row.head_size in head_sizes]


def kernel_source(variant: Variant, config: TileConfig) -> ASTSource:
    """The kernel specialized as a launch would: aligned pointers and strides, last strides 1."""
    is_fp8 = variant.cache_dtype.startswith("fp8")
    constants: dict[str, object] = {
        "GROUP": variant.group, "NUM_KV_HEADS": variant.num_kv_heads,
        "HEAD_SIZE": variant.head_size, "PADDED_SIZE": next_power_of_2(variant.head_size),
        "PAGE_SIZE": variant.page_size, "WINDOW": variant.window,
        "ANCHORED": variant.is_anchored, "SOFTCAP": False, "HAS_K_SCALE": is_fp8,
        "HAS_V_SCALE": is_fp8, "IS_BOOL": False, "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "BLOCK_V": config.columns(variant.head_size),
        "SPLIT": variant.is_split, "PARTIAL_ROWS_PER_SEQ": 0,
        "SPLIT_ROWS": config.block_m, "MIN_KEYS": config.min_keys_per_split,
        "MAX_SPLITS": config.max_splits, "PROGRAMS": TARGET_PROGRAMS, "UPCAST": False,
        "k_stride_dim": 1, "v_stride_dim": 1,
    }  # fmt: skip
    if not is_fp8:
        constants |= {"k_scale": None, "v_scale": None}
    signature, attributes = {}, {}
    for index, name in enumerate(canvas_attention_kernel.arg_names):
        signature[name] = _type_of(name, variant, constants)
        is_aligned = signature[name].startswith("*") or "stride" in name
        if is_aligned and signature[name] != "constexpr":
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(canvas_attention_kernel, signature, constants, attributes)


def _type_of(name: str, variant: Variant, constants: dict[str, object]) -> str:
    if name in constants:
        return "constexpr"
    if name in ("out", "query"):
        return f"*{variant.dtype}"
    if name in ("key_cache", "value_cache"):
        return f"*{variant.cache_dtype}"
    if name in ("k_scale", "v_scale") or name.startswith("partial_"):
        return "*fp32"
    if name in ("query_start_loc", "seq_lens", "block_tables", "bidirectional_from"):
        return "*i32"
    return "fp32" if name in ("scale", "softcap") else "i32"


def compile_variant(variant: Variant, config: TileConfig, arch: int) -> Report:
    """Compile one variant and read its resources from ptxas and the PTX."""
    start = time.monotonic()
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    target = GPUTarget("cuda", arch, 32)
    kernel = triton.compile(kernel_source(variant, config), target=target, options=options)
    elapsed = time.monotonic() - start
    ptx = kernel.asm["ptx"]
    log = _ptxas(ptx, arch)

    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found.group(1)) if found else 0

    return Report(
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        shared=kernel.metadata.shared,
        wgmma=len(re.findall(r"wgmma\.mma_async\.sync", ptx)),
        mma=len(re.findall(r"\bmma\.sync", ptx)),
        cp_async=len(re.findall(r"cp\.async\.c[ag]", ptx)),
        compile_s=round(elapsed, 1),
    )


def _ptxas(ptx: str, arch: int) -> str:
    """ptxas' own account of the kernel (--verbose)."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        suffix = "a" if arch == 90 else ""
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}{suffix}", str(source)]
        result = subprocess.run(
            [*command, "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True, text=True,
        )  # fmt: skip
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {result.stderr}")
    return result.stderr


def write_results(rows: list[dict[str, object]]) -> None:
    """Replace this Triton version's lines of the CSV; other versions' stay."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    if RESULTS.exists():
        with RESULTS.open(newline="") as file:
            rows += [old for old in csv.DictReader(file) if old["triton"] != triton.__version__]
    rows.sort(key=lambda row: str(row["triton"]))
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {RESULTS.relative_to(ROOT)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--head-size", type=int, action="append", default=[])
    parser.add_argument("--tiles", help="block_m,block_n,num_warps,num_stages instead of the table")
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--only", type=int, help="only the n-th variant")
    args = parser.parse_args()
    rows, is_bad = [], False
    chosen = variants(args.head_size)
    for variant in chosen if args.only is None else [chosen[args.only]]:
        size = 4 if variant.dtype == "fp32" else 2
        config = HOPPER[next_power_of_2(variant.head_size), size]
        if args.tiles:
            config = TileConfig(*map(int, args.tiles.split(",")))
        report = compile_variant(variant, config, args.arch)
        tiles = {k: getattr(config, k) for k in ("block_m", "block_n", "num_warps", "num_stages")}
        rows.append(asdict(variant) | tiles | asdict(report))
        print("  ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
        is_large = variant.head_size >= 256 and variant.cache_dtype == variant.dtype
        is_spilling = report.spill_stores > 0 and is_large
        is_bad |= report.shared > SHARED_LIMIT or is_spilling
    if not args.tiles and not args.head_size and args.only is None:
        write_results([row | {"triton": triton.__version__} for row in rows])
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())

"""The kernels through the real compiler for sm_90, without a GPU.

The interpreter accepts programs that the compiler refuses (types of loop variables, shapes,
branches), so every branch of the kernels is compiled here. Then the shapes of the released model
and of a drafter are compiled with the committed tiles, as a launch specializes them, and ptxas
(Triton's wheel brings it) says whether they fit into registers and shared memory.
"""

from __future__ import annotations

import json

import pytest

from tests.support.process import run_python

# Kernel, what its constexprs are, which dtype each kind of pointer has. In a process of its own:
# the interpreter must not be on, and Triton stays out of the other tests' process.
PROGRAM = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attention import cache_write, canvas_attention, splits

for label, case in json.loads(sys.argv[1]).items():
    kernel = {
        "attend": canvas_attention.canvas_attention_kernel,
        "merge": splits.merge_splits_kernel,
        "write": cache_write.write_kv_kernel,
    }[case["kernel"]]
    constants = dict(case["constants"])
    signature = {}
    for parameter in kernel.params:
        name = parameter.name
        if parameter.is_constexpr or name in constants:
            signature[name] = "constexpr"
        elif name in ("key_cache", "value_cache"):
            signature[name] = "*" + case["cache_dtype"]
        elif name in ("out", "query", "key", "value"):
            signature[name] = "*" + case["dtype"]
        elif name in ("k_scale", "v_scale") or name.startswith("partial_"):
            signature[name] = "*fp32"
        elif name == "bidirectional_from":
            signature[name] = "*i1" if constants["IS_BOOL"] else "*i32"
        elif name == "slot_mapping":
            signature[name] = "*i64"
        elif name in ("query_start_loc", "seq_lens", "block_tables"):
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
    compiled = triton.compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("cuda", case.get("arch", 90), 32),
        options={"num_warps": case.get("num_warps", 4), "num_stages": 2},
    )
    print(label, compiled.metadata.shared, sep=': ')
"""

SPLIT = {"SPLIT_ROWS": 64, "MIN_KEYS": 1024, "MAX_SPLITS": 4, "PROGRAMS": 256}
SHAPE = {"GROUP": 3, "NUM_KV_HEADS": 2, "HEAD_SIZE": 80, "PADDED_SIZE": 128}
ATTEND = SHAPE | SPLIT | {
    "BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_V": 64, "UPCAST": False, "BLOCK_SIZE": 1,
}  # fmt: skip
CASES = {
    "bool flag, soft cap, symmetric window, odd sizes": {
        "kernel": "attend", "dtype": "fp16", "cache_dtype": "fp16",
        "constants": ATTEND | {
            "PAGE_SIZE": 24, "WINDOW": 100, "ANCHORED": False, "SOFTCAP": True, "IS_BOOL": True,
            "HAS_K_SCALE": False, "HAS_V_SCALE": False, "k_scale": None, "v_scale": None,
            "SPLIT": True, "PARTIAL_ROWS_PER_SEQ": 64,
        },
    },
    "heads that see blocks": {
        "kernel": "attend", "dtype": "bf16", "cache_dtype": "bf16",
        "constants": ATTEND | {
            "PAGE_SIZE": 32, "WINDOW": 0, "ANCHORED": False, "SOFTCAP": False, "IS_BOOL": False,
            "HAS_K_SCALE": False, "HAS_V_SCALE": False, "k_scale": None, "v_scale": None,
            "SPLIT": True, "PARTIAL_ROWS_PER_SEQ": 64, "BLOCK_SIZE": 32,
        },
    },
    "few rows, fp8 cache with scales, one page a tile": {
        "kernel": "attend", "dtype": "bf16", "cache_dtype": "fp8e4nv",
        "constants": ATTEND | {
            "PAGE_SIZE": 64, "WINDOW": 0, "ANCHORED": False, "SOFTCAP": False, "IS_BOOL": False,
            "HAS_K_SCALE": True, "HAS_V_SCALE": True, "SPLIT": True, "PARTIAL_ROWS_PER_SEQ": 0,
            "BLOCK_M": 16,
        },
    },
    "merge": {
        "kernel": "merge", "dtype": "bf16", "cache_dtype": "bf16",
        "constants": SHAPE | SPLIT | {
            "VALUE_BLOCKS": 2, "WINDOW": 5000, "HAS_V_SCALE": True, "PADDED_GROUP": 4,
            "PARTIAL_ROWS_PER_SEQ": 64,
        },
    },
    "cache write, fp8": {
        "kernel": "write", "dtype": "bf16", "cache_dtype": "fp8e4nv",
        "constants": {
            "PAGE_SIZE": 16, "HEAD_SIZE": 80, "PADDED_SIZE": 128, "HAS_K_SCALE": True,
            "HAS_V_SCALE": True, "FP8_MAX": 448.0,
        },
    },
}  # fmt: skip


def test_every_branch_compiles() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    result = run_python("-c", PROGRAM, json.dumps(CASES), environment={"TRITON_INTERPRET": None})
    shared = dict(line.rsplit(": ", 1) for line in result.stdout.splitlines())
    assert list(shared) == list(CASES)
    assert max(map(int, shared.values())) <= 232448


# --- registers and shared memory -----------------------------------------------------------------

# In a process of its own, as above.
RESOURCES = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from attention.canvas_attention import canvas_attention_kernel as kernel
from attention.tuning import HOPPER, TARGET_PROGRAMS, next_power_of_2

for label, case in json.loads(sys.argv[1]).items():
    size, dtype, cache = case["head_size"], case["dtype"], case["cache"]
    config = HOPPER[next_power_of_2(size), 4 if dtype == "fp32" else 2]
    is_fp8 = cache.startswith("fp8")
    constants = {
        "GROUP": case["group"], "NUM_KV_HEADS": case["num_kv_heads"], "HEAD_SIZE": size,
        "PADDED_SIZE": next_power_of_2(size), "PAGE_SIZE": 16, "WINDOW": case["window"],
        "ANCHORED": True, "SOFTCAP": False, "HAS_K_SCALE": is_fp8, "HAS_V_SCALE": is_fp8,
        "IS_BOOL": False, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "BLOCK_V": config.columns(size), "SPLIT": case["split"], "PARTIAL_ROWS_PER_SEQ": 0,
        "SPLIT_ROWS": config.block_m, "MIN_KEYS": config.min_keys_per_split,
        "MAX_SPLITS": config.max_splits, "PROGRAMS": TARGET_PROGRAMS, "UPCAST": False,
        "BLOCK_SIZE": 1,
        "k_stride_dim": 1, "v_stride_dim": 1,
    }
    constants |= {} if is_fp8 else {"k_scale": None, "v_scale": None}
    pointers = {"out": dtype, "query": dtype, "key_cache": cache, "value_cache": cache}
    tables = ("query_start_loc", "seq_lens", "block_tables", "bidirectional_from")
    pointers |= dict.fromkeys(tables, "i32") | {"k_scale": "fp32", "v_scale": "fp32"}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers or name.startswith("partial_"):
            signature[name] = "*" + pointers.get(name, "fp32")
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
        if signature[name].startswith("*") or ("stride" in name and name not in constants):
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source)]
        command += ["-o", str(Path(folder) / "kernel.cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = {
        "spilled": int(re.search(r"(\\d+) bytes spill stores", log)[1]),
        "shared": compiled.metadata.shared,
        "tensor_cores": "wgmma.mma_async" in compiled.asm["ptx"],
    }
    print(json.dumps([label, found]))
"""

SLIDING = {"head_size": 256, "group": 2, "num_kv_heads": 8, "dtype": "bf16"}
FULL = {"head_size": 512, "group": 8, "num_kv_heads": 2, "dtype": "bf16"}
RESIDENT = {
    "sliding layers": SLIDING | {"cache": "bf16", "window": 1024, "split": False},
    "full layers": FULL | {"cache": "bf16", "window": 0, "split": True},
    "a drafter": {
        "head_size": 128, "group": 4, "num_kv_heads": 8, "dtype": "bf16", "cache": "bf16",
        "window": 0, "split": True,
    },
}  # fmt: skip
SHARED_LIMIT = 232448  # bytes a program, on Hopper


def test_the_committed_tiles_fit_into_registers_and_shared_memory() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    compiled = {"TRITON_INTERPRET": None}
    result = run_python("-c", RESOURCES, json.dumps(RESIDENT), environment=compiled)
    found = dict(json.loads(line) for line in result.stdout.splitlines())
    assert list(found) == list(RESIDENT)
    for label, used in found.items():
        assert used["shared"] <= SHARED_LIMIT and used["tensor_cores"], (label, used)
        assert used["spilled"] == 0, (label, used)

"""The kernels through the real compiler for sm_90, without a GPU.

The interpreter accepts programs that the compiler refuses (types of loop variables, shapes,
branches), so every branch of the kernels is compiled here. bench/attention_compile.py reports what
they take.
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
ATTEND = SHAPE | SPLIT | {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_V": 64, "UPCAST": False}
CASES = {
    "bool flag, soft cap, symmetric window, odd sizes": {
        "kernel": "attend", "dtype": "fp16", "cache_dtype": "fp16",
        "constants": ATTEND | {
            "PAGE_SIZE": 24, "WINDOW": 100, "ANCHORED": False, "SOFTCAP": True, "IS_BOOL": True,
            "HAS_K_SCALE": False, "HAS_V_SCALE": False, "k_scale": None, "v_scale": None,
            "SPLIT": True, "PARTIAL_ROWS_PER_SEQ": 64,
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

"""The statistics and soft-embedding kernels through the real compiler for sm_90, without a GPU.

The interpreter accepts programs that the compiler refuses (types of loop variables, shapes,
branches), so every kernel and every constexpr branch is compiled here, with the tiles that are
launched. Without spilled registers: ptxas says how many bytes did not fit.
"""

from __future__ import annotations

import json

import pytest

from tests.support.process import run_python

# In a process of its own: the interpreter must not be on, and Triton stays out of the other tests'.
PROGRAM = """
import json, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from dllm.ops import row_stats_gpu as row_stats_kernel
from dllm.ops import soft_embedding_gpu as soft_embedding_kernel

INTS = dict.fromkeys(("argmax", "sample", "keys"), "*i64") | dict.fromkeys(
    ("block_argmax", "block_winner", "top_ks", "needed", "num_needed"), "*i32"
) | {"is_kept": "*i8"}
NUMBERS = dict.fromkeys(
    ("temperature cutoff block_max block_z block_s tile_mass entropy peak log_z top_ps min_ps least"
     " parts").split(), "*fp32"
) | {"budget": "fp32"}
cut, product = row_stats_kernel.KernelTiles(), soft_embedding_kernel.ProductTiles()
warps = {"_merge_kernel": 4, "_kept_tiles_kernel": 4, "_product_kernel": product.num_warps}

for label, case in json.loads(sys.argv[1]).items():
    name = case["kernel"]
    kernel = getattr(row_stats_kernel, name, None) or getattr(soft_embedding_kernel, name)
    types = INTS | NUMBERS | {"logits": case.get("logits", "*fp32")}
    types |= dict.fromkeys(("probs", "weight"), case.get("model", "*bf16"))
    signature = {
        parameter.name: "constexpr" if parameter.is_constexpr else types.get(parameter.name, "i32")
        for parameter in kernel.params
    }
    constants = {"BLOCK": cut.block, "TILE": cut.tile, "TILES_OF_BLOCK": cut.block // cut.tile,
                 "BLOCKS": 128, "TILES": 4096 if name == "_kept_tiles_kernel" else 1024,
                 "ROWS": product.rows, "HIDDEN": product.hidden, "SPLITS": product.splits,
                 "UPCAST": False, "IS_FILTERED": case.get("is_filtered", False)}
    constants = {key: constants[key] for key, kind in signature.items() if kind == "constexpr"}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps.get(name, cut.num_warps), "num_stages": product.num_stages},
    )
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\\d+) bytes spill stores", said)))
    print(label, compiled.metadata.shared, spilled, sep=": ")
"""

CASES = {
    "blocks": {"kernel": "_block_kernel"},
    "blocks, filtered, bf16 logits": {
        "kernel": "_block_kernel", "is_filtered": True, "logits": "*bf16",
    },
    "merge": {"kernel": "_merge_kernel"},
    "merge, filtered": {"kernel": "_merge_kernel", "is_filtered": True},
    "cutoffs": {"kernel": "_cutoff_kernel"},
    "probabilities": {"kernel": "_probs_kernel"},
    "kept tiles": {"kernel": "_kept_tiles_kernel"},
    "product": {"kernel": "_product_kernel"},
    "product, fp16": {"kernel": "_product_kernel", "model": "*fp16"},
}  # fmt: skip


def test_every_kernel_compiles_without_spilling() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    result = run_python("-c", PROGRAM, json.dumps(CASES), environment={"TRITON_INTERPRET": None})
    reports = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert list(reports) == list(CASES)
    for label, report in reports.items():
        shared, spilled = map(int, report.split(": "))
        assert shared <= 232448 and spilled == 0, (label, report)

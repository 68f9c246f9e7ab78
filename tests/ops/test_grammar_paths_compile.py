"""The kernels of canvases under grammars through the real compiler for sm_90, without a GPU.

As test_row_stats_compile.py: every kernel and every type of logits, with the tiles that are
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
from dllm.ops import grammar_paths_gpu as kernels
from dllm.ops.grammar_paths import CHUNK

TYPES = dict.fromkeys(
    "table_of chunk chunk_class first_chunk first_row length state_of budget_of class_of following"
    " first_next num_classes left first_state states end best_token source kind target into"
    " first_edge accepted_state budgets".split(), "*i32"
) | dict.fromkeys("keys likeliest tokens stop_token stops".split(), "*i64") | dict.fromkeys(
    "accepts is_last is_text".split(), "*i8"
) | dict.fromkeys("best peak stop filled".split(), "*fp32") | dict.fromkeys(
    "score score_of at accepted".split(), "*fp64"
) | {"is_stop": "*i1"}
cut = kernels.PathTiles()

for label, case in json.loads(sys.argv[1]).items():
    kernel = getattr(kernels, case["kernel"])
    types = TYPES | {"logits": case.get("logits", "*fp32")}
    signature = {
        parameter.name: "constexpr" if parameter.is_constexpr else types.get(parameter.name, "i32")
        for parameter in kernel.params
    }
    block = cut.tokens if case["kernel"] == "_mask_kernel" else cut.edges
    constants = {"CHUNKS": cut.chunks, "CHUNK": CHUNK, "BLOCK": block}
    constants = {key: constants[key] for key, kind in signature.items() if kind == "constexpr"}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": case.get("warps", cut.num_warps)},
    )
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\\d+) bytes spill stores", said)))
    barriers = compiled.asm["ptx"].count("bar.sync")
    print(label, compiled.metadata.shared, spilled, barriers, sep=": ")
"""

CASES = {
    "chunks": {"kernel": "_chunk_kernel"},
    "chunks, bf16 logits": {"kernel": "_chunk_kernel", "logits": "*bf16"},
    "read": {"kernel": "_read_kernel", "warps": 1},
    "search": {"kernel": "_search_kernel"},
    "masks": {"kernel": "_mask_kernel"},
    "masks, bf16 logits": {"kernel": "_mask_kernel", "logits": "*bf16"},
}


def test_every_kernel_compiles_without_spilling() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    result = run_python("-c", PROGRAM, json.dumps(CASES), environment={"TRITON_INTERPRET": None})
    reports = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert list(reports) == list(CASES)
    for label, report in reports.items():
        shared, spilled, barriers = map(int, report.split(": "))
        assert shared <= 232448 and spilled == 0, (label, report)
        # What one thread writes for a position, others read for the next.
        assert label != "search" or barriers >= 2

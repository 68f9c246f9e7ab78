"""The kernel of the drafter's context: in Triton's interpreter, and through the real compiler.

``context_kernel_suite.py`` compares it with its definition, in a process of its own, because the
interpreter is chosen by an environment variable when Triton is first imported.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests.support.drafter_harness import assert_drafts
from tests.support.drafter_pairs import write_drafter, write_target
from tests.support.process import QUIET_ENGINE, run_python

pytestmark = pytest.mark.slow

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@needs_triton
def test_a_server_on_cuda_kernels_writes_its_context_by_this_one(tmp_path: Path) -> None:
    """In the interpreter: vLLM's engine, real layers, an FP8 target. The drafts are the
    definition's, in fp32 with sums in another order."""
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    output = tmp_path / "result.pt"
    worker = ("-m", "tests.support.drafter_context_worker")
    run_python(*worker, str(target), str(drafter), str(output), environment=QUIET_ENGINE)
    found = torch.load(output, weights_only=False)
    assert set(found["taken"]) == {"kernel"}
    assert found["dtypes"] == 4 * [torch.uint8] + 2 * [torch.float32]
    assert len(found["drafts"]) >= 2
    assert_drafts(target, found["config"], found["drafts"], found["states"], tolerance=1e-4)


# In a process of its own: the interpreter must not be on. Each case is compiled as a launch
# specializes it: positions and slots may start anywhere, everything else is aligned.
RESOURCES = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from dllm.attention.context_kv import TILE_GROUP, context_kv_kernel as kernel, context_tiles
from dllm.attention.tuning import next_power_of_2

for label, case in json.loads(sys.argv[1]).items():
    layers, size, dtype, arch = case["layers"], case["head_size"], case["dtype"], case["arch"]
    tiles = context_tiles(case["tokens"], size, 4 if dtype == "fp32" else 2)
    constants = {
        "SLOTS_OF": tuple(layer % 2 for layer in range(layers)),
        "NUM_LAYERS": layers, "NUM_KV_HEADS": case["heads"], "HEAD_SIZE": size,
        "PADDED_SIZE": next_power_of_2(size), "ROTARY_SIZE": case.get("rotary", size),
        "INTERLEAVED": case["interleaved"], "HIDDEN_SIZE": case["hidden"], "PAGE_SIZE": 16,
        "HAS_BIAS": case["bias"], "BLOCK_M": tiles.tokens, "BLOCK_K": tiles.hidden,
        "GROUP": TILE_GROUP, "UPCAST": False,
    } | ({} if case["bias"] else {"bias": None})
    signature, aligned = {}, []
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "caches":
            signature[name] = ("*" + dtype,) * 2 * layers
            aligned += [(index, place) for place in range(2 * layers)]
        elif name in ("slots", "positions"):
            signature[name] = "*i64"
        elif name in ("num_tokens", "slots_stride", "eps"):
            signature[name] = "fp32" if name == "eps" else "i32"
        else:
            signature[name] = "i32" if "stride" in name else "*" + dtype
            aligned.append((index,))
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, {p: [["tt.divisibility", 16]] for p in aligned}),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
    )
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        name = "sm_90a" if arch == 90 else f"sm_{arch}"
        command = [get_ptxas(arch).path, "-v", "--gpu-name=" + name, str(source)]
        command += ["-o", str(Path(folder) / "kernel.cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = {
        "spilled": int(re.search(r"(\\d+) bytes spill stores", log)[1]),
        "registers": int(re.search(r"Used (\\d+) registers", log)[1]),
        "threads": 32 * tiles.num_warps,
        "shared": compiled.metadata.shared,
        "wgmma": "wgmma.mma_async" in ptx,
        "mma": "mma.sync" in ptx,
        "copied_ahead": ptx.count("cp.async"),
    }
    print(json.dumps([label, found]))
"""

# The drafter of Qwen3-8B: hidden size 4096, 5 layers, 8 KV heads of size 128.
QWEN3_8B = {
    "layers": 5, "heads": 8, "head_size": 128, "hidden": 4096, "dtype": "bf16", "bias": False,
    "interleaved": False, "tokens": 1024, "arch": 90,
}  # fmt: skip
CASES = {
    "many tokens": QWEN3_8B,
    "few tokens": QWEN3_8B | {"tokens": 16},
    "many tokens, sm_80": QWEN3_8B | {"arch": 80},
    "few tokens, sm_80": QWEN3_8B | {"arch": 80, "tokens": 16},
    "fp16, head size 64, interleaved, bias": QWEN3_8B
    | {"dtype": "fp16", "head_size": 64, "interleaved": True, "bias": True},
    "head size 256, half turned": QWEN3_8B | {"head_size": 256, "rotary": 128, "heads": 4},
    "fp32, head size 80, odd hidden size": QWEN3_8B
    | {"dtype": "fp32", "head_size": 80, "hidden": 1000, "layers": 1},
}
REGISTERS = 65536  # of a multiprocessor
SHARED_LIMIT = 99 * 1024  # bytes a program, on the cards with least


@pytest.mark.nightly
@needs_triton
def test_it_compiles_to_tensor_cores_without_spills() -> None:
    result = run_python(
        "-c", RESOURCES, json.dumps(CASES), environment={"TRITON_INTERPRET": None}, timeout=600
    )
    found = dict(json.loads(line) for line in result.stdout.splitlines())
    assert list(found) == list(CASES)
    for label, used in found.items():
        case = CASES[label]
        assert used["spilled"] == 0 and used["shared"] <= SHARED_LIMIT, (label, used)
        assert used["registers"] * used["threads"] <= REGISTERS, (label, used)
        if case["dtype"] == "fp32":
            continue
        # Hopper's instruction needs 64 rows.
        is_wgmma = case["arch"] == 90 and case["tokens"] > 16
        assert used["wgmma" if is_wgmma else "mma"], (label, used)
        assert used["copied_ahead"], (label, used)

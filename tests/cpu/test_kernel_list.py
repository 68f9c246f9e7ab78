"""Each Triton kernel of vLLM's runner has a function, or what launches it on a CPU is refused.

The kernels are read from the source of the installed vLLM.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm

from dllm.cpu.kernels import KERNELS
from dllm.patches.cpu import prepare_worker

VLLM = Path(vllm.__file__).parents[1]
WORKER = "vllm.v1.worker."
# What of the runner's own imports may have kernels; attention is the backend's, which is vLLM's.
READ = tuple(f"vllm.v1.{name}" for name in ("worker", "sample", "spec_decode", "watermarking"))
REFUSED = {
    "gpu.cp_utils": "--decode-context-parallel-size",
    "gpu.mm.rope": "a model with M-RoPE",
    "gpu.model_states.mamba_hybrid": "a model with Mamba layers",
    "gpu.model_states.recoverssm": "a model with Mamba layers",
    "gpu.sample.batch_shard": "--enable-batch-sharded-sampling",
    "gpu.sample.output": "--return-sampling-mask",
    "gpu.sample.trace_replay": "--enable-trace-replay",
    "gpu.sample.watermark": "--watermark-config",
    "gpu.spec_decode.acceptance_estimator": "enable_adaptive_verification",
    "gpu.spec_decode.dflash2.speculator._cache_draft_logits_kernel": "probabilistic",
    "gpu.spec_decode.multi_module_mtp.speculator": "--speculative-config",
    "gpu.spec_decode.ngram.speculator": "--speculative-config",
    "gpu.spec_decode.xpress.kernels": "--speculative-config",
    "mamba_utils": "a model with Mamba layers",
}
# Launched by nothing that our worker runs, and by what then.
ELSEWHERE = {
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils": "vLLM's rule; `verification` is ours",
    "vllm.v1.worker.block_table": "Model Runner V1",
    "vllm.v1.sample.rejection_sampler": "Model Runner V1",
    "vllm.v1.spec_decode": "Model Runner V1",
    "vllm.v1.sample.ops.topk_topp_triton": "only where vLLM finds Triton",
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(VLLM).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


def launched_kernels() -> set[str]:
    """Names of the kernels in all modules that the runner may import."""
    paths = {name_of(path): path for path in (VLLM / "vllm/v1").rglob("*.py")}
    waiting = {name for name in paths if name.startswith(f"{WORKER}gpu.")}
    trees: dict[str, ast.AST] = {}
    while waiting:
        name = waiting.pop()
        trees[name] = ast.parse(paths[name].read_text())
        waiting |= {
            one for one in imports(trees[name]) if one in paths and one.startswith(READ)
        } - trees.keys()
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    # `kernel[grid](...)` launches it; functions that only kernels call are no kernels.
    launched = {ast.unparse(node.value) for node in nodes if isinstance(node, ast.Subscript)}
    launched = {text.rpartition(".")[2] for text in launched}
    return {
        f"{name}.{node.name}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(one) for one in node.decorator_list)
        and node.name in launched
    }


def test_every_kernel_has_a_function_or_a_refusal() -> None:
    known = *KERNELS, *(WORKER + name for name in REFUSED), *ELSEWHERE
    found = launched_kernels()
    assert not [name for name in sorted(found) if not name.startswith(known)]
    assert found >= KERNELS.keys()


@pytest.mark.parametrize(
    ("what", "attribute"),
    [
        ("a model with Mamba layers", "is_hybrid"),
        ("a model with M-RoPE", "uses_mrope"),
        ("enable_adaptive_verification", "enable_adaptive_verification"),
    ],
)
def test_a_model_or_a_drafter_is_refused(what: str, attribute: str) -> None:
    names = "enable_trace_replay return_sampling_mask is_hybrid is_attention_free uses_mrope"
    names += " enable_batch_sharded_sampling enable_adaptive_verification"
    part = SimpleNamespace(**dict.fromkeys(names.split(), False))
    part.decode_context_parallel_size, part.enforce_eager = 1, True
    setattr(part, attribute, True)
    parts = dict.fromkeys(("model_config", "parallel_config", "speculative_config"), part)
    with pytest.raises(ValueError, match=what):
        prepare_worker(SimpleNamespace(watermark_config=None, **parts))

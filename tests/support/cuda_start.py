"""Rehearses starts of CUDA servers without a GPU, as far as the KV cache and the CUDA graphs.

    python -m tests.support.cuda_start GPU < CASES > REPORTS

``rehearse`` runs that in a process of its own. ``GPU`` is a key of ``fake_cuda.GPUS``. A case is a
JSON object on a line of its own:

    model    a folder with config files
    flags    arguments of vLLM's EngineArgs
    batches  [[requests, tokens, tokens of each request or null], ...], for which a graph is chosen
    loads    true: the checkpoint's weights are loaded, too
    flash    true: vLLM brings FlashAttention 4

The last line of the output is a JSON list with a report for each case: what ``report`` returns, or
{"refusal": message}. Nothing is computed. A model whose weights are not loaded is made on the meta
device. Without batches and weights there is the configuration alone (``choices``).
"""

import json
import sys
import tempfile
import zlib
from collections.abc import Sequence
from typing import Any

from tests.support.fake_cuda import GPUS, install
from tests.support.process import printed_json, run_python


def rehearse(gpu: str, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A report for each case, in a process of its own."""
    plain: dict[str, Any] = {"flags": {}, "batches": [], "loads": False, "flash": False}
    finished = run_python(
        "-m",
        __name__,
        gpu,
        environment={"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
        given="\n".join(json.dumps(plain | case) for case in cases),
    )
    return list(printed_json(finished))


def main() -> None:
    install(GPUS[sys.argv[1]])

    from vllm.plugins import load_general_plugins

    load_general_plugins()
    reports = []
    for line in sys.stdin:
        case = json.loads(line)
        try:
            reports.append(report(case))
        except ValueError as error:
            reports.append({"refusal": str(error)})
    print(json.dumps(reports))


def report(case: dict[str, Any]) -> dict[str, Any]:
    """What a server chooses when it starts.

    Raises:
        ValueError: it refuses to start.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.vllm_flash_attn import flash_attn_interface

    flash_attn_interface.FA4_AVAILABLE = case["flash"]
    arguments = EngineArgs(case["model"], skip_tokenizer_init=True, **case["flags"])
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    if not (case["batches"] or case["loads"]):
        return choices(config)
    with set_current_vllm_config(config):
        model = made(config, "cpu" if case["loads"] else "meta")
        if case["loads"]:
            load(model, config)
        return choices(config) | {
            "experts": digests_of_experts(model) if case["loads"] else {},
            "class": type(model).__name__,
            "gigabytes": sum(p.nbytes for p in model.parameters()) / 1e9,
            "groups": kv_cache_groups(config),
            "graphs": graphs(config, case["batches"]),
        }


def choices(config: Any) -> dict[str, Any]:
    compilation, scheduler = config.compilation_config, config.scheduler_config
    return {
        "attention": getattr(config.attention_config.backend, "name", None),
        "flash_attn_version": config.attention_config.flash_attn_version,
        "non_causal": config.attention_config.use_non_causal,
        "scheduler": scheduler.scheduler_cls,
        "async": scheduler.async_scheduling,
        "worker": config.parallel_config.worker_cls,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "cache_dtype": config.cache_config.cache_dtype,
        "page_size": config.cache_config.block_size,
        "quantization": config.model_config.quantization,
        "graph_mode": compilation.cudagraph_mode.name,
        "graph_sizes": compilation.cudagraph_capture_sizes,
        "doctor": [finding.text for finding in attention_of(config)],
        "drafter": drafter_of(config),
    }


def drafter_of(config: Any) -> str | None:
    """The class that vLLM loads for a drafter with weights of its own, as "module:Class"."""
    model = getattr(config.speculative_config, "draft_model_config", None)
    if model is None or model is config.model_config:
        return None
    (architecture,) = model.architectures
    loaded = model.registry.models[architecture]
    return f"{loaded.module_name}:{loaded.class_name}"


def attention_of(config: Any) -> list[Any]:
    """What ``dllm doctor`` says of it."""
    from dllm.doctor.command import _attention
    from dllm.models import FAMILIES

    return list(_attention(config)) if config.model_config.architecture in FAMILIES else []


def made(config: Any, device: str) -> Any:
    """The model, without weights; its attention layers register themselves in ``config``."""
    import torch
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    if not model_parallel_is_initialized():
        store = tempfile.NamedTemporaryFile()  # noqa: SIM115  kept as long as the process group
        init_distributed_environment(1, 0, f"file://{store.name}", 0, backend="gloo")
        initialize_model_parallel(1, 1, backend="gloo")
    with torch.device(device), set_default_torch_dtype(config.model_config.dtype):
        return initialize_model(config)


def load(model: Any, config: Any) -> None:
    """Load the checkpoint's weights, as vLLM does before it gives them the layout of its kernels.

    Raises:
        ValueError: they are refused.
    """
    from safetensors.torch import load_file

    model.load_weights(load_file(f"{config.model_config.model}/model.safetensors").items())


def digests_of_experts(model: Any) -> dict[str, int]:
    """CRC-32 of the parameters of the first layer's experts, by the last part of their names."""
    import torch

    return {
        name.rpartition(".")[2]: zlib.crc32(parameter.reshape(-1).view(torch.uint8).numpy().data)
        for name, parameter in model.model.layers[0].named_parameters()
        if "routed_experts" in name
    }


def kv_cache_groups(config: Any) -> list[dict[str, Any]]:
    """The groups of layers that share a table of pages."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    from dllm.settings.vllm_names import kv_cache_planning

    specs = get_kv_cache_spec(config)
    layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
    resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], specs.values())
    groups = kv_cache_planning.get_kv_cache_groups(config, specs)
    return [
        {
            "layers": len(group.layer_names),
            "spec": type(group.kv_cache_spec).__name__,
            "page_size": group.kv_cache_spec.block_size,
            "page_bytes": group.kv_cache_spec.page_size_bytes,
        }
        for group in groups
    ]


def graphs(config: Any, batches: list[list[Any]]) -> list[list[Any]]:
    """[mode, padded tokens, requests or None] of the graph that vLLM's runner takes for a batch."""
    import torch
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    from dllm.attention.backend import CanvasAttentionBackend

    canvas_length = config.diffusion_config.canvas_length
    mode = config.compilation_config.resolve_cudagraph_mode_and_sizes(
        CanvasAttentionBackend.get_builder_cls()._cudagraph_support,
        CanvasAttentionBackend.get_name(),
        canvas_length,
        use_v2_model_runner=True,
    )
    manager = CudaGraphManager(config, torch.device("cpu"), mode, decode_query_len=canvas_length)
    manager._graphs_captured = True
    found = []
    for num_reqs, num_tokens, of_each in batches:
        graph = manager.dispatch(num_reqs, num_tokens, of_each, num_active_loras=0)
        found.append([graph.cg_mode.name, graph.num_tokens, graph.num_reqs])
    return found


if __name__ == "__main__":
    main()

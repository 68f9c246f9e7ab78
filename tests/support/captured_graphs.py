"""vLLM's full CUDA graphs without a GPU: what was captured is run once more, in Python.

Which graphs there are, what they are captured with and when one is replayed is up to vLLM's own
managers, of a model and of a drafter. In the place of ``torch.cuda.graph`` the forward pass itself
is kept. A replay calls it with the tensors of the capture, as a GPU would read their memory again:
a tensor that is not written in place between two steps has the values of the capture.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

from dllm.engine.model_state import DiffusionModelState
from dllm.patches.cuda_graphs import canvas_runner

MODE = CUDAGraphMode.FULL_DECODE_ONLY


def _keep_forward_passes(manager: Any, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
    for description in manager._capture_descs[CUDAGraphMode.FULL]:
        forward = create_forward_fn(description, warmup=False)
        replay = partial(forward, CUDAGraphMode.NONE)
        replay()  # vLLM makes the buffer of hidden states with the first, the largest
        manager.graphs[description] = SimpleNamespace(replay=replay)
    manager._graphs_captured = True


def use_graphs(runner: Any, sizes: list[int]) -> dict[str, list[tuple[int, int]]]:
    """Let a CPU's runner dispatch its batches as a GPU's does.

    Args:
        sizes: numbers of tokens for which graphs are captured, ascending.

    Returns:
        (tokens, requests) of each graph that is replayed from here on, of the model and the draft.
    """
    config, speculator = runner.vllm_config.compilation_config, runner.speculator
    config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = sizes, sizes[-1]
    with (
        mock.patch.object(type(current_platform), "get_global_graph_pool", create=True),
        mock.patch.object(CudaGraphManager, "capture", _keep_forward_passes),
    ):
        graphs = ModelCudaGraphManager(
            runner.vllm_config, runner.device, MODE, runner.decode_query_len
        )
        graphs.capture(
            runner.model,
            runner.model_state,
            runner.input_buffers,
            None,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            use_aux_hidden_state_outputs=runner.use_aux_hidden_state_outputs,
        )
        if speculator is not None:
            speculator.init_cudagraph_manager(MODE)
            speculator.capture()
    runner.cudagraph_manager = graphs
    replayed = {"model": _watched(graphs)}
    if speculator is not None:
        replayed["draft"] = _watched(speculator.query_cudagraph_manager)
    if isinstance(runner.model_state, DiffusionModelState):
        runner.__class__ = type("CanvasCPUModelRunner", (canvas_runner(), type(runner)), {})
        runner.model_state.loop.replay_graphs_of(graphs)
    return replayed


def _watched(graphs: Any) -> list[tuple[int, int]]:
    replayed: list[tuple[int, int]] = []
    run = graphs.run_fullgraph

    def run_fullgraph(description: Any) -> Any:
        replayed.append((description.num_tokens, description.num_reqs))
        return run(description)

    graphs.run_fullgraph = run_fullgraph
    return replayed

"""vLLM's full CUDA graphs without a GPU: what was captured is run once more, in Python.

Which graphs there are, what they are captured with and when one is replayed is up to vLLM's own
``ModelCudaGraphManager``. In the place of ``torch.cuda.graph`` the forward pass itself is kept. A
replay calls it with the tensors of the capture, as a GPU would read their memory again: a tensor
that is not written in place between two steps has the values of the capture.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

from dllm.patches.cuda_graphs import canvas_runner


class ReplayedInPython(ModelCudaGraphManager):
    """Full graphs of canvases alone.

    Attributes:
        replayed: (captured tokens, captured requests) of each replay.
    """

    def __init__(self, runner: Any, sizes: list[int]) -> None:
        config = runner.vllm_config.compilation_config
        config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = sizes, sizes[-1]
        with mock.patch.object(type(current_platform), "get_global_graph_pool", create=True):
            super().__init__(
                runner.vllm_config,
                runner.device,
                CUDAGraphMode.FULL_DECODE_ONLY,
                runner.decode_query_len,
            )
        self.replayed: list[tuple[int, int]] = []
        with mock.patch.object(CudaGraphManager, "capture", _keep_forward_passes):
            self.capture(
                runner.model,
                runner.model_state,
                runner.input_buffers,
                None,
                runner.block_tables,
                runner.attn_groups,
                runner.kv_cache_config,
            )

    def run_fullgraph(self, desc: Any) -> Any:
        """vLLM's, and it is noted."""
        self.replayed.append((desc.num_tokens, desc.num_reqs))
        return super().run_fullgraph(desc)


def _keep_forward_passes(manager: Any, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
    for description in manager._capture_descs[CUDAGraphMode.FULL]:
        forward = create_forward_fn(description, warmup=False)
        replay = partial(forward, CUDAGraphMode.NONE)
        replay()  # vLLM makes the buffer of hidden states with the first, the largest
        manager.graphs[description] = SimpleNamespace(replay=replay)
    manager._graphs_captured = True


def use_graphs(runner: Any, sizes: list[int]) -> ReplayedInPython:
    """Let a CPU's runner of a diffusion model dispatch its batches as a GPU's does.

    Args:
        sizes: numbers of tokens, ascending.
    """
    graphs = ReplayedInPython(runner, sizes)
    runner.__class__ = type("CanvasCPUModelRunner", (canvas_runner(), type(runner)), {})
    runner.cudagraph_manager = graphs
    runner.model_state.loop.replay_graphs_of(graphs)
    return graphs

"""vLLM's full CUDA graphs without a GPU: what was captured is run once more, in Python.

Which graphs there are, what they are captured with and when one is replayed is up to vLLM's own
managers, of a model and of a drafter. In the place of ``torch.cuda.graph`` the forward pass itself
is kept. A replay calls it with the tensors of the capture, as a GPU would read their memory again:
a tensor that is not written in place between two steps has the values of the capture. What else a
graph keeps is compared: each replay has to run the operations of the capture, on the same memory
and with the same numbers, whatever Python holds by then.
"""

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

from dllm.engine.model_state import DiffusionModelState
from dllm.patches.cuda_graphs import canvas_runner

MODE = CUDAGraphMode.FULL_DECODE_ONLY


class Operations(TorchDispatchMode):
    """Notes the operations and launches of a pass, and what they are given.

    Memory that the pass takes is named by the operation that took it; any other by its address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[Any]]] = []
        self._taken: dict[int, tuple[int, int]] = {}  # by address: operation, and which result
        self._kept: list[torch.Tensor] = []  # so that no address is used again

    def __enter__(self) -> Any:
        operations, launch = self, GridExecutor.__call__

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            name = f"{self.fn.__name__}{self.grid if isinstance(self.grid, tuple) else ''}"
            operations._note(name, (args, kwargs))
            with _disable_current_modes():
                return launch(self, *args, **kwargs)

        self._launches = mock.patch.object(GridExecutor, "__call__", noted)
        self._launches.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._launches.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = self._note(str(func), (args, kwargs))
        result = func(*args, **(kwargs or {}))
        for index, made in enumerate(tree_leaves(result)):
            if isinstance(made, torch.Tensor) and _address(made) not in known:
                self._taken[_address(made)] = len(self.found), index
                self._kept.append(made)
        return result

    def _note(self, name: str, arguments: Any) -> set[int]:
        """Note an operation. Returns the addresses that it is given."""
        given = tree_leaves(arguments)
        self.found.append((name, [self._named(one) for one in given]))
        return {_address(one) for one in given if isinstance(one, torch.Tensor)}

    def _named(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        memory = self._taken.get(_address(value), _address(value))
        return memory, value.storage_offset(), tuple(value.shape), value.stride()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Graph:
    """A pass, and what a graph of it would run again."""

    def __init__(self, forward: Any) -> None:
        self._forward = partial(forward, CUDAGraphMode.NONE)
        self._forward()  # vLLM makes the buffer of hidden states with the first, the largest
        self._captured = self._operations()

    def replay(self) -> None:
        """Raises AssertionError if a GPU would run something else."""
        for now, captured in zip(self._operations(), self._captured, strict=True):
            assert now == captured, f"{now} in a replay, {captured} in the capture"

    def _operations(self) -> list[tuple[str, list[Any]]]:
        with Operations() as operations:
            self._forward()
        return operations.found


def _keep_forward_passes(manager: Any, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
    for description in manager._capture_descs[CUDAGraphMode.FULL]:
        manager.graphs[description] = Graph(create_forward_fn(description, warmup=False))
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
        torch.inference_mode(),
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
            _make_staging(speculator)
            speculator.init_cudagraph_manager(MODE)
            speculator.capture()
    runner.cudagraph_manager = graphs
    replayed = {"model": _watched(graphs)}
    if speculator is not None:
        replayed["draft"] = _watched(speculator.query_cudagraph_manager)
    if isinstance(runner.model_state, DiffusionModelState):
        of_canvases = canvas_runner(lambda captured: None)
        runner.__class__ = type("CanvasCPUModelRunner", (of_canvases, type(runner)), {})
        runner.model_state.loop.replay_graphs_of(graphs)
    return replayed


def _make_staging(speculator: Any) -> None:
    """Make what a speculator of DFlash has from vLLM 0.33 on if its server captures full graphs.

    The target's hidden states are copied there; the graph projects them and stores the context.
    """
    network = getattr(speculator.model, "model", None)  # a target that drafts for itself has none
    if hasattr(speculator, "_aux_staging") and network is not None:
        rows = speculator._num_graph_context_tokens(speculator.max_num_reqs)
        size = network.fc.input_size
        speculator._aux_staging = torch.zeros(rows, size, dtype=speculator.dtype)


def _watched(graphs: Any) -> list[tuple[int, int]]:
    replayed: list[tuple[int, int]] = []
    run = graphs.run_fullgraph

    def run_fullgraph(description: Any) -> Any:
        replayed.append((description.num_tokens, description.num_reqs))
        return run(description)

    graphs.run_fullgraph = run_fullgraph
    return replayed

"""An engine that captures CUDA graphs on a CPU, and replays them from a tape (``tape``).

Which graphs there are, what they are captured with and when one is replayed is up to vLLM: its
configuration, its runner's ``capture_model``, its managers of a model and of a drafter.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from vllm.config import CompilationMode
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from dllm.engine.model_state import DiffusionModelState
from dllm.patches.gpu_worker import CanvasGPURunner
from dllm.settings.denoising import WHOLE_SEQUENCE
from tests.support import tape
from tests.support.tape_modes import IN_PIECES

Replays = dict[str, list[tuple[int, int]]]  # of each manager: (tokens, requests)


@contextmanager
def graphs_of_cuda(mode: str, sizes: Sequence[int]) -> Iterator[None]:
    """Let engines that are made within have vLLM's CUDA graphs.

    For graphs in pieces vLLM's compiler splits the model, and runs the pieces as they are.

    Args:
        mode: a name of ``tape_modes``.
        sizes: numbers of tokens for which graphs are captured, ascending.
    """
    tape.install()
    check_and_update = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        check_and_update(cls, vllm_config)
        compilation = vllm_config.compilation_config
        is_split = mode == IN_PIECES
        compilation.mode = CompilationMode.VLLM_COMPILE if is_split else CompilationMode.NONE
        compilation.backend = "eager"
        compilation.cudagraph_mode = CUDAGraphMode[mode]
        compilation.cudagraph_capture_sizes = list(sizes)
        compilation.max_cudagraph_capture_size = sizes[-1]
        compilation.cudagraph_num_of_warmups = 0

    replaced = classmethod(check_and_update_config)
    _lend_torch_cuda()
    with mock.patch.object(CpuPlatform, "check_and_update_config", replaced):
        yield


def _lend_torch_cuda() -> None:
    """What a capture asks of a GPU; for the whole process."""
    cuda_graph = "vllm.compilation.cuda_graph"
    replaced: dict[tuple[str, str], Any] = {
        ("vllm.v1.worker.gpu.cudagraph_utils", "graph_capture"): lambda device: nullcontext(),
        ("vllm.v1.worker.gpu.cudagraph_utils", "current_stream"): lambda: None,
        ("vllm.compilation.cudagraph_pool", "set_graph_pool_id"): lambda pool: None,
        ("vllm.v1.worker.gpu.model_runner", "lock_workspace"): lambda: None,
        (cuda_graph, "current_stream"): lambda: None,
        (cuda_graph, "weak_ref_tensors"): lambda tensors: tensors,
    }
    for (module, name), value in replaced.items():
        assert hasattr(import_module(module), name)
        setattr(import_module(module), name, value)
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.get_memory_info = lambda *device: (0, 0)
    for name, answer in {
        "get_global_graph_pool": (0, 0),
        "graph_pool_handle": (0, 0),
        "get_static_graph_wrapper_cls": f"{cuda_graph}.CUDAGraphWrapper",
        "support_static_graph_mode": True,
        "opaque_attention_op": True,
    }.items():
        setattr(CpuPlatform, name, classmethod(lambda cls, *given, answer=answer: answer))


def run_as_on_cuda(runner: Any) -> None:
    """Give a runner of canvases the class of a GPU's, which pads for graphs alone."""
    if isinstance(runner.model_state, DiffusionModelState):
        unchecked = staticmethod(lambda runner: None)
        checks = {"check_code": unchecked, "check_graphs": unchecked}
        runner.__class__ = type("OnCuda", (CanvasGPURunner, CPUModelRunner), checks)


def capture(runner: Any) -> Replays:
    """Capture graphs, of model and draft, as a worker does at the end of its start.

    Returns:
        The graphs that are replayed from here on: of the ``model``; of its ``pieces``, whose
        requests are not counted; of a speculator by the name of its manager.
    """
    tape.FAULTS.clear()
    graphs = runner.cudagraph_manager
    replayed = {"model": _watched(graphs), "pieces": _watched_pieces(graphs)}
    for name, manager in (vars(runner.speculator) if runner.speculator else {}).items():
        if name.endswith("cudagraph_manager") and manager.needs_capture():
            replayed[name] = _watched(manager)
    runner.capture_model()
    for found in replayed.values():
        found.clear()
    return replayed


def steps_of_canvases(runner: Any) -> Counter[str]:
    """Engine steps from here on that hold canvases alone, by the mode of their graph.

    A canvas within a block has the tokens in front of it in its row. Where every token sees all
    others, the prompt is in each step, too.
    """
    steps: Counter[str] = Counter()
    prepare = runner.prepare_inputs
    block_size = runner.model_state.algorithm.settings.block_size

    def prepare_inputs(output: Any, state: Any, description: Any, *others: Any) -> Any:
        widths = state.num_draft_tokens_np
        if widths is not None and widths.all():
            tails = state.num_scheduled_tokens - widths
            if block_size != WHOLE_SEQUENCE and (tails < block_size).all():
                steps[description.cg_mode.name] += 1
        return prepare(output, state, description, *others)

    runner.prepare_inputs = prepare_inputs
    return steps


@contextmanager
def drafts_of(speculator: Any) -> Iterator[list[Any]]:
    """The drafts of each step that is drafted for: token ids, of each of its requests."""
    drafts: list[Any] = []
    follow = speculator.steering._follow

    def note(step: Any, draft: Any, is_wanted: bool) -> Any:
        found = follow(step, draft, is_wanted)
        drafts.extend([found.tolist()] * is_wanted)
        return found

    with mock.patch.object(speculator.steering, "_follow", note):
        yield drafts


def _watched_pieces(graphs: Any) -> list[tuple[int, int]]:
    replayed: list[tuple[int, int]] = []
    run = graphs.run_pw_graph

    def run_pw_graph(model: Any, inputs: dict[str, Any]) -> Any:
        replayed.append((len(inputs["positions"]), 0))
        return run(model, inputs)

    graphs.run_pw_graph = run_pw_graph
    return replayed


def _watched(graphs: Any) -> list[tuple[int, int]]:
    replayed: list[tuple[int, int]] = []
    run = graphs.run_fullgraph

    def run_fullgraph(description: Any) -> Any:
        replayed.append((description.num_tokens, description.num_reqs))
        return run(description)

    graphs.run_fullgraph = run_fullgraph
    return replayed

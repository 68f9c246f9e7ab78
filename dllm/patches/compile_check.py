"""Before a GPU serves a diffusion model: compiled code beside the code that it is made from.

A compiler that is wrong makes wrong tokens, not an error. Compared are the model, which vLLM
compiles, and the functions of a denoise step, which we do (``engine.compilation``): prompts, and
canvases that are denoised twice, greedy and sampled, with filters and a thinking budget, with an
adapter where the server has some. Before CUDA graphs are captured, which hold compiled code.

Not compared: images, edited logits, grammars, logprobs.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from vllm import SamplingParams
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.engine.compilation import run_as_written
from dllm.engine.warm_up import made_up_adapters, serve_made_up
from dllm.patches.graph_check import MOST, Passes, clear, is_right, largest_error
from dllm.patches.self_test import OFF
from dllm.settings.server import options_of

logger = init_logger(LOGGER)

# How canvases are denoised, which goes on: what a step has stored decides the next hidden states.
WAYS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "thinking_token_budget": 1},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
)


def drop_wrong_code(runner: Any) -> None:
    """Compiled code rounds to 16 bits in other places, which may change a token or an expert, and
    with it a row. So a tenth of the size of hidden states is allowed (``graph_check.MOST``), in the
    mean of a request's rows. Other tokens or keys are off by more.

    Raises RuntimeError if a step failed; it says how to start without this comparison.
    """
    config = runner.vllm_config
    is_compiled = config.compilation_config.mode != CompilationMode.NONE
    if not is_compiled or not options_of(config).self_test:
        return
    modules = [
        module
        for module in runner.model.modules()
        if isinstance(module, TorchCompileWithNoGuardsWrapper) and not module.do_not_compile
    ]

    def passes(*, compiles_model: bool, compiles_steps: bool) -> Passes:
        for module in modules:
            module.do_not_compile = not compiles_model
        run_as_written(not compiles_steps)
        return [*_served(runner)]

    try:
        expected = passes(compiles_model=False, compiles_steps=False)
        found = passes(compiles_model=True, compiles_steps=False)
        is_model_right = _is_right("the compiled model", found, expected)
        found = passes(compiles_model=False, compiles_steps=True)
        is_step_right = _is_right("the compiled denoise step", found, expected)
    except Exception as error:  # a server that may be wrong does not start
        raise RuntimeError(
            f"Compiled code could not be compared with code that is not ({error}). {OFF}"
        ) from error
    run_as_written(not is_step_right)
    for module in modules:
        module.do_not_compile = not is_model_right
    if not is_model_right:
        _leave_pieces_out(runner)


def _served(runner: Any) -> Iterator[Any]:
    with made_up_adapters(runner) as adapters:
        for adapter, way in product(adapters, WAYS):
            clear(runner.kv_caches)
            yield serve_made_up(runner, runner.execute_model, 2, SamplingParams(**way), adapter)


def _is_right(name: str, found: Passes, expected: Passes) -> bool:
    error = largest_error(found, expected)
    logger.info("dllm: with %s hidden states differ by %.2g of their size", name, error)
    return is_right(f"{name} is", error, MOST, "it serves without the compiler")


def _leave_pieces_out(runner: Any) -> None:
    """Pieces are made by the compiler; full graphs are captured without it."""
    graphs, pieces = runner.cudagraph_manager, CUDAGraphMode.PIECEWISE
    graphs._capture_descs.pop(pieces, None)
    runner.cudagraph_manager._candidates = {
        size: [graph for graph in which if graph.cg_mode != pieces]
        for size, which in graphs._candidates.items()
    }
    has_full = CUDAGraphMode.FULL in graphs._capture_descs
    graphs.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY if has_full else CUDAGraphMode.NONE

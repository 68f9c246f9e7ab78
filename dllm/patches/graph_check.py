"""Before a GPU serves a diffusion model: steps in CUDA graphs beside the same steps without.

A graph that reads memory which a step has not written makes wrong tokens, not an error. Compared
are prompts, canvases and emitted blocks: of one request, of two, and of as many as the largest full
graph has. Not compared: graphs for adapters and images.
"""

from itertools import chain
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.engine.ranks import all_ranks_say_yes
from dllm.engine.warm_up import serve_made_up
from dllm.patches.self_test import OFF
from dllm.settings.server import options_of

logger = init_logger(LOGGER)

FULL, PIECES = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
# The largest mean error that counts as rounding, in units of the size of a row's hidden states. A
# graph runs the same kernels as a step without it. But padding may choose other tiles, and another
# rounding may choose another expert, which changes a few rows.
ROUNDING = 0.1

Passes = list[list[torch.Tensor]]  # of each number of requests: hidden states [R, tokens, hidden]


def drop_wrong_graphs(runner: Any) -> None:
    """Serve made-up requests with graphs and without; graphs that differ are not used.

    Not with data parallelism, where every engine would have to come to the same result.

    Raises:
        RuntimeError: a step failed; the message says how to start without this comparison.
    """
    config, captured = runner.vllm_config, runner.cudagraph_manager._candidates
    graphs = list(chain(*captured.values()))
    right = {graph.cg_mode for graph in graphs}
    is_parallel = config.parallel_config.data_parallel_size > 1
    if not right or is_parallel or not options_of(config).self_test:
        return
    most = max((graph.num_reqs for graph in graphs if graph.cg_mode == FULL), default=1)
    counts = sorted({1, 2, most})

    def allow(modes: set[CUDAGraphMode]) -> None:
        runner.cudagraph_manager._candidates = {
            size: [graph for graph in which if graph.cg_mode in modes]
            for size, which in captured.items()
        }

    def passes(modes: set[CUDAGraphMode]) -> Passes:
        allow(modes)
        found = []
        for count in counts:
            for cache in runner.kv_caches:  # else what a graph does not write is there from before
                cache.zero_()
            found.append(serve_made_up(runner, runner.execute_model, count))
        return found

    try:
        expected = passes(set())
        for mode in (PIECES, FULL):
            if mode in right and not _is_same(mode, passes({mode}), expected):
                right.remove(mode)
    except Exception as error:  # a server that may be wrong does not start
        raise RuntimeError(
            f"CUDA graphs could not be compared with steps without ({error}). {OFF}"
        ) from error
    allow(right)
    sizes = [count for count, served in zip(counts, expected, strict=True) if served]
    logger.info("dllm: CUDA graphs were compared with steps without, of %s requests", sizes)


def _is_same(mode: CUDAGraphMode, found: Passes, expected: Passes) -> bool:
    """Whether graphs give what steps without them give; a difference is logged."""
    pairs = zip(chain(*found), chain(*expected), strict=True)
    error = max((error_of(ours, theirs) for ours, theirs in pairs), default=0.0)
    if all_ranks_say_yes(error <= ROUNDING):
        return True
    logger.error(
        "dllm: %s CUDA graphs are wrong on this GPU (hidden states are off by %.2g of their size): "
        "steps run without them. Please report it.",
        mode.name,
        error,
    )
    return False


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The mean error of a request's rows, in units of their size; inf if one is no number.

    Args:
        found, expected: ``[R, tokens, hidden]``; the result is of the request that is farthest off.
    """
    difference = (found.float() - expected.float()).norm(dim=-1)  # [R, tokens]
    rows = difference / expected.float().norm(dim=-1).clamp(min=1e-30)
    return float(rows.nan_to_num(nan=torch.inf).mean(dim=1).max())

"""Before a GPU serves: steps in CUDA graphs beside the same steps without.

A graph that reads memory which a step has not written makes wrong tokens, not an error. Compared
are prompts, canvases and emitted blocks: of one request, of two, and of as many as the largest full
graph has. Not compared: adapters, images, and a drafter's graphs, whose tokens the target verifies.
"""

from itertools import chain
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.engine.ranks import all_ranks_say_yes
from dllm.engine.warm_up import Pass, serve_made_up
from dllm.patches.self_test import OFF
from dllm.settings.server import PluginOptions

logger = init_logger(LOGGER)

FULL, PIECES = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
# Of the size of a row's hidden states, on average. A graph runs the kernels that run without it,
# but padding may choose other tiles, and then a rounding another expert, which changes a few rows.
ROUNDING = 0.1


def drop_wrong_graphs(runner: Any) -> None:
    """Serve made-up requests with graphs and without; graphs that differ are not used.

    Not with data parallelism, where every engine would have to come to the same result.

    Args:
        runner: the worker's, with its graphs captured.

    Raises:
        RuntimeError: a step failed; the message says how to start without this comparison.
    """
    config, captured = runner.vllm_config, runner.cudagraph_manager._candidates
    graphs = list(chain(*captured.values()))
    right = {graph.cg_mode for graph in graphs}
    is_parallel = config.parallel_config.data_parallel_size > 1
    if not right or is_parallel or not PluginOptions.from_vllm(config).self_test:
        return
    most = max((graph.num_reqs for graph in graphs if graph.cg_mode == FULL), default=1)
    counts = sorted({1, 2, most})

    def allow(modes: set[CUDAGraphMode]) -> None:
        runner.cudagraph_manager._candidates = {
            size: [graph for graph in which if graph.cg_mode in modes]
            for size, which in captured.items()
        }

    def passes(modes: set[CUDAGraphMode]) -> list[list[Pass]]:
        allow(modes)
        return [serve_made_up(runner, runner.execute_model, count) for count in counts]

    try:
        # Without graphs last: what they fail to write would be in the cache already.
        found = passes(right)
        in_pieces = passes({PIECES}) if PIECES in right else None
        expected = passes(set())
        if in_pieces is not None and not _is_same("PIECEWISE", in_pieces, expected):
            right.remove(PIECES)
            found = passes(right)
        if FULL in right and not _is_same("FULL", found, expected):
            right.remove(FULL)
    except Exception as error:  # a server that may be wrong does not start
        raise RuntimeError(
            f"CUDA graphs could not be compared with steps without. {OFF}"
        ) from error
    allow(right)
    sizes = [count for count, served in zip(counts, expected, strict=True) if served]
    logger.info("dllm: CUDA graphs were compared with steps without, of %s requests", sizes)


def _is_same(name: str, found: list[list[Pass]], expected: list[list[Pass]]) -> bool:
    """Whether graphs give what steps without give; if not, it is said."""
    error = max(map(largest_error, found, expected))
    if all_ranks_say_yes(error <= ROUNDING):
        return True
    logger.error(
        "dllm: %s CUDA graphs are wrong on this GPU (hidden states are off by %.2g of their size): "
        "steps run without them. Please report it.",
        name,
        error,
    )
    return False


def largest_error(found: list[Pass], expected: list[Pass]) -> float:
    """The mean error of a request's rows, in units of their size; inf if one is no number.

    Of the request and the pass that are farthest off. A request is compared until a rounding has
    changed a token: what follows depends on it.
    """
    same = torch.tensor(True)
    error = torch.zeros(())
    for ours, theirs in zip(found, expected, strict=True):
        difference = (ours.hidden.float() - theirs.hidden.float()).norm(dim=-1)  # [R, tokens]
        rows = difference / theirs.hidden.float().norm(dim=-1).clamp(min=1e-30)
        of_request = rows.nan_to_num(nan=torch.inf).mean(dim=1).cpu()
        error = torch.maximum(error, of_request.where(same, 0).max())
        pairs = zip(ours.emitted, theirs.emitted, strict=True)
        same = same & torch.tensor([mine == other for mine, other in pairs])
    return float(error)

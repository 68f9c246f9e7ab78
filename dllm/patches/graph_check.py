"""Before a GPU serves a diffusion model: steps in CUDA graphs beside the same steps without.

A graph that reads memory which a step has not written makes wrong tokens, not an error. Compared
are prompts, canvases and emitted blocks: of one request, of two, and of as many as the largest full
graph has, in padded graphs, and in those for adapters, too. Not compared: steps with images, whose
encoder is in no graph and not compiled.
"""

from collections.abc import Iterable
from itertools import chain, pairwise, product
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.engine.ranks import all_engines_say_yes
from dllm.engine.warm_up import made_up_adapters, serve_made_up
from dllm.patches.self_test import OFF
from dllm.settings.server import options_of

logger = init_logger(LOGGER)

FULL, PIECES = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
# Errors that count as rounding, in units of the size of a hidden state. A graph runs the same
# kernels as a step without it. But padding may choose other tiles of a product, as another number
# of requests may, and another rounding may choose another expert, which changes a few rows. So the
# measure is what another number of requests changes without graphs: TIMES as much is allowed, at
# least a few roundings of bf16 (0.2 % each), and at most a tenth.
TIMES, LEAST, MOST = 4.0, 0.01, 0.1

Passes = list[list[torch.Tensor]]  # of each number of requests: hidden states [R, tokens, hidden]


def drop_wrong_graphs(runner: Any) -> None:
    """Raises RuntimeError if a step failed; it says how to start without this comparison."""
    config, captured = runner.vllm_config, runner.cudagraph_manager._candidates
    graphs = list(chain(*captured.values()))
    right = {graph.cg_mode for graph in graphs}
    if not right or not options_of(config).self_test:
        return
    counts = numbers_of_requests({graph.num_reqs for graph in graphs if graph.cg_mode == FULL})

    def allow(modes: set[CUDAGraphMode]) -> None:
        runner.cudagraph_manager._candidates = {
            size: [graph for graph in which if graph.cg_mode in modes]
            for size, which in captured.items()
        }

    def passes(modes: set[CUDAGraphMode]) -> Passes:
        allow(modes)
        found = []
        with made_up_adapters(runner) as adapters:
            for adapter, count in product(adapters, counts):
                clear(runner.kv_caches)
                found.append(serve_made_up(runner, runner.execute_model, count, adapter=adapter))
        return found

    try:
        expected = passes(set())
        bound = min(max(LEAST, TIMES * rounding(expected[: len(counts)])), MOST)
        errors = {
            mode.name: largest_error(passes({mode}), expected)
            for mode in (PIECES, FULL)
            if mode in right
        }
        right = {
            mode
            for mode in right
            if is_right(
                f"{mode.name} CUDA graphs are", errors[mode.name], bound, "steps run without them"
            )
        }
    except Exception as error:  # a server that may be wrong does not start
        raise RuntimeError(
            f"CUDA graphs could not be compared with steps without ({error}). {OFF}"
        ) from error
    allow(right)
    sizes = [count for count, served in zip(counts, expected, strict=False) if served]
    logger.info(
        "dllm: CUDA graphs were compared with steps without, of %s requests: largest differences "
        "of hidden states %s, allowed %.2g of their size",
        sizes,
        {name: float(f"{error:.2g}") for name, error in errors.items()},
        bound,
    )


def clear(caches: Iterable[torch.Tensor]) -> None:
    """Else what a step does not write is there from before."""
    for cache in caches:
        cache.zero_()


def numbers_of_requests(captured: set[int]) -> list[int]:
    """Of made-up requests, ascending: so that one step is padded, too.

    ``captured``: for how many requests there are full graphs. Others take the next larger one.
    """
    counts = {1, 2, max(captured, default=1)}
    padded = {count - 1 for count in captured} - captured - {0}
    if padded and counts <= captured:
        counts.add(min(padded))
    return sorted(counts)


def is_right(what: str, error: float, bound: float, otherwise: str) -> bool:
    """On all ranks; ``what``: a subject with its verb."""
    if all_engines_say_yes(error <= bound):
        return True
    logger.error(
        "dllm: %s wrong on this GPU (hidden states are off by %.2g of their size; %.2g is "
        "allowed): %s. Please report it.",
        what,
        error,
        bound,
        otherwise,
    )
    return False


def largest_error(found: Passes, expected: Passes) -> float:
    pairs = zip(chain(*found), chain(*expected), strict=True)
    return max((error_of(ours, theirs) for ours, theirs in pairs), default=0.0)


def rounding(passes: Passes) -> float:
    """What another number of requests (``passes``: rising) changes in prompts' hidden states.

    The first request's prompt for many requests is the beginning of its prompt for fewer, and its
    rows are causal.
    """
    prompts = [served[0][:1] for served in passes if served]
    pairs = pairwise(prompts)
    return max((error_of(few[:, : many.shape[1]], many) for few, many in pairs), default=0.0)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The mean error of the worst request's rows ``[R, tokens, hidden]``, relatively."""
    difference = (found.float() - expected.float()).norm(dim=-1)  # [R, tokens]
    rows = difference / expected.float().norm(dim=-1).clamp(min=1e-30)
    return float(rows.nan_to_num(nan=torch.inf).mean(dim=1).max())

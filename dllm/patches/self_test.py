"""Before a GPU serves: every kernel of ours beside its definition, and nothing wrong is used.

A kernel that this compiler or GPU gets wrong makes wrong tokens, not an error. So does a CUDA graph
that reads memory which a step has not written: steps in graphs are compared with steps without.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.attention.choice import OURS, TRITON
from dllm.engine.attention_layers import Layer, layers_of
from dllm.engine.ranks import all_ranks_say_yes
from dllm.engine.warm_up import hidden_states
from dllm.models import settings_of
from dllm.ops.dispatch import WRONG_KERNELS
from dllm.patches.configure import flash_layers
from dllm.settings.server import PluginOptions

logger = init_logger(LOGGER)

OPTION = """--additional-config '{"dllm": {"self_test": false}}'"""
OFF = f"{OPTION} serves without this test."


def replace_wrong_kernels(vllm_config: Any, device: torch.device) -> None:
    """Run the checks of ``engine.kernel_checks``; something else takes the place of what is wrong.

    Of our attention kernel: vLLM's Triton backend. Of FlashAttention: our kernel. Of row
    statistics: their definition. Of the kernels of grammars: the CPU's version.

    Raises:
        RuntimeError: our attention kernel is wrong, and vLLM's backends cannot serve this model.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dllm.engine.kernel_checks import ATTENTION, FLASH, canvas_trials

    attention = vllm_config.attention_config

    def replace(name: str, wrong: str) -> str:
        if name.startswith(ATTENTION):
            try:
                flash_layers(vllm_config, settings_of(vllm_config), TRITON)
            except ValueError as error:
                raise _no_other(name, wrong) from error
            attention.backend = AttentionBackendEnum.TRITON_ATTN
            return TRITON
        if name.startswith(FLASH):
            attention.flash_attn_version = None
            return "our own kernel"
        WRONG_KERNELS.add(name)
        return "its definition"

    if PluginOptions.from_vllm(vllm_config).self_test:
        _run(canvas_trials(*layers_to_check(vllm_config), device), replace, device)


def replace_wrong_drafter_kernels(vllm_config: Any, device: torch.device) -> None:
    """The same for a drafter, whose one kernel is attention: vLLM chooses another.

    Raises:
        RuntimeError: our attention kernel is wrong, and no other has the drafter's window.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dllm.drafter.pair import drafter_config
    from dllm.engine.kernel_checks import attention_trials

    drafter, speculative = drafter_config(vllm_config), vllm_config.speculative_config
    dtype = speculative.draft_model_config.dtype
    sizes = drafter.num_heads, drafter.num_kv_heads, drafter.head_dim
    layers = {
        f"draft layers {index}": Layer(*sizes, each.window, each.is_anchored, dtype=dtype)
        for index, each in enumerate(dict.fromkeys(drafter.layers))
        if speculative.attention_backend == AttentionBackendEnum.CUSTOM
    }

    def replace(name: str, wrong: str) -> str:
        if any(layer.is_anchored for layer in drafter.layers):
            raise _no_other(name, wrong)
        speculative.attention_backend = None
        return "vLLM's"

    if PluginOptions.from_vllm(vllm_config).self_test:
        _run(attention_trials(layers, device), replace, device)


def _run(trials: Any, replace: Callable[[str, str], str], device: torch.device) -> None:
    """``replace`` puts something in the place of a wrong kernel, and says what."""
    from dllm.engine.kernel_checks import checks  # needs Triton

    for name, wrong in checks(trials):
        if wrong:
            logger.error(
                "dllm: the kernel of %s is wrong on this GPU (%s): %s serves. Please report it.",
                name,
                wrong,
                replace(name, wrong),
            )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # vLLM measures what is left


def _no_other(name: str, wrong: str) -> RuntimeError:
    return RuntimeError(
        f"The kernel of {name} is wrong on this GPU ({wrong}), and no other backend can serve this "
        f"model. Please report it. {OFF}"
    )


# Of the size of a request's hidden states. Kernels in a graph are those outside of it, but padding
# may choose other tiles of a matrix product, whose rounding changes which experts a token gets.
GRAPH_ROUNDING = 0.1


def drop_wrong_graphs(runner: Any, execute_model: Callable[[Any], Any]) -> None:
    """Serve made-up requests with CUDA graphs and without; graphs that differ are not used.

    First full graphs, then those in pieces. Not with data parallelism, where every engine would
    have to come to the same result.

    Args:
        runner: the worker's, with its graphs captured.
        execute_model: the worker's method of that name.
    """
    from vllm.config import CUDAGraphMode

    config, graphs = runner.vllm_config, runner.cudagraph_manager
    is_parallel = config.parallel_config.data_parallel_size > 1
    if is_parallel or not PluginOptions.from_vllm(config).self_test:
        return
    for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
        captured = graphs._candidates
        if not any(graph.cg_mode == mode for graph in chain(*captured.values())):
            continue
        found = list(hidden_states(runner, execute_model))
        graphs._candidates = {}
        expected = list(hidden_states(runner, execute_model))
        error = max(map(_relative_error, found, expected), default=0.0)
        if all_ranks_say_yes(error <= GRAPH_ROUNDING):
            graphs._candidates = captured
            return
        graphs._candidates = {
            size: [graph for graph in which if graph.cg_mode != mode]
            for size, which in captured.items()
        }
        logger.error(
            "dllm: %s CUDA graphs are wrong on this GPU (hidden states are off by %.2g of their "
            "size): steps run without them. Please report it.",
            mode.name,
            error,
        )


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the request that is farthest off; both ``[requests, tokens, hidden]``."""
    found, expected = found.float().flatten(1), expected.float().flatten(1)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    return float(error.nan_to_num(nan=torch.inf).max())


def layers_to_check(vllm_config: Any) -> tuple[dict[str, Layer], dict[str, Layer]]:
    """The attention layers that our kernel serves, and those that FlashAttention serves, too."""
    settings, attention = settings_of(vllm_config), vllm_config.attention_config
    if attention.backend is None or attention.backend.name != OURS:
        return {}, {}
    has_flash = attention.flash_attn_version == 4
    flash = flash_layers(vllm_config, settings, None if has_flash else OURS)
    return layers_of(vllm_config, settings), flash

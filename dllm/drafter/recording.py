"""Connects vLLM's workers with the recorder: which worker records, and what it is given.

A server with a drafter that reads layers of the target (DFlash, DSpark, EAGLE-3) records these. A
server without a drafter records those that ``record_layers`` names: its target has to give the same
hidden states that it would give to a drafter (vLLM's ``SupportsEagle3``).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from dllm import LOGGER
from dllm.drafter.recorder import Recorder
from dllm.drafter.step import TargetStep
from dllm.settings.drafting import WHERE
from dllm.settings.server import options_of

logger = init_logger(LOGGER)


def layers_without_drafter(vllm_config: VllmConfig) -> Sequence[int]:
    """Layers of the target that a server without a drafter records; empty if it records none."""
    if vllm_config.speculative_config is not None:
        return ()
    return options_of(vllm_config).drafter.record_layers or ()


def layers_of_drafter(vllm_config: VllmConfig) -> list[int]:
    """0-based, in order. Raises ValueError: it reads none, or config.json does not say which."""
    speculative = vllm_config.speculative_config
    assert speculative is not None, "no drafter"
    layers = [layer - 1 for layer in get_eagle3_aux_layers_from_config(speculative) or ()]
    reads = speculative.method in ("eagle3", "dflash", "dspark")
    if not (reads and layers and layers == sorted(set(layers)) and layers[0] >= 0):
        raise ValueError(
            f'{WHERE}: record with the draft source "{speculative.method}", whose config.json '
            f"names these layers of the target: {layers}; allowed: at least one, ascending, from "
            "0 on. Leave record out."
        )
    return layers


def refuse_unrecordable(vllm_config: VllmConfig) -> None:
    """Raises ValueError if a target without a drafter does not name its layers, or lacks them."""
    options, parallel = options_of(vllm_config).drafter, vllm_config.parallel_config
    if options.record_layers is None:
        raise ValueError(
            f"{WHERE}: record = {options.record!r}, and there is no drafter that says what it "
            'reads. Name the layers of the target: "record_layers": [1, 9, ...], 0-based.'
        )
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if options.record_layers[-1] >= num_layers:
        raise ValueError(
            f"{WHERE}: record_layers = {list(options.record_layers)}, and the target has "
            f"{num_layers} layers; allowed: 0 to {num_layers - 1}."
        )
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"{WHERE}: record with --pipeline-parallel-size {parallel.pipeline_parallel_size}: "
            "without a drafter the stages do not pass hidden states on. Use one stage."
        )


def refuse_target_without_hidden_states(vllm_config: VllmConfig) -> None:
    """Raises ValueError for a target whose class in vLLM gives no hidden states of its layers."""
    kind = get_model_cls(vllm_config.model_config)
    if not supports_eagle3(kind):
        raise ValueError(
            f"{WHERE}: record: vLLM's {kind.__name__} gives no hidden states of its layers (it has "
            "no SupportsEagle3), so there is nothing to record."
        )


def make_recorder(vllm_config: VllmConfig) -> Recorder | None:
    """None without recording, or where the tensor-parallel group's first worker does it for all."""
    options, parallel = options_of(vllm_config).drafter, vllm_config.parallel_config
    if options.record is None or parallel.rank % parallel.tensor_parallel_size:
        return None
    if vllm_config.speculative_config is not None:
        layers: Sequence[int] = layers_of_drafter(vllm_config)
    else:
        layers = layers_without_drafter(vllm_config)
    logger.warning(
        "Recording what users write and what they are answered, in %s (at most %d MB).",
        options.record,
        options.record_mb,
    )
    return Recorder(Path(options.record), options.record_mb * 1_000_000, layers)


def step_without_drafts(state: Any, last_sampled: torch.Tensor) -> TargetStep:
    """From an ``ExecuteModelState`` before sampling, and ``last_sampled`` ``[slots, 1]`` after."""
    batch = state.input_batch
    computed = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens
    num_sampled = torch.from_numpy((computed >= batch.prefill_len_np).astype(np.int64))
    return TargetStep(
        batch,
        state.aux_hidden_states,
        num_sampled,
        torch.zeros_like(num_sampled),
        last_sampled,
    )

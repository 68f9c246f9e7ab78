"""Faults of capture and replay, planted into an engine before its graphs are captured.

Each leaves answers without graphs as they are, or changes them in a way that graphs would share.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from dllm.attention import backend
from tests.support import tape

Builder = backend.CanvasAttentionMetadataBuilder


def nothing(engine: Any) -> None:
    """No fault."""


def python_number(engine: Any) -> None:
    """Attention adds a number of Python that changes from step to step."""
    lengths = engine.runner.input_buffers.seq_lens
    build = Builder._metadata

    def metadata(self: Any, common: Any, max_seq_len: int) -> Any:
        made = build(self, common, max_seq_len)
        made.longest = int(lengths.max())
        return made

    Builder._metadata = metadata
    _behind_attention(engine, lambda output, made: output.add_(0.02 * made.longest))


def inputs_elsewhere(engine: Any) -> None:
    """The model's inputs lie in new memory in each step."""
    state = engine.runner.model_state
    inputs = state.canvas_inputs

    def canvas_inputs(batch: Any) -> Any:
        state._inputs_embeds = state._inputs_embeds.clone()
        return inputs(batch)

    state.canvas_inputs = canvas_inputs


def metadata_of_capture(engine: Any) -> None:
    """The graph reads metadata that was made for the capture alone, and is freed."""
    state = engine.runner.model_state
    prepare = state.prepare_attn

    def prepare_attn(*args: Any, for_capture: bool = False, **given: Any) -> Any:
        if not for_capture:
            return prepare(*args, for_capture=False, **given)
        others = mock.patch.object(state, "_metadata_of_full_graph", state._metadata_of_sequences)
        with others:
            return prepare(*args, for_capture=True, **given)

    state.prepare_attn = prepare_attn


def lengths_of_capture(engine: Any) -> None:
    """Attention reads a copy of the lengths, made when the graph is captured."""
    build = Builder.build_for_cudagraph_capture
    kept: list[torch.Tensor] = []

    def cloned(self: Any, common: Any) -> Any:
        kept.append(common.seq_lens.clone())
        return build(self, replace(common, seq_lens=kept[-1]))

    Builder.build_for_cudagraph_capture = cloned


def wait(engine: Any) -> None:
    """Attention asks the device whether any sequence is causal."""

    def ask(output: torch.Tensor, made: Any) -> None:
        if bool((made.calls[0].batch.is_causal != 0).any()):
            output.add_(0)

    _behind_attention(engine, ask)


def number_of_host(engine: Any) -> None:
    """A number that the host writes in each step is copied from its memory."""
    lengths = engine.runner.input_buffers.seq_lens

    def copy(output: torch.Tensor, made: Any) -> None:
        with tape.unseen():
            number = np.asarray([0.01 * float(lengths.max())], dtype=np.float32)
        output.add_(torch.from_numpy(number))

    _behind_attention(engine, copy)


def table_of_capture(engine: Any) -> None:
    """A table is made in the first pass that is captured, and kept for all others."""
    tables: list[torch.Tensor] = []

    def lazily(output: torch.Tensor, made: Any) -> None:
        if tape.is_recording():
            if not tables:
                tables.append(torch.ones(len(output), 1, 1) * 1.0)
            output.mul_(tables[0][: len(output)])

    _behind_attention(engine, lazily)


def padding_with_a_slot(engine: Any) -> None:
    """Rows of padding have the cache slot of a live row instead of none."""
    tables = engine.runner.block_tables
    compute = tables.compute_slot_mappings

    def compute_slot_mappings(*args: Any, **given: Any) -> Any:
        slots = compute(*args, **given)
        live = torch.where(slots >= 0, slots, slots.max())
        slots.copy_(torch.where(slots >= 0, slots, live.amin(dim=1, keepdim=True)))
        return slots

    tables.compute_slot_mappings = compute_slot_mappings


def memory_of_another_graph(engine: Any) -> None:
    """What a graph leaves in memory of the pool is read when another one has been replayed."""
    runner, kept = engine.runner, []
    model = runner.model.model
    forward, logits = model.forward, runner.model.compute_logits

    def keep(*args: Any, **given: Any) -> torch.Tensor:
        hidden: torch.Tensor = forward(*args, **given)
        if tape.is_recording():
            kept.append(hidden)
        return hidden

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        for old in kept[-1:]:  # of the graph that was captured last
            hidden = hidden + 0 * old[:1]
        result: torch.Tensor = logits(hidden)
        return result

    model.forward, runner.model.compute_logits = keep, compute_logits


def wrong_code(engine: Any) -> None:
    """What vLLM compiles of the model computes something else."""
    backbone = engine.runner.model.model
    call = type(backbone).__call__

    def wrong(model: Any, *args: Any, **given: Any) -> torch.Tensor:
        result: torch.Tensor = call(model, *args, **given)
        is_right = model is not backbone or model.do_not_compile
        return result if is_right else result.roll(1, dims=-1)

    type(backbone).__call__ = wrong


def _behind_attention(engine: Any, change: Callable[[torch.Tensor, Any], object]) -> None:
    """Let each layer change its output; ``change`` gets the step's metadata, too."""

    def followed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def changed(*args: Any, **given: Any) -> torch.Tensor:
            result = forward(*args, **given)
            if args[5] is not None:
                change(result, args[5])
            return result

        return changed

    layers = engine.runner.vllm_config.compilation_config.static_forward_context.values()
    for layer in layers:
        if hasattr(layer, "impl"):  # not of an instance's class: a CPU wraps each
            layer.impl.forward = followed(layer.impl.forward)

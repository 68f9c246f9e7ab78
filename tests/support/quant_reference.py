"""Hugging Face's DiffusionGemma with the weights of a quantized checkpoint, and rounded inputs.

Weights come from ``quant_checkpoints.dequantized``. Hooks round the inputs of every quantized layer
as the format says, in numpy (``naive_formats``). Nothing of ``quant`` is used.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dllm.patches.cpu_worker import padded_size
from tests.support import hf_reference
from tests.support import naive_formats as naive
from tests.support.quant_checkpoints import DECODER, PROJECTIONS, dequantized, layers_of

Rounding = Callable[[torch.Tensor], torch.Tensor]


def load_quantized(source: Path, path: Path, rounds_inputs: bool = True) -> nn.Module:
    """The reference in fp32 with the quantized weights of ``path``.

    Args:
        source: the bf16 checkpoint that ``path`` was made from.
        rounds_inputs: False: inputs are not rounded, whatever the checkpoint says.
    """
    model = hf_reference.load_hf(source)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in dequantized(path).items():
            if name.startswith(DECODER) or name.endswith("layer_scalar"):
                state[name].copy_(tensor)
    if rounds_inputs:
        layers = layers_of(path)
        for name, module in model.named_modules():
            match = re.fullmatch(r"model\.(?:decoder|encoder\.language_model)\.(layers\..*)", name)
            if match is None:
                continue
            stem = DECODER + match[1]
            if isinstance(module, nn.Linear) and stem.split(".")[-1] in PROJECTIONS:
                rounding = rounding_of(layers[stem])
                module.register_forward_pre_hook(
                    lambda _, args, rounding=rounding: (rounding(args[0]), *args[1:])
                )
            elif name.endswith(".experts"):
                module.forward = ExpertsForward(module, stem, layers)
    return model


class ExpertsForward:
    """The reference's experts, one at a time, with the inputs of each projection rounded."""

    def __init__(self, experts: nn.Module, stem: str, layers: dict) -> None:
        self.experts = experts
        self.roundings = [
            [rounding_of(layers[f"{stem}.{i}.{part}_proj"]) for part in ("gate", "up", "down")]
            for i in range(experts.num_experts)
        ]

    def __call__(
        self, tokens: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(tokens)
        for token in range(len(tokens)):
            for expert, weight in zip(
                top_k_index[token].tolist(), top_k_weights[token], strict=True
            ):
                total[token] += weight * self.one(expert, tokens[token])
        return total

    def one(self, expert: int, token: torch.Tensor) -> torch.Tensor:
        gate, up = self.experts.gate_up_proj[expert].chunk(2)
        round_gate, round_up, round_down = self.roundings[expert]
        hidden = self.experts.act_fn(gate @ round_gate(token)) * (up @ round_up(token))
        return self.experts.down_proj[expert] @ round_down(hidden)


def rounding_of(parts: dict[str, torch.Tensor]) -> Rounding:
    """How the inputs of a layer with these tensors are rounded."""
    if len(parts) == 1:  # not quantized
        return lambda values: values
    if "weight_packed" in parts:
        if "input_global_scale" not in parts:
            return lambda values: values
        divisor = float(parts["input_global_scale"])
        return _in_numpy(lambda values: naive.round_trip_nvfp4(values, divisor))
    table = naive.INT8 if parts["weight"].dtype == torch.int8 else naive.FP8
    return _in_numpy(lambda values: naive.round_trip_tokens(values, table))


def _in_numpy(rounding: Callable[[np.ndarray], np.ndarray]) -> Rounding:
    return lambda values: torch.from_numpy(rounding(values.detach().numpy())).to(values.dtype)


# A server whose passes are those of Hugging Face's model: the prompt alone, and then canvases.
PASSES_APART = {"dllm": {"separate_passes": True}}


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """The L2 distance of two tensors relative to the norm of ``reference``."""
    return float((ours - reference).norm() / reference.norm())


class Recording:
    """Inputs and outputs of the layers of a served model, for each forward pass.

    linears: name -> [(inputs, outputs)]; experts: name -> [(tokens, weights, ids, outputs)].
    """

    def __init__(self, model: nn.Module) -> None:
        self.linears: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.experts: dict[str, list[tuple[torch.Tensor, ...]]] = {}
        self._undo: list[Callable[[], object]] = []
        for name, module in model.named_modules():
            if ".layers." in name and name.endswith("_proj"):
                self._undo.append(module.register_forward_hook(self._note_linear(name)).remove)
            elif name.endswith("routed_experts"):
                self._watch_experts(name, module)

    def _note_linear(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: tuple) -> None:
            self.linears.setdefault(name, []).append((args[0].clone(), output[0].clone()))

        return hook

    def _watch_experts(self, name: str, module: nn.Module) -> None:
        apply = module.quant_method.apply

        def watched(**given):  # type: ignore[no-untyped-def]
            seen = [given[name].clone() for name in ("x", "topk_weights", "topk_ids")]
            output = apply(**given)
            self.experts.setdefault(name, []).append((*seen, output.clone()))
            return output

        module.quant_method.apply = watched
        self._undo.append(lambda: setattr(module.quant_method, "apply", apply))

    def stop(self) -> None:
        """Leave the served model as it was."""
        for undo in self._undo:
            undo()


class Lockstep:
    """Runs the reference with the outputs of the served model's layers in place of its own.

    Comparing logits would not work. Rounding makes a model discontinuous: if fp32 sums in another
    order move a number across the middle between two codes, the result jumps by a whole step of the
    format, and later layers amplify it. (With 8 bits, changing the reference's embeddings by a
    millionth changes its logits by 10-25%.) Here each layer starts from the served model's values,
    so nothing is amplified. ``distances`` says how far the inputs of each layer are from those that
    the served layer got.

    The recording's first pass is the prompt, for the encoder; the second is the canvas, for the
    decoder.
    """

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self.distances: dict[str, float] = {}
        for name, module in model.named_modules():
            match = re.fullmatch(r"model\.(decoder|encoder\.language_model)\.(layers\..*)", name)
            if match is None:
                continue
            index, place = int(match[1] == "decoder"), f"model.{match[2]}"
            if place.endswith(".experts"):
                tokens, _, ids, output = recording.experts[f"{place}.routed_experts"][index]
                module.forward = self._experts(name, tokens, ids, output)
            elif isinstance(module, nn.Linear) and place.split(".")[-1] in PROJECTIONS:
                fused, columns = _in_fused(model, name, module)
                inputs, output = recording.linears[f"{place.rpartition('.')[0]}.{fused}"][index]
                module.forward = self._linear(name, inputs, output[:, columns])

    def _linear(
        self, name: str, inputs: torch.Tensor, output: torch.Tensor
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(values: torch.Tensor) -> torch.Tensor:
            count = values.shape[1]
            self.distances[name] = relative(_own(inputs, count), values[0])
            return _own(output, count)[None]

        return forward

    def _experts(
        self, name: str, tokens: torch.Tensor, ids: torch.Tensor, output: torch.Tensor
    ) -> Callable[..., torch.Tensor]:
        def forward(values: torch.Tensor, top_k_index: torch.Tensor, _: object) -> torch.Tensor:
            count = len(values)
            served_ids = _own(ids, count).long()
            assert torch.equal(top_k_index.sort().values, served_ids.sort().values), name
            self.distances[name] = relative(_own(tokens, count), values)
            return _own(output, count)

        return forward


def _own(rows: torch.Tensor, count: int) -> torch.Tensor:
    """A batch's rows, without those that the CPU worker pads it with."""
    assert len(rows) in (count, padded_size(count))
    return rows[:count]


def _in_fused(model: nn.Module, name: str, module: nn.Linear) -> tuple[str, slice]:
    """The layer that vLLM fuses a projection into, and its columns of the output."""
    parent, _, projection = name.rpartition(".")
    size = module.out_features
    if projection in ("gate_proj", "up_proj"):
        start = 0 if projection == "gate_proj" else size
        return "gate_up_proj", slice(start, start + size)
    if projection not in ("q_proj", "k_proj", "v_proj"):
        return projection, slice(None)
    queries = model.get_submodule(f"{parent}.q_proj").out_features
    start = {"q_proj": 0, "k_proj": queries, "v_proj": queries + size}[projection]
    return "qkv_proj", slice(start, start + size)

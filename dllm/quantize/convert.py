"""What LLM Compressor's converters do not know of our models, as converters of its own kind.

``model_free_ptq`` and ``convert_checkpoint``, which read and write the files, call them for each
file of a source with its tensors, and with those of other files that these depend on.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dllm.quantize.job import Job
from dllm.quantize.linears import Linear, by_one_name, part_of, together
from dllm.settings.command import CommandError

Tensors = dict[str, torch.Tensor]
# Quantizes layers that vLLM fuses into one. Arguments: their weights by module, and the static
# scale of their inputs (the same for all; None if the scheme has none). Result: for each module
# the tensors that a checkpoint holds, by the last part of their names.
QuantizeFused = Callable[[Tensors, torch.Tensor | None], dict[str, Tensors]]


class OneCopy:
    """One copy of each weight that DiffusionGemma's halves share, under the decoder's name."""

    def __init__(self, job: Job) -> None:
        self.source, self.copies = job.source, by_one_name(job.source)
        self.one_name = {copy: name for name, copies in self.copies.items() for copy in copies}
        self.layers = job.layers

    def get_dependencies(self, weight_name: str) -> set[str]:
        first, *others = self.copies[self.one_name[weight_name]]
        return {*others} if weight_name == first else set()

    def validate(self, tensors: Tensors) -> Tensors:
        return {self.one_name[name]: tensor for name, tensor in tensors.items()}

    def process(self, tensors: Tensors) -> Tensors:
        """Raises CommandError: two copies of a weight differ, or one to quantize is not finite."""
        for name in {self.one_name[stored] for stored in tensors}:
            first, *others = self.copies[name]
            for other in others:
                if not torch.equal(tensors[first], tensors[other]):
                    raise CommandError(
                        f"{self.source.path}: {first} and {other} are one weight of the model and "
                        "differ. Save it with tied weights, or drop the copy that is not meant."
                    )
        kept = self.validate(tensors)
        for layer in self.layers:
            if layer.source in kept and not bool(
                part_of(kept[layer.source], layer).isfinite().all()
            ):
                raise CommandError(
                    f"{self.source.path}: {layer.module} holds a weight that is not finite."
                )
        return kept

    def create_config(self) -> None:
        """``make`` writes config.json; of compressed-tensors before 0.18."""

    def update_config(self, config: Any) -> None:
        """Likewise."""

    def update_model_config(self, config: dict[str, Any]) -> dict[str, Any]:
        return config


class Fused(OneCopy):
    """Quantizes, beside that, all layers that vLLM fuses into one together."""

    def __init__(
        self, job: Job, quantize: QuantizeFused, input_scales: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(job)
        self.sets, self.quantize, self.input_scales = together(job.layers), quantize, input_scales
        self.partners = {
            self.copies[layers[0].source][0]: {self.copies[one.source][0] for one in layers[1:]}
            for layers in self.sets
        }

    def get_dependencies(self, weight_name: str) -> set[str]:
        partners = self.partners.get(weight_name, set())
        return super().get_dependencies(weight_name) | partners - {weight_name}

    def process(self, tensors: Tensors) -> Tensors:
        kept = super().process(tensors)
        here = [layers for layers in self.sets if layers[0].source in kept]
        made: Tensors = {}
        for layers in here:
            weights = {layer.module: part_of(kept[layer.source], layer) for layer in layers}
            scale = self.input_scales.get(layers[0].module)
            for module, parts in self.quantize(weights, scale).items():
                made |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        replaced = {layer.source for layers in here for layer in layers}
        return {name: each for name, each in kept.items() if name not in replaced} | made


def keeps_fused_experts(job: Job, layers: list[Linear]) -> bool:
    """Whether ``--ignore`` leaves experts as they are, of which a layer's are one tensor."""
    quantized = {layer.source for layer in job.layers}
    return any(layer.expert is not None and layer.source not in quantized for layer in layers)

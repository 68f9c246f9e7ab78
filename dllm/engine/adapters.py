"""LoRA adapters, by vLLM's own manager: which weights they may change, and which rows have which.

vLLM adds an adapter's change to a linear layer's output, row by row. Heads and canvases of a
request have the same adapter. The layers are the projections of attention, of MLPs and of experts
that are not quantized. Everything else is refused by name when an adapter is loaded: heads,
embeddings, routers of some families, and the MLP of self-conditioning, which is computed for
canvases only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.lora.layers import FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.lora.utils import is_in_target_modules, parse_fine_tuned_lora_name
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.worker.gpu.lora_utils import LoraState

from dllm.engine.expert_adapters import is_on_cpu, sizes_of, take_apart, takes_adapters


class Adapter(LoRAModel):
    """vLLM's, which takes the last tensor if two have the same name in the model served."""

    @classmethod
    def from_lora_tensors(  # type: ignore[override]
        cls, lora_model_id: int, tensors: dict[str, torch.Tensor], *args: Any, **options: Any
    ) -> LoRAModel:
        """Raises ValueError: a value is NaN or infinite, or two tensors change the same weights, as
        DiffusionGemma's encoder and decoder share them, and differ.
        """
        seen: dict[tuple[str, bool], str] = {}
        for name, tensor in tensors.items():
            served = parse_fine_tuned_lora_name(name, options.get("weights_mapper"))
            other = seen.setdefault(served, name)
            if not tensor.isfinite().all():
                raise ValueError(f"the adapter holds values that are NaN or infinite, in {name}.")
            if not torch.equal(tensor, tensors[other]):
                raise ValueError(
                    f"the adapter holds {other} and {name}, which change the same weights, "
                    "and they differ. Train one adapter for both halves of the model."
                )
        return super().from_lora_tensors(lora_model_id, tensors, *args, **options)


class RunningAdapters(LoraState):
    """vLLM's, which takes adapters of one name for one: it may have been loaded anew meanwhile."""

    def get_activate_loras(self, req_ids: list[str]) -> Any:
        asked = filter(None, map(self.lora_requests.get, req_ids))
        return {one.lora_int_id: one for one in asked}.values()


class AdaptedLayers(LRUCacheLoRAModelManager):
    def _init_punica_wrapper(self, max_num_batched_tokens: int, vllm_config: VllmConfig) -> None:
        super()._init_punica_wrapper(max_num_batched_tokens, vllm_config)
        if self.device.type == "cpu":
            for part in self.punica_wrapper_mapping:
                self.punica_wrapper_mapping[part] = PunicaByRuns(
                    max_num_batched_tokens, self.max_num_seqs, self.device
                )

    def _create_lora_modules(self) -> None:
        """A router that a mixture holds, too, is replaced in the mixture; vLLM's layer gets it."""
        super()._create_lora_modules()
        for layer in self.modules.values():
            if isinstance(layer, FusedMoEWithLoRA) and "gate" in layer._modules:
                layer.base_layer.gate = layer._modules.pop("gate")

    def _validate_moe_lora_format(self, lora_model: LoRAModel) -> None:
        """Matrices of all experts are taken, too (``take_apart``)."""


class Adapters(LRUCacheWorkerLoRAManager):
    """vLLM's, which leaves out silently what the model served has no layer for."""

    _manager_cls = AdaptedLayers

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        """Raises ValueError: a layer has one matrix only, another shape, or takes no adapter."""
        try:
            adapter = super()._load_adapter(lora_request)
        except AssertionError:  # without words
            adapter = None
        if adapter is None or not adapter.loras or not all(map(is_whole, adapter.loras.values())):
            raise ValueError(
                f"adapter {lora_request.lora_name!r} has no lora_A, or one without its lora_B. "
                "Save it again."
            )
        manager = self._adapter_manager
        complete = getattr(manager.model, "complete_adapter", None)
        if complete is not None:
            complete(adapter.loras)
        for name, layer in manager.modules.items():
            if isinstance(layer, FusedMoEWithLoRA):
                take_apart(name, layer, manager.packed_modules[name], adapter.loras)
        places = places_of(manager.packed_modules)
        unknown = sorted(adapter.loras.keys() - manager.modules.keys() - places.keys())
        if unknown:
            layers = sorted({name.rsplit(".", 1)[-1] for name in manager.modules})
            raise ValueError(
                f"adapter {lora_request.lora_name!r} changes {', '.join(unknown[:3])} (of "
                f"{len(unknown)} such), which takes no adapter. Allowed: the layers' "
                f"{', '.join(layers)}. Train it without the others."
            )
        for name, lora in adapter.loras.items():
            whole, place = places.get(name, (name, None))
            refuse_other_shape(name, lora, manager.modules[whole].base_layer, place)
        return adapter


def is_whole(lora: Any) -> bool:
    return lora.lora_a is not None and lora.lora_b is not None


def places_of(packed: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, int | None]]:
    """Of each layer of the checkpoint: the layer served that it is a part of, and which."""
    return {
        name: (whole, place) for whole, parts in packed.items() for place, name in enumerate(parts)
    }


def refuse_other_shape(name: str, lora: Any, layer: Any, place: int | None) -> None:
    """Raises ValueError. Smaller matrices would be served as if the rest were 0."""
    if not isinstance(layer, LinearBase):
        columns, rows = sizes_of(layer, place or 0)
    else:
        columns = layer.input_size
        rows = layer.output_size if place is None else layer.output_sizes[place]
    found = tuple(lora.lora_a.shape), tuple(lora.lora_b.shape)
    wanted = (lora.rank, columns), (rows, lora.rank)
    if found != wanted:
        raise ValueError(
            f"the adapter's matrices of {name} are {found}; of this model, at the rank of the "
            f"adapter's config, they are {wanted}."
        )


def manager_of_adapters(
    model: nn.Module, vllm_config: VllmConfig, device: torch.device
) -> Adapters:
    """Raises ValueError if ``--lora-target-modules`` names something else."""
    config: Any = vllm_config.lora_config
    packed: Any = model.packed_modules_mapping
    # A layer may have two names; vLLM replaces it under each of them.
    modules = model.named_modules(remove_duplicate=False)
    taking = {
        name for name, layer in modules if isinstance(layer, LinearBase) or takes_adapters(layer)
    }
    kinds = {name.rsplit(".", 1)[-1] for name in taking}
    kinds |= {part for kind in kinds for part in packed.get(kind, ())}
    wrong = set(config.target_modules or ()) - kinds
    if wrong:
        raise ValueError(
            f"--lora-target-modules {' '.join(sorted(wrong))}: allowed are "
            f"{', '.join(sorted(kinds))}."
        )
    config.target_modules = sorted(
        name for name in taking if is_in_target_modules(name, config.target_modules, packed)
    )
    for layer in map(model.get_submodule, config.target_modules):
        if is_on_cpu(layer):
            from dllm.engine.adapted_experts import adapt  # imports vLLM's quantized experts

            adapt(layer.routed_experts)
    return Adapters(vllm_config, device, {}, lora_model_cls=Adapter)


class PunicaByRuns(PunicaWrapperCPU):
    """On a CPU: two matrix products for each run of rows that have the same adapter.

    vLLM's own gathers a matrix for each row. For a row without an adapter it takes row -1 of the
    stacked adapters, which is the last one, so that in a batch of both its answers are wrong.
    """

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add ``scale * x @ A.T @ B.T`` to each slice of ``y``, in place.

        Args:
            y: ``[rows, sum of output_slices]``; x: ``[rows, columns]``.
            lora_a_stacked: of each slice, ``[adapters, 1, rank, columns]``; b: ``[.., slice,
                rank]``.
        """
        if self.no_lora:
            return
        runs = (one.tolist() for one in self.prefill_metadata[:3])
        stacked = list(zip(lora_a_stacked, lora_b_stacked, strict=True))
        for start, length, adapter in zip(*runs, strict=True):
            if adapter < 0:
                continue
            rows = slice(start, start + length)
            parts = y[rows].split(output_slices, dim=1)
            for part, (a, b) in zip(parts, stacked, strict=True):
                part.add_(x[rows] @ a[adapter, 0].T @ b[adapter, 0].T, alpha=scale)

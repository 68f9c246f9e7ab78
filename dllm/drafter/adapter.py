"""An adapter that only drafting rows have: a low-rank change of the target's linear layers.

The rows that verify have the model's own weights, so the text is the model's. The change is added
in the rows of a mask, a tensor of one size, which compiled code and CUDA graphs read like any other
input.

Source: ``linear_spec_lora`` of Nemotron-Labs-Diffusion (sgl-project/sglang #25802) and UNO (#37667
there, vllm-project/vllm #55947).
"""

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import get_adapter_absolute_path
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.utils import set_weight_attrs

from dllm.engine.adapters import Adapter, is_whole, places_of, refuse_other_shape
from dllm.settings.drafting import WHERE
from dllm.settings.server import options_of

CONFIG = "adapter_config.json"
# Parts of a layer served, by place; None: the whole layer.
Parts = Mapping[int | None, LoRALayerWeights]


class DraftAdapter:
    """Changes the layers of a model, in no row until a pass drafts.

    Args:
        folder: of ``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT writes them.
        has: ``[rows]`` bool, which rows of a draft pass have the adapter; as many as any pass may
            have.
    """

    def __init__(self, folder: Path, model: Any, has: Tensor, dtype: torch.dtype) -> None:
        """Raises ValueError as ``read_adapter``."""
        self.has, self.rows, self.is_on = has, torch.zeros_like(has), False
        for name, parts in read_adapter(folder, model, dtype).items():
            self._change(model.get_submodule(name), parts)

    @contextmanager
    def drafting(self, num_rows: int) -> Iterator[None]:
        """Within, the pass of ``num_rows`` rows is one that drafts."""
        self.rows[:num_rows].copy_(self.has[:num_rows])
        self.is_on = True
        try:
            yield
        finally:
            self.rows[:num_rows].zero_()
            self.is_on = False

    def _change(self, layer: Any, parts: Parts) -> None:
        """Let a layer's product add the change, on each rank that of the rank's part of it."""
        down, up = self._matrices(layer, parts)
        for name, tensor in (("draft_down", down), ("draft_up", up), ("draft_rows", self.rows)):
            layer.register_buffer(name, tensor, persistent=False)
        method = copy.copy(layer.quant_method)  # other layers may have the same one
        method.apply = partial(self._apply, layer.quant_method.apply)
        layer.quant_method = method

    def _matrices(self, layer: Any, parts: Parts) -> tuple[Tensor, Tensor]:
        """A ``[rank, columns]`` and B ``[rows, rank]`` of this rank, which the layer's loader cuts.

        Of a packed layer the A of its parts are below each other, and B is 0 where a row is of
        another part: the rank is the sum of theirs.
        """
        given = torch.cat([lora.lora_a for lora in parts.values()])
        ups = torch.block_diag(*(lora.lora_b * lora.scaling for lora in parts.values()))
        down = _parameter(len(given), layer.input_size_per_partition, {"input_dim": 1}, given)
        up = _parameter(layer.output_size_per_partition, len(given), {"output_dim": 0}, given)
        if isinstance(layer, RowParallelLinear):
            layer.weight_loader(down, given)
            up.copy_(ups)
        else:
            down.copy_(given)
            is_qkv = isinstance(layer, QKVParallelLinear)
            of_parts = ups.split([len(lora.lora_b) for lora in parts.values()])
            for place, of_part in zip(parts, of_parts, strict=True):
                shard = () if place is None else ("qkv"[place] if is_qkv else place,)
                layer.weight_loader(up, of_part, *shard)
        device = self.has.device
        return down.data.to(device), up.data.to(device)

    def _apply(self, apply: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """What the layer's own ``apply`` gives, and the change in rows of the mask."""
        output: Tensor = apply(layer, x, bias)
        # Compiled code is the same for all passes; without it those that verify skip the change.
        if not (torch.compiler.is_compiling() or self.is_on):
            return output
        change = F.linear(F.linear(x, layer.draft_down), layer.draft_up)
        return torch.where(layer.draft_rows[: x.shape[0], None], output + change, output)


def adapter_of(vllm_config: VllmConfig, model: Any, has: Tensor) -> DraftAdapter | None:
    """The one that the options name. Raises ValueError: it does not fit."""
    name = options_of(vllm_config).drafter.adapter
    if name is None:
        return None
    folder = adapter_folder(vllm_config)
    try:
        return DraftAdapter(folder, model, has, vllm_config.model_config.dtype)
    except ValueError as error:
        raise ValueError(f"{WHERE}: adapter = {name!r}: {error}") from None


def digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob("adapter_*")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def adapter_folder(vllm_config: VllmConfig) -> Path:
    """A folder, one beside the target's weights, or a repository of the hub.

    Raises ValueError: there is no adapter in it.
    """
    name, target = options_of(vllm_config).drafter.adapter, vllm_config.model_config
    assert name is not None, "no adapter is asked for"
    folders = Path(target.model) / name, Path(name)
    found = next((folder for folder in folders if folder.is_dir()), None)
    try:
        if found is None and "/" in name:
            found = Path(get_adapter_absolute_path(name))
        elif found is None and not Path(target.model).is_dir():
            files = f"{name}/*"
            kept = snapshot_download(target.model, revision=target.revision, allow_patterns=files)
            found = Path(kept) / name
    except OSError as error:
        raise ValueError(f"{WHERE}: adapter = {name!r}: {error}") from None
    # Released adapters of UNO are a folder of their repository.
    for folder in (found, found / "adapter") if found is not None else ():
        if (folder / CONFIG).is_file():
            return folder
    raise ValueError(
        f"{WHERE}: adapter = {name!r}: there is no {name}/{CONFIG}; allowed: a folder, one in that "
        "of the model, or a repository of the hub."
    )


def read_adapter(folder: Path, model: Any, dtype: torch.dtype) -> Mapping[str, Parts]:
    """By the layers that are changed, which have other names in the checkpoint.

    Raises ValueError: it is no LoRA, holds NaN, is of another model or rank, changes a layer that
    takes no adapter, or leaves out some layers of a kind that it changes.
    """
    layers = {name: one for name, one in model.named_modules() if isinstance(one, LinearBase)}
    packed = packed_layers(model, layers)
    places = {name: (name, None) for name in layers if name not in packed} | places_of(packed)
    try:
        helper = PEFTHelper.from_local_dir(str(folder), None)
        helper.validate_legal(SimpleNamespace(max_lora_rank=float("inf")))
    except TypeError as error:  # a field is missing
        raise ValueError(f"{folder / CONFIG}: {error}") from None
    names = getattr(model, "hf_to_vllm_mapper", None)
    loras: dict[str, LoRALayerWeights] = Adapter.from_local_checkpoint(
        str(folder),
        {_kind(name) for name in places},
        helper,
        device="cpu",
        dtype=dtype,
        weights_mapper=None if names is None else names.get_rename_mapper(),
    ).loras
    if unknown := sorted(loras.keys() - places.keys()):
        raise ValueError(
            f"it changes {', '.join(unknown[:3])} (of {len(unknown)} such), which this model does "
            "not have."
        )
    found: dict[str, dict[int | None, LoRALayerWeights]] = {}
    for name, lora in loras.items():
        if not is_whole(lora):
            raise ValueError(f"{name} has lora_A or lora_B alone.")
        whole, place = places[name]
        refuse_other_shape(name, lora, layers[whole], place)
        found.setdefault(whole, {})[place] = lora
    changed = {_kind(name) for name in loras}
    if missing := sorted(name for name in places.keys() - loras.keys() if _kind(name) in changed):
        raise ValueError(
            f"it leaves out {', '.join(missing[:3])} (of {len(missing)} such), and changes others "
            "of this name."
        )
    return found


def packed_layers(model: Any, layers: Iterable[str]) -> dict[str, list[str]]:
    """The names that the checkpoint has for the parts of each packed layer."""
    mapping = getattr(model, "packed_modules_mapping", {})
    split = {name: name.rpartition(".") for name in layers}
    return {
        name: [f"{stem}.{part}" for part in mapping[kind]]
        for name, (stem, _, kind) in split.items()
        if kind in mapping
    }


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _parameter(rows: int, columns: int, attributes: dict[str, int], like: Tensor) -> nn.Parameter:
    """As vLLM's loaders of weights want it: it says along which dimension ranks share it."""
    parameter = nn.Parameter(like.new_zeros(rows, columns), requires_grad=False)
    set_weight_attrs(parameter, attributes)
    return parameter

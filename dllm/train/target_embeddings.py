"""A target's two ends: its embedding and its head, which a drafter shares with it.

With recorded hidden states, nothing between the two is needed to train a drafter. So only these
tensors are read from the checkpoint, in seconds and in the memory of two matrices.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from dllm.quantize.checkpoint import INDEX, WEIGHTS, open_file
from dllm.settings.command import CommandError

EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")
NORMS = ("norm", "norm_f")  # in front of the head, beside the embedding
HEAD = "lm_head.weight"
# Names with these parts are not those of the language model's embedding, head or last norm.
OF_OTHERS = ("mtp.", ".layers.", "visual.", "vision")


@dataclass
class TargetEmbeddingsAndHead:
    """What a drafter shares with its target, on one device.

    Attributes:
        embedding, head: ``[V, H]``, the weights alone, as vLLM shares them with a drafter.
        head_norm: ``[H]``, what the norm in front of the head multiplies by; None if it has none.
    """

    embedding: Tensor
    head: Tensor
    head_norm: Tensor | None
    device: torch.device

    @classmethod
    def read(cls, path: Path, device: str) -> "TargetEmbeddingsAndHead":
        """Read these tensors of a checkpoint, and no others.

        Raises:
            CommandError: it is not in safetensors files, or one of them is missing or quantized.
        """
        files = _files(path)
        embedding = _only(path, "embedding", files, EMBEDDINGS)
        prefix = embedding.rpartition(".weight")[0].rpartition(".")[0]
        config = AutoConfig.from_pretrained(path)
        is_tied = config.get_text_config().tie_word_embeddings
        head = embedding if is_tied else _only(path, "head", files, (HEAD,))
        norm_name = next((n for n in NORMS if f"{prefix}.{n}.weight" in files), None)
        norm = None
        if norm_name is not None:
            with torch.device("meta"):  # the class of the norm, without any weights
                decoder = AutoModelForCausalLM.from_config(config).get_decoder()
            norm = getattr(decoder, norm_name).to_empty(device=device).requires_grad_(False)
            norm.weight = nn.Parameter(_read(path, files, f"{prefix}.{norm_name}.weight"), False)
        rows = _read(path, files, embedding).to(device)
        return cls(
            rows,
            rows if head == embedding else _read(path, files, head).to(device),
            head_norm(norm.to(device)) if norm is not None else None,
            torch.device(device),
        )


def head_norm(norm: nn.Module | None) -> Tensor | None:
    """``[H]``: what an RMSNorm multiplies by: its weight, or one plus it (Qwen3.5, Gemma)."""
    if norm is None:
        return None
    weight: Tensor = norm.weight  # type: ignore[assignment]
    offset = (norm(torch.ones_like(weight)[None])[0] - weight).float().mean().round()
    return weight + offset.to(weight.dtype)


def _files(path: Path) -> dict[str, str]:
    if (path / INDEX).exists():
        files: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
        return files
    if not (path / WEIGHTS).exists():
        raise CommandError(
            f"--target {path}: neither {INDEX} nor {WEIGHTS}; --from-buffer reads embedding and "
            "head from safetensors files."
        )
    return dict.fromkeys(open_file(path / WEIGHTS).keys(), WEIGHTS)


def _only(path: Path, what: str, names: Iterable[str], endings: tuple[str, ...]) -> str:
    found = [
        name
        for name in names
        if any(name == ending or name.endswith(f".{ending}") for ending in endings)
        and not any(part in f".{name}" for part in OF_OTHERS)
    ]
    if len(found) != 1:
        stems = tuple(ending.removesuffix("weight") for ending in endings)
        there = sorted(name for name in names if any(stem in name for stem in stems))
        raise CommandError(
            f"--target {path}: {len(found) or 'no'} tensors that could be its {what} "
            f"({', '.join(endings)}); similar names: {', '.join(there[:6]) or 'none'}. "
            "--from-buffer needs it, unquantized."
        )
    return found[0]


def _read(path: Path, files: dict[str, str], name: str) -> Tensor:
    tensor: Tensor = open_file(path / files[name]).get_tensor(name)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise CommandError(
            f"--target {path}: {name} is quantized ({tensor.dtype}); --from-buffer needs it in 16 "
            "bits or more. Give the unquantized checkpoint of the same model."
        )
    return tensor

"""The target in transformers: its responses, the hidden states that a drafter reads, and batches.

Layer i means the output of decoder layer i, 0-based, before the final norm (z-lab's convention,
docs/drafter.md). vLLM calls it i + 1. With recorded hidden states only embedding and head are
needed, which a drafter shares with its target: they are read from the checkpoint alone, in seconds
and in the memory of two matrices.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from dllm.drafter.checkpoint import TargetFacts
from dllm.drafter.samples import Sample
from dllm.models import FAMILIES
from dllm.models.unmasking.reference import load_model
from dllm.quantize.checkpoint import INDEX, WEIGHTS, mapped
from dllm.settings.checks import missing_folder
from dllm.settings.command import CommandError
from dllm.train.network import draft_inputs

EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")
NORMS = ("norm", "norm_f")  # in front of the head, beside the embedding
HEAD = "lm_head.weight"
# Names with these parts are not those of the language model's embedding, head or last norm.
OF_OTHERS = ("mtp.", ".layers.", "visual.", "vision")


@dataclass
class TargetEmbeddingsAndHead:
    embedding: Tensor  # [V, H], the weights alone, as vLLM shares them with a drafter
    head: Tensor  # [V, H]
    head_norm: Tensor | None  # [H], what the norm in front of the head multiplies by
    device: torch.device

    @classmethod
    def read(cls, path: Path, device: str) -> "TargetEmbeddingsAndHead":
        """Raises CommandError if it is not in safetensors files, or one is missing or quantized."""
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
    return dict.fromkeys(mapped(path / WEIGHTS), WEIGHTS)


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
    tensor = mapped(path / files[name])[name]
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise CommandError(
            f"--target {path}: {name} is quantized ({tensor.dtype}); --from-buffer needs it in 16 "
            "bits or more. Give the unquantized checkpoint of the same model."
        )
    return tensor


class Target(TargetEmbeddingsAndHead):
    """A causal language model with its weights frozen; the tokens ``eos`` end a response."""

    def __init__(self, path: Path, device: str) -> None:
        try:
            is_masked = own_mask(path) is not None
            kind = AutoModelForCausalLM
            model = load_model(path) if is_masked else kind.from_pretrained(path, dtype="auto")
        except (OSError, ValueError) as error:
            raise CommandError(f"--target {path}: {error}") from None
        self.model = model.to(device).eval().requires_grad_(False)
        decoder = self.model.get_decoder()
        self.layers: nn.ModuleList = decoder.layers
        norms = [getattr(decoder, name) for name in NORMS if hasattr(decoder, name)]
        super().__init__(
            self.model.get_input_embeddings().weight,
            self.model.get_output_embeddings().weight,
            head_norm(norms[0]) if norms else None,
            torch.device(device),
        )
        eos = self.model.generation_config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [eos]) - {None}

    @torch.no_grad()
    def hidden_states(self, ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
        """``[B, S, len(layer_ids) * H]``, side by side. ``ids``: ``[B, S]``, right-padded."""
        found: dict[int, Tensor] = {}

        def keep(layer: int) -> Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]:
            def hook(_module: object, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
                found[layer] = output if isinstance(output, Tensor) else output[0]

            return hook

        hooks = [self.layers[layer].register_forward_hook(keep(layer)) for layer in layer_ids]
        try:
            self.model.get_decoder()(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([found[layer] for layer in layer_ids], -1)

    @torch.no_grad()
    def logits_behind(self, tokens: Sequence[int]) -> Tensor:
        """``[vocab]`` bf16: logits of the token that comes next, as a pilot reads them."""
        ids = torch.tensor([tokens], device=self.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        return logits[0, -1].bfloat16().cpu()

    def respond(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """Responses in one batch, each to its first end-of-sequence token, that one included."""
        sampling: dict[str, object] = {"do_sample": False}
        if temperature > 0:
            # Exactly what is asked for: no top-k or top-p of the model's generation config.
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
        # Nothing attends to the filler in front of short prompts.
        filler, longest = min(self.eos, default=0), max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        rows = [[filler] * pad + [*prompt] for pad, prompt in zip(pads, prompts, strict=True)]
        is_prompt = torch.arange(longest) >= torch.tensor(pads)[:, None]
        output = self.model.generate(
            torch.tensor(rows, device=self.device),
            attention_mask=is_prompt.long().to(self.device),
            max_new_tokens=max_tokens,
            pad_token_id=filler,
            **sampling,
        )
        return [self._until_end(row) for row in output[:, longest:].tolist()]

    def _until_end(self, tokens: list[int]) -> list[int]:
        ends = [index for index, token in enumerate(tokens) if token in self.eos]
        return tokens[: ends[0] + 1] if ends else tokens


# --- batches of samples --------------------------------------------------------------------------


class Blocks(NamedTuple):
    """Draft blocks of K positions, A in each of B sequences."""

    ids: Tensor  # [B, A, K], the last token that is known, then masks
    labels: Tensor  # [B, A, K - 1], the tokens that really follow
    exists: Tensor  # [B, A, K - 1] bool; false beyond the end of a sequence


@dataclass(frozen=True)
class Batch:
    """B samples, right-padded: ``tokens`` ``[B, S]``, ``features`` ``[B, S, F]``."""

    samples: Sequence[Sample]
    tokens: Tensor
    features: Tensor

    @property
    def lengths(self) -> Tensor:
        """``[B]``."""
        lengths = [len(sample.tokens) for sample in self.samples]
        return torch.tensor(lengths, device=self.tokens.device)

    @property
    def starts(self) -> Tensor:
        """The place of the first token of each response, ``[B]``."""
        starts = [sample.response_start for sample in self.samples]
        return torch.tensor(starts, device=self.tokens.device)

    def blocks(self, anchors: Tensor, size: int, mask_token_id: int) -> Blocks:
        """Blocks of ``size`` positions, of which ``anchors`` ``[B, A]`` are the first."""
        places = anchors[..., None] + torch.arange(1, size, device=anchors.device)
        tokens = self.tokens[:, None].expand(-1, anchors.shape[1], -1)
        labels = tokens.gather(2, places.clamp(max=self.tokens.shape[1] - 1))
        ids = draft_inputs(self.tokens, anchors, size, mask_token_id)
        return Blocks(ids, labels, places < self.lengths[:, None, None])


def load_batch(
    samples: Sequence[Sample], target: TargetEmbeddingsAndHead, layer_ids: Sequence[int]
) -> Batch:
    """Tokens and hidden states, the latter from disk if they are stored, else recomputed."""
    longest = max(len(sample.tokens) for sample in samples)
    tokens = torch.tensor([[*s.tokens, *[0] * (longest - len(s.tokens))] for s in samples])
    tokens = tokens.to(target.device)
    if not layer_ids:
        return Batch(samples, tokens, tokens.new_zeros(*tokens.shape, 0))
    if samples[0].shard is None:
        assert isinstance(target, Target), "hidden states are neither stored nor can be computed"
        return Batch(samples, tokens, target.hidden_states(tokens, layer_ids))
    parts = [sample.hidden() for sample in samples]
    features = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    return Batch(samples, tokens, features.to(target.device))


# --- its config.json ------------------------------------------------------------------------------


def own_mask(path: Path) -> int | None:
    """The mask of a model that fills in masks and is an autoregressive one, too; else None."""
    config = json.loads((path / "config.json").read_text())
    served = FAMILIES.get((config.get("architectures") or [""])[0])
    is_both = served is not None and served.autoregressive is not None
    return int(config["mask_token_id"]) if is_both else None


def read_config(path: Path) -> PreTrainedConfig:
    """The language model's part. Raises CommandError: no config.json, or a diffusion model's."""
    if not path.is_dir():
        reason = missing_folder(str(path)) or (
            "there is no such folder; allowed: the folder of a checkpoint. "
            "`hf download ORG/NAME --local-dir FOLDER` fetches one."
        )
        raise CommandError(f"--target {path}: {reason}")
    try:
        fields, _ = PreTrainedConfig.get_config_dict(path)
        if diffusion := FAMILIES.keys() & set(fields.get("architectures") or ()):
            raise CommandError(
                f"--target {path} is a diffusion model ({min(diffusion)}), whose canvases are "
                "drafts already; allowed: an autoregressive model."
            )
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, AttributeError, TypeError) as error:  # the last two: of a dtype
        raise CommandError(f"{path}: no readable config.json ({error}).") from None
    text: PreTrainedConfig = config.get_text_config()
    text.dtype = text.dtype or config.dtype
    return text


def rope_of(config: PreTrainedConfig) -> dict[str, object]:
    """Of layers with full attention, at least ``rope_type`` and ``rope_theta``."""
    without = {"rope_type": "default", "rope_theta": 10000.0}
    found: Any = getattr(config, "rope_parameters", None) or without
    return dict(found.get("full_attention", found))


def target_facts(config: PreTrainedConfig) -> TargetFacts:
    """Raises CommandError: it is no language model's."""
    is_interleaved = getattr(config, "rope_interleave", False)
    try:
        sizes = config.hidden_size, config.num_hidden_layers, config.vocab_size
    except AttributeError as error:
        raise CommandError(
            f"the target's config.json: {error}; allowed: a causal language model."
        ) from None
    return TargetFacts(*sizes, not is_interleaved)

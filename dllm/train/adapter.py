"""What ``dllm train drafter`` trains with ``[adapter]``: a LoRA with which its target drafts.

    context   tokens [B, S] -> the target -> keys and values of every layer
    drafts    [B, A, K]: A blocks of [last token, masks or noise] -> the target with the LoRA

The blocks are those that ``dllm.drafter.self_drafter`` drafts: a model that fills in masks reads
them in both directions, and gives each token at its own place; an autoregressive one reads noise
causally, without the LoRA at the last token, and gives the tokens behind.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dllm.drafter.checkpoint import LayerAttention
from dllm.drafter.samples import Sample
from dllm.models.nemotron.shapes import released_name
from dllm.settings.command import CommandError
from dllm.train.acceptance import ANCHORS_AT_ONCE, Acceptance, total
from dllm.train.export import write_json, write_weights
from dllm.train.network import losses, visible_keys
from dllm.train.optimizer import autocast
from dllm.train.settings import AdapterShape, DrafterTraining
from dllm.train.target import Batch, Blocks, Target

FILE = "adapter_model.safetensors"


class LowRank(nn.Module):
    """A and B of each layer, in the order of the layers. B begins as 0, which changes nothing."""

    def __init__(self, layers: Sequence[nn.Linear], rank: int, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        sizes = [(layer.in_features, layer.out_features) for layer in layers]
        drawn = [torch.randn(rank, size, generator=draw) * size**-0.5 for size, _ in sizes]
        self.down = nn.ParameterList(drawn)
        self.up = nn.ParameterList(torch.zeros(size, rank) for _, size in sizes)


class AdapterLearner:
    """As ``learner.DraftLearner``, of a target that drafts for itself."""

    evaluates_start = True  # what the target drafts without

    def __init__(
        self,
        settings: DrafterTraining,
        target: Target,
        mask: int | None,
        samples: Sequence[Sample],
        heldout: Sequence[Sample],
    ) -> None:
        """Raises CommandError: the target has no layers of these names.

        ``mask``: the token at places to draft; None: noise stands there.
        """
        assert settings.adapter is not None, "another kind of drafter"
        self.settings, self.shape, self.target = settings, settings.adapter, target
        self.mask = mask
        self.samples, self.heldout = samples, heldout
        self.acceptance: dict[str, Acceptance] = {}
        target.model.float()
        self.layers = layers_of(target.model, self.shape)
        linear = list(self.layers.values())
        self.model = LowRank(linear, self.shape.rank, settings.seed).to(target.device)
        self.num_drafts = self.shape.num_drafts
        self.weights = torch.exp(-torch.arange(self.num_drafts) / self.gamma).to(target.device)
        # Of the pass that runs: the LoRA, and which rows have it, [K].
        self._drafting: tuple[LowRank, Tensor] | None = None
        for place, layer in enumerate(linear):
            layer.register_forward_hook(self._hook(place))

    @property
    def gamma(self) -> float:
        """In the loss, draft k weighs exp(-(k - 1) / gamma)."""
        return self.settings.gamma or self.num_drafts / 2

    def _hook(self, place: int) -> Any:
        def change(_layer: nn.Module, given: tuple[Tensor], output: Tensor) -> Tensor:
            if self._drafting is None:
                return output
            lora, has = self._drafting
            change = F.linear(F.linear(given[0], lora.down[place]), lora.up[place])
            rows = has.repeat(output.shape[1] // len(has))[:, None]
            return output + rows * change.to(output.dtype)

        return change

    def drafted(self, lora: LowRank, batch: Batch, blocks: Blocks, anchors: Tensor) -> Tensor:
        """``[B, A, N, H]``: hidden states that give the drafts of ``blocks``, ``[B, A, N + 1]``."""
        decoder, ids = self.target.model.get_decoder(), blocks.ids
        is_canvas = self.mask is not None
        if not is_canvas:
            ids = ids[..., :-1]
        size, has = ids.shape[-1], torch.ones(ids.shape[-1], device=ids.device)
        has[0] = is_canvas
        with torch.no_grad():
            context = decoder(input_ids=batch.tokens, use_cache=True).past_key_values
        seen = visible_keys(
            LayerAttention(is_causal=not is_canvas), anchors, batch.tokens.shape[1], size
        )
        dtype = self.target.embedding.dtype
        hidden = torch.zeros(seen.shape, dtype=dtype, device=ids.device)
        hidden.masked_fill_(~seen, torch.finfo(dtype).min)
        places = anchors[..., None] + torch.arange(size, device=ids.device)
        self._drafting = lora, has
        try:
            found = decoder(
                input_ids=ids.flatten(1),
                position_ids=places.flatten(1),
                past_key_values=context,
                attention_mask=hidden,
                use_cache=True,
            ).last_hidden_state
        finally:
            self._drafting = None
        return found.unflatten(1, (-1, size))[:, :, is_canvas:]

    def loss(self, step: int) -> Tensor:
        """Mean cross-entropy of the drafts behind random anchors, weighted by their position."""
        seed = self.settings.seed
        chosen = random.Random(f"{seed} {step}").choices(self.samples, k=self.settings.batch_size)
        batch, noise = self._batch(chosen), torch.Generator().manual_seed(seed * 1_000_003 + step)
        drawn = torch.rand(len(chosen), self.settings.anchors, generator=noise)
        count = torch.tensor([sample.num_anchors for sample in chosen])
        anchors = batch.starts[:, None] + (drawn * count[:, None]).long().to(batch.tokens.device)
        blocks = self._blocks(batch, anchors, noise)
        there = blocks.exists
        if self.mask is None:
            there[..., 0] = False  # the target's own token
        with autocast(self.target.device):
            hidden = self.drafted(self.model, batch, blocks, anchors)[there]
            each = losses(hidden, self.target.head.to(hidden.dtype), blocks.labels[there])
        weights = self.weights.expand(there.shape)[there]
        return (each * weights).sum() / weights.sum()

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        longest = max(len(sample.tokens) for sample in samples)
        rows = [[*s.tokens, *[0] * (longest - len(s.tokens))] for s in samples]
        tokens = torch.tensor(rows, device=self.target.device)
        return Batch(samples, tokens, tokens.new_zeros(*tokens.shape, 0))

    def _blocks(self, batch: Batch, anchors: Tensor, noise: torch.Generator) -> Blocks:
        blocks = batch.blocks(anchors, self.num_drafts + 1, self.mask or 0)
        if self.mask is None:
            end = self.shape.uno_mask_token_id or len(self.target.embedding)
            drawn = torch.randint(1, end, blocks.labels.shape, generator=noise)
            blocks.ids[..., 1:] = drawn.to(blocks.ids.device)
        return blocks

    @torch.no_grad()
    def evaluate(self, average: LowRank) -> dict[str, float]:
        found: dict[str, Acceptance] = defaultdict(Acceptance)
        noise = torch.Generator().manual_seed(self.settings.seed)
        for sample in self.heldout:
            batch, agreeing = self._batch([sample]), []
            first = sample.response_start
            every = torch.arange(first, first + sample.num_anchors, device=batch.tokens.device)
            for anchors in every[None].split(ANCHORS_AT_ONCE, 1):
                blocks = self._blocks(batch, anchors, noise)
                with autocast(self.target.device):
                    hidden = self.drafted(average, batch, blocks, anchors)
                    likeliest = F.linear(hidden, self.target.head.to(hidden.dtype)).argmax(-1)
                agrees = (likeliest == blocks.labels) & blocks.exists
                agreeing += agrees[0].int().cumprod(-1).sum(-1).tolist()
            found[sample.group].add(agreeing, self.num_drafts)
        self.acceptance = dict(found)
        everything = total(self.acceptance)
        groups = sorted(self.acceptance.items())
        return {
            "length": round(everything.length, 3),
            **{f"length_{name}": round(one.length, 3) for name, one in groups},
        }

    def summary(self) -> str:
        return f"held-out tokens a step {total(self.acceptance).length:.2f}"

    def card(self) -> list[str]:
        """How its model card begins."""
        rows = "masks" if self.mask is not None else "noise"
        kinds = ", ".join(self.shape.target_modules)
        return [
            f"# An adapter for drafts, of {self._num_params / 1e3:.1f}k parameters\n",
            f"A LoRA of rank {self.shape.rank} in PEFT's format, in bf16, on the layers {kinds}: "
            f"with it one target drafts its own next {self.num_drafts} tokens in one pass over "
            f"{rows}, which its own weights verify (docs/drafter.md). It changes the target's "
            "speed and nothing that it says. No request can ask for it.\n",
        ]

    @property
    def _num_params(self) -> int:
        return sum(param.numel() for param in self.model.parameters())

    def describe(self) -> str:
        return f"adapter: {self._num_params / 1e3:.1f}k parameters of {len(self.layers)} layers"

    def write(self, average: LowRank, path: Path) -> None:
        """As PEFT writes an adapter, in bf16."""
        path.mkdir(parents=True, exist_ok=True)
        tensors = {}
        pairs = zip(self.layers, average.down, average.up, strict=True)
        for name, down, up in pairs:
            stem = name if self.mask is None else released_name(name)
            for part, matrix in (("A", down), ("B", up)):
                tensors[f"base_model.model.{stem}.lora_{part}.weight"] = matrix.detach()
        write_weights(path / FILE, tensors)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.shape.rank,
            "lora_alpha": self.shape.rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(self.shape.target_modules),
            "inference_mode": True,
        }
        write_json(path / "adapter_config.json", config)

    def state(self) -> dict[str, Any]:
        return {"acceptance": {name: vars(one) for name, one in self.acceptance.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.acceptance = {name: Acceptance(**one) for name, one in state["acceptance"].items()}


def layers_of(model: nn.Module, shape: AdapterShape) -> dict[str, nn.Linear]:
    """Raises CommandError: the model has no layers of these names."""
    found = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in shape.target_modules
    }
    missing = set(shape.target_modules) - {name.rpartition(".")[2] for name in found}
    if missing:
        raise CommandError(
            f"adapter.target_modules = {', '.join(sorted(missing))}: the target has no linear "
            "layers of this name."
        )
    return found

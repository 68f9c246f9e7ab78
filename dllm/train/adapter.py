"""What ``dllm train drafter`` trains with ``[adapter]``: a LoRA with which its target drafts.

    context   tokens [B, S] -> the target -> keys and values of every layer
    drafts    [B, A, K]: A blocks of [last token, masks or noise] -> the target with the LoRA

The blocks are those that ``dllm.drafter.self_drafter`` drafts: a model that fills in masks reads
them in both directions, and gives each token at its own place; an autoregressive one reads noise
causally, without the LoRA at the last token, and gives the tokens behind.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dllm.drafter.checkpoint import LayerAttention
from dllm.drafter.samples import Sample
from dllm.models.nemotron.shapes import released_name
from dllm.settings.command import CommandError
from dllm.train.acceptance import ANCHORS_AT_ONCE, Acceptance
from dllm.train.export import write_json, write_weights
from dllm.train.network import losses, visible_keys
from dllm.train.optimizer import autocast
from dllm.train.run import Learner
from dllm.train.settings import AdapterShape, DrafterTraining
from dllm.train.target import Batch, Blocks, Target, load_batch

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


class AdapterLearner(Learner):
    """As ``DraftLearner``, of a target that drafts for itself."""

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
        self.mask, self.is_canvas = mask, mask is not None
        self.samples, self.heldout = samples, heldout
        target.model.float()
        self.layers = layers_of(target.model, self.shape)
        linear = list(self.layers.values())
        self.model = LowRank(linear, self.shape.rank, settings.seed).to(target.device)
        self.num_drafts = self.shape.num_drafts
        num_params = sum(param.numel() for param in self.model.parameters())
        self._size = f"{num_params / 1e3:.1f}k parameters"
        # Of the pass that runs: the LoRA, and which rows have it, [K].
        self._drafting: tuple[LowRank, Tensor] | None = None
        for place, layer in enumerate(linear):
            layer.register_forward_hook(self._hook(place))

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
        decoder, is_canvas = self.target.model.get_decoder(), self.is_canvas
        ids = blocks.ids if is_canvas else blocks.ids[..., :-1]
        size, has = ids.shape[-1], torch.ones(ids.shape[-1], device=ids.device)
        has[0] = is_canvas
        with torch.no_grad():
            context = decoder(input_ids=batch.tokens, use_cache=True).past_key_values
        seen = visible_keys(
            LayerAttention(is_causal=not is_canvas), anchors, batch.tokens.shape[1], size
        )
        hidden = torch.zeros(seen.shape, device=ids.device)
        hidden.masked_fill_(~seen, torch.finfo(hidden.dtype).min)
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
        chosen, noise = self._draw_samples(step)
        batch = load_batch(chosen, self.target, ())
        anchors = self._draw_anchors(batch, noise)
        blocks = self._blocks(batch, anchors, noise)
        there = blocks.exists
        there[..., : not self.is_canvas] = False  # the target's own token
        with autocast(self.target.device):
            hidden = self.drafted(self.model, batch, blocks, anchors)[there]
            each = losses(hidden, self.target.head.to(hidden.dtype), blocks.labels[there])
        return self._weighted(each, there)

    def _blocks(self, batch: Batch, anchors: Tensor, noise: torch.Generator) -> Blocks:
        blocks = batch.blocks(anchors, self.num_drafts + 1, self.mask or 0)
        if not self.is_canvas:
            end = self.shape.uno_mask_token_id or len(self.target.embedding)
            drawn = torch.randint(1, end, blocks.labels.shape, generator=noise)
            blocks.ids[..., 1:] = drawn.to(blocks.ids.device)
        return blocks

    @torch.no_grad()
    def evaluate(self, average: LowRank) -> dict[str, float]:
        found: dict[str, Acceptance] = defaultdict(Acceptance)
        noise = torch.Generator().manual_seed(self.settings.seed)
        for sample in self.heldout:
            batch, agreeing = load_batch([sample], self.target, ()), []
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
        return self._columns()

    def card(self) -> list[str]:
        """How its model card begins."""
        rows = "masks" if self.is_canvas else "noise"
        kinds = ", ".join(self.shape.target_modules)
        return [
            f"# An adapter for drafts, of {self._size}\n",
            f"A LoRA of rank {self.shape.rank} in PEFT's format, in bf16, on the layers {kinds}: "
            f"with it one target drafts its own next {self.num_drafts} tokens in one pass over "
            f"{rows}, which its own weights verify (docs/draft-adapters.md). It changes the "
            "target's speed and nothing that it says. No request can ask for it.\n",
        ]

    def describe(self) -> str:
        return f"adapter: {self._size} of {len(self.layers)} layers"

    def write(self, average: LowRank, path: Path) -> None:
        """As PEFT writes an adapter, in bf16."""
        path.mkdir(parents=True, exist_ok=True)
        tensors = {}
        pairs = zip(self.layers, average.down, average.up, strict=True)
        for name, down, up in pairs:
            stem = released_name(name) if self.is_canvas else name
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

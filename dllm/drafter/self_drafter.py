"""A model that drafts for itself: linear self-speculation.

The model reads text causally, and fills in masks on a canvas. So it drafts with one pass over
[last token, MASK x N] in which all see each other, and the next causal pass verifies the drafts.
The text is that of the model token by token (``verification``).

The causal pass that verifies them writes the slots of the canvas's keys and values again before it
reads them. Source: linear speculation of Nemotron-Labs-Diffusion.

An autoregressive model does so with an adapter of its drafting rows (``adapter``): they are [last
token, noise x (N - 1)], read causally, and each predicts the token behind it. The first row has no
adapter, so the first draft is the model's own token. Source: UNO (sgl-project/sglang #37667).
"""

from contextlib import nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from dllm.drafter.adapter import DraftAdapter, adapter_of
from dllm.drafter.speculator import Drafter
from dllm.drafter.steering import DraftPass
from dllm.drafter.step import TargetStep
from dllm.settings.server import options_of


class SelfDrafter(Drafter):
    """Drafts with the target's own layers and KV cache: it has no network and no context."""

    _speculator_name = "dllm self-speculation"
    _has_own_cache = False
    _adapter: DraftAdapter | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.requires_non_causal = True
        self._mask_token_id: int | None = self.parallel_drafting_token_id
        # [max_num_tokens] bool: rows of a draft pass that have the adapter.
        self._drafts = torch.ones(self.max_num_tokens, dtype=torch.bool, device=device)

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """Raises ValueError for an adapter that does not fit the target."""
        self._target_layers = target_attn_layer_names
        self._adapter = adapter_of(self.vllm_config, target_model, self._drafts)
        return OwnNetwork(target_model, self._mask_token_id)

    def _run_model(self, num_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        adapter = self._adapter
        with adapter.drafting(num_tokens) if adapter is not None else nullcontext():
            hidden: torch.Tensor = super()._run_model(num_tokens, *args, **kwargs)
        return hidden

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        self.draft_attn_layer_names = self._target_layers
        super().set_attn(*args, **kwargs)
        # Metadata is built outside of CUDA graphs: slots are changed there.
        self.supports_decode_metadata_update = False

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """No slot beyond the model's length: vLLM's are those of the last page, context here."""
        num_reqs = kwargs["num_reqs"]
        num_tokens = num_reqs * self.num_query_per_req
        positions = self.input_buffers.positions[:num_tokens].view(num_reqs, -1)
        offsets = torch.arange(self.num_query_per_req, device=positions.device)
        is_behind = (positions[:, :1] + offsets >= self.max_model_len).view(-1)
        for group in self.draft_kv_cache_group_ids:
            slots = self.block_tables.slot_mappings[group, :num_tokens]
            slots.masked_fill_(is_behind, PAD_SLOT_ID)
        return super()._build_uniform_attn_metadata(*args, **kwargs)

    def keep_context(self, step: TargetStep, draft: DraftPass) -> None:
        """Nothing: the context is the target's own."""

    def _store_context(self) -> None:
        """Nothing: the context is the target's own."""


class NoiseDrafter(SelfDrafter):
    """UNO: rows of noise behind the last token, each of which predicts the token behind it."""

    _speculator_name = "dllm self-speculation with noise"

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.requires_non_causal = False
        self.sample_from_anchor = True
        self.num_query_per_req = self.num_speculative_steps
        self._mask_token_id = None
        # All rows of a block but the first.
        self._drafts = torch.arange(len(self._drafts), device=device) % self.num_query_per_req != 0
        options = options_of(vllm_config).drafter
        draw = torch.Generator().manual_seed(options.uno_noise_seed)
        end = options.uno_mask_token_id or self.vocab_size
        size = self.max_model_len + self.num_query_per_req
        # By position, so that it depends on nothing else that is served.
        self._noise = torch.randint(1, end, (size,), generator=draw, dtype=torch.int32).to(device)

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> Any:
        num_tokens = kwargs["num_reqs"] * self.num_query_per_req
        positions = self.input_buffers.positions[:num_tokens]
        ids = self.input_buffers.input_ids[:num_tokens]
        ids.copy_(torch.where(self._drafts[:num_tokens], self._noise[positions], ids))
        return super()._build_uniform_attn_metadata(*args, **kwargs)


class OwnNetwork(torch.nn.Module):
    """The target behind the interface that vLLM's speculator of DFlash asks of a network."""

    def __init__(self, target: torch.nn.Module, mask_token_id: int | None) -> None:
        super().__init__()
        # In a list, so that it is no submodule: its weights are counted once.
        self._target: list[Any] = [target]
        self.mask_token_id = mask_token_id

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of the last layer, ``[tokens, hidden]``."""
        hidden: torch.Tensor = self._target[0](
            input_ids=input_ids, positions=positions, inputs_embeds=inputs_embeds
        )
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]``; -inf for the mask, if there is one."""
        logits: torch.Tensor = self._target[0].compute_logits(hidden_states)
        if self.mask_token_id is not None:
            logits[:, self.mask_token_id].fill_(-torch.inf)
        return logits

    def precompute_and_store_context_kv(
        self, hidden_states: torch.Tensor, positions: torch.Tensor, slots: Any = None
    ) -> None:
        """Nothing: the target has written its keys and values."""

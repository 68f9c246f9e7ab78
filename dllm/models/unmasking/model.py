"""UnmaskingModel: what turns an autoregressive model class of vLLM into one that fills in masks.

It stands in front of that class in a list of bases. The backbone, its layers and its weight names
are vLLM's. Attention differs (causal spans see blocks), and logits are those of canvas rows, in
fp32.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from dllm.attention.layers import see
from dllm.models import quantized, settings_of
from dllm.models.unmasking.settings import UnmaskingSettings
from dllm.models.unmasking.step import Unmasking

if TYPE_CHECKING:
    from dllm.engine.model_state import DiffusionModelState


class UnmaskingModel:
    settings: UnmaskingSettings
    embedding_modules: ClassVar[dict[str, str]] = {}  # no adapter changes embedding or head
    _is_loaded = False

    @staticmethod
    def get_model_state_cls() -> "type[DiffusionModelState]":
        from dllm.engine.model_state import DiffusionModelState

        return DiffusionModelState

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.settings = settings_of(vllm_config)  # type: ignore[assignment]
        for layer in self.modules():  # type: ignore[attr-defined]
            if isinstance(layer, Attention):
                see(layer, block_length=self.settings.block_size)

    def make_algorithm(self, vllm_config: VllmConfig) -> Unmasking:
        return Unmasking(self.settings)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_canvas_row: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[tokens, hidden]``; causal spans and canvases are embedded alike."""
        model: Any = super()
        hidden: torch.Tensor = model.forward(
            input_ids, positions, intermediate_tensors, inputs_embeds
        )
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]`` fp32; -inf for the mask."""
        model: Any = super()
        logits: torch.Tensor = model.compute_logits(hidden_states).float()
        # A mask is never an answer: a position that "becomes" a mask would be no progress.
        logits[:, self.settings.mask_token_id] = -torch.inf
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Raises ValueError if a tensor is not finite, or a quantized layer would compute NaN."""
        quant_config = self.quant_config  # type: ignore[attr-defined]
        weights, plan = quantized.checked_weights(weights, quant_config, not self._is_loaded)
        model: Any = super()
        loaded: set[str] = model.load_weights(weights)
        if not self._is_loaded:  # later a trainer may send any part of the weights
            self._is_loaded = True
            quantized.log_kernels(self, plan)
        return loaded

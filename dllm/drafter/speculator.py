"""Our DFlash drafter: vLLM's speculator of blocks with our network, which can be renewed.

vLLM's DFlash speculator prepares the pass (positions, cache slots, CUDA graphs). This subclass adds
the network, on our attention kernels, and newer weights (``weight_reload``).
"""

from functools import partial
from pathlib import Path

import torch
from vllm.config import VllmConfig

from dllm.drafter.block import DraftBlock
from dllm.drafter.cache import with_own_cache
from dllm.drafter.pair import refuse_other_config
from dllm.drafter.weight_reload import WeightReload
from dllm.settings.server import options_of


class Drafter(DraftBlock):
    _speculator_name = "dllm drafter"
    _has_own_cache = True  # of another dtype and window than the target's

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._weight_reload = None
        newer = options_of(vllm_config).drafter.renew
        if newer is not None:
            initial = Path(self.draft_model_config.model)
            self._weight_reload = WeightReload(
                Path(newer),
                initial,
                self._reload,
                self._refuse,
                partial(refuse_other_config, vllm_config),
            )

    @property
    def attn_vllm_config(self) -> VllmConfig:
        config: VllmConfig = super().attn_vllm_config
        return with_own_cache(config) if self._has_own_cache else config

    def after_step(self) -> None:
        if self._weight_reload is not None:
            self._weight_reload.after_step()

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        model = super().load_draft_model(target_model, target_attn_layer_names)
        if self._weight_reload is not None:
            model.refuse_reload()
        return model

    def _refuse(self, weights: dict[str, torch.Tensor]) -> None:
        self.model.refuse_weights(weights)

    def _reload(self, weights: dict[str, torch.Tensor]) -> None:
        """Use another checkpoint's weights; the context kept so far is stored with the old ones."""
        self._store_context()
        self.model.reload_weights(weights)
        self.steering.is_renewed = True

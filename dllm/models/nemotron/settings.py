"""How Nemotron-Labs-Diffusion fills in masks: values of the checkpoint and of the command line."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic.dataclasses import dataclass

from dllm.models.sdar.settings import SDARSettings
from dllm.settings.options import CHECKED


@dataclass(frozen=True, config=CHECKED)
class NemotronSettings(SDARSettings):
    """SDAR's rule with the model card's threshold, on canvases that start where a prompt ends."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **SDARSettings.defaults,
        "threshold": 0.9,
        "first_token": "mask",
    }

    # How a canvas begins. ``mask``: as masks alone, as in vLLM and SGLang. ``causal``: with the
    # token that the causal pass over the text before it gives, as in Hugging Face's loop; that
    # takes a pass more for each canvas.
    first_token: Literal["mask", "causal"]

    @property
    def block_size(self) -> int:
        """1: no token of a causal span sees a later one."""
        return 1

    @property
    def begins_causally(self) -> bool:
        return self.first_token == "causal"

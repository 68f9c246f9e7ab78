"""How Nemotron-Labs-Diffusion fills in masks: values of the checkpoint and of the command line."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dllm.models.sdar.settings import SDARSettings
from dllm.settings.checks import Choices, refuse_value

FIRST_TOKENS = Choices(("mask", "causal"))


@dataclass(frozen=True)
class NemotronSettings(SDARSettings):
    """SDAR's rule with the model card's threshold, on canvases that start where a prompt ends.

    Attributes:
        first_token: how a canvas begins. ``mask``: as masks alone, as in vLLM and SGLang.
            ``causal``: with the token that the causal pass over the text before it gives, as in
            Hugging Face's loop; that takes a pass more for each canvas.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        **SDARSettings.defaults,
        "threshold": 0.9,
        "first_token": "mask",
    }

    first_token: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first_token not in FIRST_TOKENS:
            refuse_value("generation config: first_token", self.first_token, str(FIRST_TOKENS))

    @property
    def block_size(self) -> int:
        """1: no token of a causal span sees a later one."""
        return 1

    @property
    def begins_causally(self) -> bool:
        """Whether each text needs a pass of its own, in front of its canvas."""
        return self.first_token == "causal"

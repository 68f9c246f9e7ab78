"""How Nemotron-Labs-Diffusion fills in masks: values of the checkpoint and of the command line."""

from collections.abc import Mapping
from typing import Any, ClassVar

from dllm.models.sdar.settings import SDARSettings


class NemotronSettings(SDARSettings):
    """SDAR's rule, on canvases that start wherever a prompt ends.

    The threshold is that of the model card. A canvas starts as masks alone, as in vLLM and SGLang.
    """

    defaults: ClassVar[Mapping[str, Any]] = {**SDARSettings.defaults, "threshold": 0.9}

    @property
    def block_size(self) -> int:
        """1: heads are causal."""
        return 1

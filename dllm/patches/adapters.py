"""A patch for LoRA adapters, with ``--enable-lora`` and a diffusion model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dllm.patches.replace import replaces


@contextmanager
def experts_without_adapters() -> Iterator[None]:
    """While a model is loaded. vLLM would give its experts Triton's kernels, which a CPU lacks.

    Its class is restored: other models of this process need it.
    """
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    owner, name = FusedMoEConfig, "__post_init__"
    kept = vars(owner)[name]

    @replaces(FusedMoEConfig)
    def __post_init__(theirs: Any, self: Any) -> None:
        self.is_lora_enabled = False
        theirs(self)

    try:
        yield
    finally:
        setattr(owner, name, kept)

"""Patches for LoRA adapters, with ``--enable-lora`` and a diffusion model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dllm.patches.replace import replaces


@contextmanager
def adapted_layers() -> Iterator[None]:
    """While a model is loaded: experts keep their kernels, linear layers get adapters.

    vLLM's classes are changed meanwhile, and restored: other models of this process need them.
    """
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.platforms import current_platform
    from vllm.platforms.cpu import CpuPlatform

    replaced = (FusedMoEConfig, "__post_init__"), (CpuPlatform, "get_punica_wrapper")
    kept = [(owner, name, vars(owner)[name]) for owner, name in replaced]

    @replaces(FusedMoEConfig)
    def __post_init__(theirs: Any, self: Any) -> None:
        # Experts take no adapter. vLLM would give them Triton's kernels, which a CPU does not have.
        self.is_lora_enabled = False
        theirs(self)

    if current_platform.is_cpu():

        @replaces(CpuPlatform)
        def get_punica_wrapper(theirs: Any, cls: Any) -> str:
            return "dllm.engine.adapters.PunicaByRuns"

    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)

"""vLLM's CUDA platform without a GPU, as far as a server's configuration goes.

``install`` has to be called before anything else of vLLM is imported, and it cannot be undone: use
it in a process of its own (``cuda_start``). Nothing can be computed afterwards. What vLLM
asks a GPU, its driver or its extensions while it configures a server is answered here; anything
else fails.
"""

import importlib
import os
import sys
from dataclasses import dataclass
from types import ModuleType

import torch


@dataclass(frozen=True)
class Gpu:
    """What vLLM asks about a GPU.

    Attributes:
        capability: compute capability, (major, minor).
        memory: GiB.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    multiprocessors: int


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80, 108),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80, 132),
    "h200": Gpu("NVIDIA H200", (9, 0), 140, 132),
    "b200": Gpu("NVIDIA B200", (10, 0), 178, 148),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 32, 170),
}

# Extensions that the CPU build lacks and that are imported for their side effects alone.
EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
# Functions of these extensions that say from which compute capability on a kernel exists.
FROM_CAPABILITY = {
    "cutlass_scaled_mm_supports_fp8": 89,
    "cutlass_scaled_mm_supports_block_fp8": 90,
    "cutlass_group_gemm_supported": 90,
    "cutlass_scaled_mm_supports_fp4": 100,
    "mxfp4_experts_quant_supported": 100,
}


def install(gpu: Gpu) -> None:
    """Make ``gpu`` the platform of vLLM in this process.

    Raises:
        RuntimeError: vLLM has chosen a platform already.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM then does not look for Triton's driver
    for name in EXTENSIONS:
        sys.modules[name] = ModuleType(name)
    _define_extension_functions()

    from vllm import platforms

    if platforms._current_platform is not None:
        raise RuntimeError(f"vLLM runs on {platforms._current_platform} already")
    platforms.vllm_version_matches_substr = lambda substr: False  # it is no CPU build
    platforms._current_platform = _platform(gpu)
    # Layers make streams and events long before anything runs on them.
    torch.cuda.Stream = torch.cuda.Event = object
    importlib.import_module("vllm._custom_ops")  # looks for kernels that it may describe
    _let_kernels_be_named()


def _define_extension_functions() -> None:
    library = torch.library.Library("_C", "FRAGMENT")
    for name, least in FROM_CAPABILITY.items():
        library.define(f"{name}(int capability) -> bool")
        library.impl(
            name, lambda capability, least=least: capability >= least, "CompositeExplicitAutograd"
        )
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []  # a definition ends with its library


def _let_kernels_be_named() -> None:
    """Let layers look up kernels of the missing extensions, which they do when they are made."""
    find = torch._ops._OpNamespace.__getattr__

    def __getattr__(self: torch._ops._OpNamespace, name: str) -> object:
        try:
            return find(self, name)
        except AttributeError:
            if self.name not in ("_C", "_moe_C") or name.startswith("__"):
                raise
        return _Kernel(f"{self.name}.{name}")

    torch._ops._OpNamespace.__getattr__ = __getattr__


@dataclass(frozen=True)
class _Kernel:
    """A kernel of an extension, which can be looked up and not called."""

    name: str

    def __getattr__(self, overload: str) -> "_Kernel":
        if overload.startswith("__"):
            raise AttributeError(overload)
        return _Kernel(f"{self.name}.{overload}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{self.name} needs a GPU")


def _platform(gpu: Gpu) -> object:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class FakeCuda(CudaPlatformBase):
        @classmethod
        def import_kernels(cls) -> None:
            pass

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*gpu.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return gpu.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return gpu.memory << 30

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return gpu.multiprocessors

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def graph_pool_handle(cls) -> tuple[int, int]:
            return (0, 0)

    return FakeCuda()

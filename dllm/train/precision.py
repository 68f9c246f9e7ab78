"""In which type matrix products of training are computed.

In bf16 where the device multiplies bf16 numbers itself. A CPU that has to convert them first is
several times faster in fp32.
"""

from functools import cache
from pathlib import Path

import torch

CPU_FACTS = Path("/proc/cpuinfo")
# What Linux calls the instructions that multiply bf16 matrices: on x86 (two kinds) and on Arm.
BF16_UNITS = {"amx_bf16", "avx512_bf16", "bf16"}


@cache
def cpu_flags() -> frozenset[str]:
    """The instructions that this CPU has, by Linux's names; empty where nothing says so."""
    text = CPU_FACTS.read_text() if CPU_FACTS.exists() else ""
    lines = (line.partition(":") for line in text.splitlines())
    return frozenset(
        flag for key, _, value in lines if key.strip() in ("flags", "Features")
        for flag in value.split()
    )  # fmt: skip


def product_dtype(device: torch.device) -> torch.dtype:
    """The type of matrix products on a device: bf16, or fp32 on a CPU without bf16 units."""
    is_slow = device.type == "cpu" and not BF16_UNITS & cpu_flags()
    return torch.float32 if is_slow else torch.bfloat16


def autocast(device: torch.device) -> torch.autocast:
    """A context in which matrix products have that type."""
    dtype = product_dtype(device)
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def processor(device: torch.device) -> str:
    """The name of the device, for a model card."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    text = CPU_FACTS.read_text() if CPU_FACTS.exists() else ""
    names = [line.split(":", 1)[1] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else "an unnamed CPU"

"""In which type matrix products of training are computed.

In bf16 where the device multiplies bf16 numbers itself, else in fp32 (``cpu.instructions``).
"""

import torch

from dllm.cpu.instructions import FACTS, computes_bf16


def product_dtype(device: torch.device) -> torch.dtype:
    """The type of matrix products on a device: bf16, or fp32 on a CPU without bf16 units."""
    is_slow = device.type == "cpu" and not computes_bf16()
    return torch.float32 if is_slow else torch.bfloat16


def autocast(device: torch.device) -> torch.autocast:
    """A context in which matrix products have ``product_dtype``; other operations stay in fp32."""
    dtype = product_dtype(device)
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def processor(device: torch.device) -> str:
    """The name of the GPU or CPU, for a record of a run; a CPU's is Linux's /proc/cpuinfo's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    text = FACTS.read_text() if FACTS.exists() else ""
    names = [line.split(":", 1)[1] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else "an unnamed CPU"


def device_of(given: str | None) -> str:
    """The device that a command was given, or else the GPU, if there is one."""
    return given or ("cuda" if torch.cuda.is_available() else "cpu")

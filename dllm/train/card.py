"""What every model card says of the run that trained the model."""

import json
import platform
from pathlib import Path

import torch
import transformers

from dllm.train.run import AnyLearner, Run
from dllm.train.settings import RunSettings


def duration(run: Run[AnyLearner]) -> str:
    """How long it took, on what, with which libraries: the rest of a sentence."""
    return (
        f"{run.seconds / 60:.0f} minutes of training on {run.settings.threads} thread(s) of "
        f"{_processor(run.device)}; torch {torch.__version__}, transformers "
        f"{transformers.__version__}."
    )


def settings_block(settings: RunSettings) -> list[str]:
    """All settings, as lines of Markdown."""
    return ["```json", json.dumps(settings.to_mapping(), indent=2), "```"]


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()

"""Writes a finished model as a checkpoint directory that Hugging Face and vLLM load."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from dllm.tasks.tokenizer import CHAT_TEMPLATE, save_tokenizer
from dllm.tasks.tool_tokenizer import TOOL_CHAT_TEMPLATE
from dllm.train.lm.objective import Objective
from dllm.train.run_files import write_json

MAX_POSITIONS = 4096


def export(model: PreTrainedModel, objective: Objective, path: Path) -> None:
    """Write bf16 safetensors, config, generation config, tokenizer and chat template.

    Hugging Face's own ``save_pretrained`` writes the weights, because it knows which of them are
    shared (encoder and decoder of the diffusion model) and are written once.
    """
    path.mkdir(parents=True, exist_ok=True)
    half = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    copy = type(model)(model.config).to(torch.bfloat16)
    copy.load_state_dict(half)
    copy.save_pretrained(path)
    for leftover in path.glob("model.safetensors.index.json"):
        leftover.unlink()
    write_json(path / "config.json", objective.config())
    write_json(path / "generation_config.json", objective.generation_config())
    template = TOOL_CHAT_TEMPLATE if objective.settings.asks_for_tools else CHAT_TEMPLATE
    save_tokenizer(objective.tokenizer, path, MAX_POSITIONS, template)
    (path / "model.safetensors").chmod(0o644)  # safetensors writes it readable by its owner only

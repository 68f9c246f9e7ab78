"""Writes a finished model as a checkpoint directory that Hugging Face and vLLM load."""

from pathlib import Path

from transformers import PreTrainedModel

from dllm.tasks.tokenizer import CHAT_TEMPLATE, save_tokenizer
from dllm.tasks.tool_tokenizer import TOOL_CHAT_TEMPLATE
from dllm.train.lm.objective import WEIGHTS, Objective
from dllm.train.run_files import write_json

MAX_POSITIONS = 4096


def export(model: PreTrainedModel, objective: Objective, path: Path) -> None:
    """Write bf16 safetensors, config, generation config, tokenizer and chat template."""
    path.mkdir(parents=True, exist_ok=True)
    objective.save_weights(model, path)
    write_json(path / "config.json", objective.config())
    write_json(path / "generation_config.json", objective.generation_config())
    template = TOOL_CHAT_TEMPLATE if objective.settings.asks_for_tools else CHAT_TEMPLATE
    save_tokenizer(objective.tokenizer, path, MAX_POSITIONS, template)
    (path / WEIGHTS).chmod(0o644)  # safetensors writes it readable by its owner only

"""Writes a finished model as a checkpoint directory that Hugging Face and vLLM load."""

from pathlib import Path

from transformers import PreTrainedModel

from dllm.tasks.tokenizer import save_tokenizer, train_tokenizer
from dllm.train.lm.objective import WEIGHTS, Objective
from dllm.train.run_files import write_json

MAX_POSITIONS = 4096


def export(model: PreTrainedModel, objective: Objective, path: Path) -> None:
    """Write bf16 safetensors, config, generation config, tokenizer and chat template."""
    path.mkdir(parents=True, exist_ok=True)
    objective.save_weights(model, path)
    write_json(path / "config.json", objective.config())
    write_json(path / "generation_config.json", objective.generation_config())
    save_tokenizer(train_tokenizer(), path, model_max_length=MAX_POSITIONS)
    (path / WEIGHTS).chmod(0o644)  # safetensors writes it readable by its owner only

"""What a denoise step costs behind a long prompt, in a model whose forward pass matters.

``bench.profile_step --random-60m`` measures it.
"""

from pathlib import Path

from bench.context import Rows
from bench.serve import BUILTIN, OURS
from bench.tables import grouped, markdown, section, spread_of
from dllm.models.gemma.tiny import tiny_config, write_checkpoint


def write_random_60m(path: Path) -> Path:
    """A checkpoint of DiffusionGemma's shape with 60 million random parameters; its folder."""
    sizes = {
        "vocab_size": 32_768,
        "hidden_size": 384,
        "intermediate_size": 768,
        "layer_types": ([*["sliding_attention"] * 3, "full_attention"]) * 2,
        "num_attention_heads": 6,
        "head_dim": 64,
        "global_head_dim": 128,
        "sliding_window": 512,
        "canvas_length": 256,
        "max_position_embeddings": 65_536,
        "num_experts": 8,
        "moe_intermediate_size": 512,
    }
    return write_checkpoint(path, tiny_config(**sizes))


def context(path: Path) -> str:
    """What a pass takes behind prompts of different lengths: a line for each length."""

    def table(rows: Rows) -> str:
        lines = []
        for (length,), here in grouped(rows, "input_len").items():
            ours, other = (of_server(here, name) for name in (OURS, BUILTIN))
            pairs = [theirs / own for own, theirs in zip(ours, other, strict=True)]
            lines.append([length, spread_of(ours, 0), spread_of(other, 0), spread_of(pairs, 2)])
        heads = ["ours, ms a denoise step", "built-in, ms a denoise step", "built-in / ours"]
        return markdown(["tokens of the prompt", *heads], lines)

    def of_server(rows: Rows, name: str) -> list[float]:
        starts = grouped([row for row in rows if row["server"] == name], "start")
        return [float(here[0]["step_ms"]) for here in starts.values()]

    return section(path, "python -m bench.profile_step --random-60m", table)

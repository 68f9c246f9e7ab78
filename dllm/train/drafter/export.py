"""Reads and writes drafters in z-lab's format; writes the model card of a calibration."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dllm.drafter.checkpoint import DrafterConfig
from dllm.settings.command import CommandError
from dllm.train.documents import duration, settings_block
from dllm.train.drafter.acceptance import Acceptance, possible, total
from dllm.train.drafter.learner import DraftLearner
from dllm.train.drafter.network import DraftNetwork
from dllm.train.run import Run
from dllm.train.run_files import CARD, write_json

WEIGHTS = "model.safetensors"


def write_checkpoint(path: Path, config: Mapping[str, object], weights: dict[str, Tensor]) -> None:
    """Write config.json and bf16 safetensors, which vLLM's own drafter and ours load."""
    path.mkdir(parents=True, exist_ok=True)
    half = {name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in weights.items()}
    save_file(half, path / WEIGHTS, metadata={"format": "pt"})
    (path / WEIGHTS).chmod(0o644)  # safetensors writes it readable by its owner only
    write_json(path / "config.json", config)


def read_checkpoint(path: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """config.json and fp32 weights of a drafter in z-lab's format.

    Raises:
        CommandError: there is none, or our training network cannot represent it.
    """
    try:
        config = json.loads((path / "config.json").read_text())
        weights = load_file(path / WEIGHTS)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{path}: no drafter with config.json and {WEIGHTS} ({error})."
        ) from None
    unknown = [name for name in ("d2t", "lm_head.weight", "embed_tokens.weight") if name in weights]
    if "speculators_model_type" in config or unknown or "quantization_config" in config:
        raise CommandError(
            f"{path} is in the speculators format, quantized, or has a vocabulary of its own "
            f"({', '.join(unknown) or 'config.json'}); allowed: z-lab's format with the target's "
            "embedding and head, in bf16 or wider."
        )
    named = {name.removeprefix("model."): tensor.float() for name, tensor in weights.items()}
    return config, named


def build_network(config: DrafterConfig, weights: dict[str, Tensor], path: Path) -> DraftNetwork:
    """The network of a checkpoint.

    Raises:
        CommandError: names or shapes of the weights are not those of its config.json.
    """
    network = DraftNetwork(config)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise CommandError(f"{path}: its tensors contradict config.json: {error}") from None
    return network


def write_model_card(run: Run[DraftLearner], path: Path, command: str, data: str) -> None:
    """Write ``README.md`` beside the weights.

    Args:
        command: the command line that made them.
        data: what they were trained on, in a sentence.
    """
    learner = run.learner
    settings, block = learner.settings, learner.block
    num_params = sum(param.numel() for param in run.average.parameters())
    lines = [
        f"# A drafter of {num_params / 1e6:.2f}M parameters",
        "",
        "A block-diffusion (DFlash) drafter in z-lab's format, in bf16: it proposes the next "
        f"{block - 1} tokens of one target in one pass, from the target's hidden states behind "
        f"layers {', '.join(map(str, learner.config.target_layer_ids))}. Embedding and head are "
        "the target's. It changes the target's speed and nothing that it says.",
        "",
        "## Training",
        "",
        f"- Data: {data}",
        f"- {settings.steps} steps of {settings.batch_size} responses with {settings.anchors} "
        f"draft blocks each, seed {settings.seed}; cross-entropy of the target's own tokens, draft "
        f"k weighted exp(-(k - 1) / {learner.gamma:g}); Muon and AdamW, average "
        "of the weights.",
        f"- Reproduce with `{command}`.",
        f"- {duration(run)}",
        "",
        "## Acceptance on held-out prompts, greedy",
        "",
        *acceptance_table(learner.acceptance, possible(learner.heldout, block - 1)),
        "",
        "Tokens a step: what a server emits per step of the target, its own token included, up to "
        f"the end of the response. *Possible* is a drafter that is always right: at most "
        f"{block}, and less where responses are short. The columns with numbers: share of the "
        "steps that kept so many drafts, of those whose response went on so long.",
        "",
        "## Limits",
        "",
        "Of no use to any other target, and of little on other prompts than those it was "
        "trained on: calibrate again (docs/calibration.md).",
        "",
        *settings_block(settings),
        "",
    ]
    (path / CARD).write_text("\n".join(lines))


def acceptance_table(
    acceptance: Mapping[str, Acceptance], best: Mapping[str, Acceptance]
) -> list[str]:
    """A Markdown table with a line for each group; ``best``: of an always right drafter."""
    everything = total(dict(acceptance))
    width = len(everything.offered)
    header = " | ".join(map(str, range(1, width + 1)))
    lines = [f"| | tokens a step | possible | {header} |", "|---" * (width + 3) + "|"]
    rows = [(name, one, best[name]) for name, one in sorted(acceptance.items())]
    for name, one, limit in [*rows, ("all", everything, total(dict(best)))]:
        cells = [
            f"{100 * rate:.0f} %" if offered else "-"
            for rate, offered in zip(one.by_position, one.offered, strict=True)
        ]
        lengths = f"{one.length:.2f} | {limit.length:.2f}"
        lines.append(f"| {name} | {lengths} | {' | '.join(cells)} |")
    return lines

"""From a finished calibration to a checkpoint in z-lab's format, with its curve and model card."""

import csv
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dllm.settings.command import CommandError
from dllm.train.drafter.acceptance import Acceptance, possible, total
from dllm.train.drafter.loop import Calibration
from dllm.train.drafter.settings import CalibrateSettings

WEIGHTS = "model.safetensors"
CURVE = "curve.svg"


def write_checkpoint(path: Path, config: Mapping[str, object], weights: dict[str, Tensor]) -> None:
    """config.json and bf16 safetensors: what vLLM's own drafter and ours load."""
    path.mkdir(parents=True, exist_ok=True)
    half = {name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in weights.items()}
    save_file(half, path / WEIGHTS, metadata={"format": "pt"})
    (path / WEIGHTS).chmod(0o644)  # safetensors writes it readable by its owner only
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (path / "config.json").write_text(text)


def read_checkpoint(path: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """config.json and fp32 weights of a drafter in z-lab's format.

    Raises:
        CommandError: there is none, or it needs more than our training network has.
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


def draw(log: Path, path: Path) -> None:
    """Loss, acceptance length of each group, and acceptance by position, as an SVG."""
    from matplotlib.figure import Figure

    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    positions = [name for name in rows[0] if name.startswith("position_")]
    known = {"step", "seconds", "loss", "length", *positions}
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.plot(steps[1:], [float(row["loss"]) for row in rows[1:]], color="black")
    left.set(xlabel="optimizer step", ylabel="training loss, nats", yscale="log")
    middle.plot(steps, [float(row["length"]) for row in rows], color="black", label="all")
    for group in [name for name in rows[0] if name not in known]:
        middle.plot(steps, [float(row[group]) for row in rows], label=group, linewidth=1)
    middle.set(xlabel="optimizer step", ylabel="held-out acceptance length, tokens a step")
    middle.legend(fontsize=7, ncols=2)
    for name in positions:
        label = name.removeprefix("position_")
        right.plot(steps, [100 * float(row[name]) for row in rows], label=label, linewidth=1)
    right.set(xlabel="optimizer step", ylabel="held-out drafts kept, %", ylim=(-2, 102))
    right.legend(fontsize=7, title="draft")
    figure.savefig(path, metadata={"Date": None})


def write_model_card(run: Calibration, path: Path, command: str, data: str) -> None:
    """Write ``README.md`` beside the weights.

    Args:
        command: that made them; data: what they were trained on, a sentence.
    """
    num_params = sum(param.numel() for param in run.average.parameters())
    settings, config = run.settings, run.config
    lines = [
        f"# A drafter of {num_params / 1e6:.2f}M parameters",
        "",
        "A block-diffusion (DFlash) drafter in z-lab's format, in bf16: it proposes the next "
        f"{run.block - 1} tokens of one target in one pass, from the target's hidden states behind "
        f"layers {', '.join(map(str, config.target_layer_ids))}. Embedding and head are the "
        "target's. It changes the target's speed and nothing that it says.",
        "",
        "## Training",
        "",
        f"- Data: {data}",
        f"- {settings.steps} steps of {settings.batch_size} responses with {settings.anchors} "
        f"draft blocks each, seed {settings.seed}; cross-entropy of the target's own tokens, draft "
        f"k weighted exp(-(k - 1) / {settings.gamma or run.block / 2:g}); Muon and AdamW, average "
        "of the weights.",
        f"- Reproduce with `{command}`.",
        f"- {run.seconds / 60:.0f} minutes of training on {settings.threads} thread(s) of "
        f"{_processor()}; torch {torch.__version__}, transformers {transformers.__version__}.",
        "",
        "## Acceptance on held-out prompts, greedy",
        "",
        *acceptance_table(run.acceptance, possible(run.heldout, run.block - 1)),
        "",
        "Tokens a step: what a server emits per step of the target, its own token included, up to "
        f"the end of the response. *Possible* is a drafter that is always right: at most "
        f"{run.block}, and less where responses are short. The columns with numbers: share of the "
        "steps that kept so many drafts, of those whose response went on so long.",
        "",
        "## Limits",
        "",
        "Of no use to any other target, and of little on other prompts than those it was "
        "trained on: calibrate again (docs/calibration.md).",
        "",
        "```json",
        json.dumps(settings.to_mapping(), indent=2),
        "```",
        "",
    ]
    (path / "README.md").write_text("\n".join(lines))


def acceptance_table(
    acceptance: Mapping[str, Acceptance], best: Mapping[str, Acceptance]
) -> list[str]:
    """A Markdown table, one line a group; ``best`` is of a drafter that is always right."""
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


def load_settings(path: Path) -> CalibrateSettings:
    """Settings of a TOML file.

    Raises:
        CommandError: the file is wrong.
    """
    try:
        return CalibrateSettings.load(path)
    except ValueError as error:
        raise CommandError(f"--config {path}: {error}") from None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()

"""The model card of a calibrated drafter: data, steps, acceptance, limits."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from dllm.train.acceptance import Acceptance, possible, total
from dllm.train.precision import processor
from dllm.train.run import Run
from dllm.train.run_files import CARD


def write_model_card(run: Run, path: Path, command: str, data: str) -> None:
    """Write ``README.md`` beside the weights.

    Args:
        data: what they were trained on, in a sentence.
    """
    learner, drafter = run.learner, run.learner.drafter
    num_params = sum(param.numel() for param in run.average.parameters())
    sections = [
        f"# A drafter of {num_params / 1e6:.2f}M parameters\n",
        "A block-diffusion (DFlash) drafter in z-lab's format, in bf16: it proposes the next "
        f"{drafter.block - 1} tokens of one target in one pass, from the target's hidden states "
        f"behind layers {', '.join(map(str, drafter.read.target_layer_ids))}. Embedding and head "
        "are the target's. It changes the target's speed and nothing that it says.\n",
        *_training(run, command, data),
        "\n## Acceptance on held-out prompts, greedy\n",
        *acceptance_table(learner.acceptance, possible(learner.heldout, drafter.block - 1)),
        "\nTokens a step: what a server emits per step of the target, its own token included, up "
        "to the end of the response. *Possible* is a drafter that is always right: at most "
        f"{drafter.block}, and less where responses are short. The columns with numbers: share of "
        "the steps that kept so many drafts, of those whose response went on so long.\n",
        "## Limits\n",
        "Of no use to any other target, and of little on other prompts than those it was "
        "trained on: calibrate again (docs/calibration.md).",
    ]
    (path / CARD).write_text("\n".join(sections) + "\n")


def _training(run: Run, command: str, data: str) -> list[str]:
    settings = run.settings
    return [
        "## Training\n",
        f"- Data: {data}",
        f"- {run.step} steps of {settings.batch_size} responses with {settings.anchors} draft "
        f"blocks each, seed {settings.seed}; cross-entropy of the target's own tokens, draft k "
        f"weighted exp(-(k - 1) / {run.learner.gamma:g}); Muon and AdamW, average of the weights.",
        f"- Reproduce with `{command}` and the settings below.",
        f"- {run.seconds / 60:.0f} minutes of training on {settings.threads} thread(s) of "
        f"{processor(run.device)}; torch {torch.__version__}, transformers "
        f"{transformers.__version__}.\n",
        "```json",
        json.dumps(settings.to_mapping(), indent=2),
        "```",
    ]


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

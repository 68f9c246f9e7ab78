"""The model card of a calibrated drafter: data, steps, acceptance, limits."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from dllm.train.acceptance import Acceptance, possible, total
from dllm.train.precision import processor
from dllm.train.run import Run
from dllm.train.run_files import CARD, LOG


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
        "\n## Held-out prompts, greedy\n",
        acceptance_text(learner.acceptance, possible(learner.heldout, drafter.block - 1)),
        "\n## Limits\n",
        "Of no use to any other target, and of little on other prompts than those it was "
        "trained on: train another one (docs/calibration.md).",
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
        f"```json\n{json.dumps(settings.to_mapping())}\n```",
    ]


def acceptance_text(acceptance: Mapping[str, Acceptance], best: Mapping[str, Acceptance]) -> str:
    """Tokens a step of all held-out responses, and of the least and the most of several groups.

    Args:
        best: the same groups, of a drafter that is always right.
    """
    everything, limit = total(dict(acceptance)), total(dict(best))
    text = (
        f"{everything.length:.2f} tokens a step of the target, its own included; "
        f"{limit.length:.2f} with a drafter that is always right. The first draft is kept in "
        f"{100 * everything.by_position[0]:.0f} % of the steps that have one."
    )
    if len(acceptance) == 1:
        return text
    lengths = sorted((one.length, " ".join(name.split())) for name, one in acceptance.items())
    least, most = (f"{name} ({length:.2f})" for length, name in (lengths[0], lengths[-1]))
    return f"{text} By group: from {least} to {most}; `{LOG}` has them all."

"""The model card of a language model: data, steps, seeds, scores, limits."""

import json
from collections.abc import Iterable
from pathlib import Path

from dllm.tasks.suite import GROUPS
from dllm.train.documents import training_section
from dllm.train.lm.learner import LanguageLearner
from dllm.train.lm.settings import TrainSettings
from dllm.train.run import Run
from dllm.train.run_files import CARD, WEIGHTS, weights_digest

SCORES = "scores.json"
ALL = "all"


def write_model_card(
    run: Run[LanguageLearner], path: Path, command: str, start_from: Path | None
) -> None:
    """Write ``README.md`` beside the weights.

    Held-out scores come from ``scores.json`` in the directory of the run, if there is one: an
    object with the output of ``dllm eval`` for every column of the table.

    Args:
        command: the command line of the run.
        start_from: the checkpoint that the run started from; its card says how it was trained.
    """
    settings, out = run.learner.settings, run.out
    assert out is not None, "a run with a model card has a directory"
    last = run.rows[-1]
    asked = [name for group in GROUPS.values() for name in group if name in last]
    is_adapter = settings.lora_rank is not None
    sections = [
        *(_adapter(settings, start_from) if is_adapter else _model(run)),
        *training_section(
            run,
            command,
            f"questions drawn on the fly from the train split of {len(run.learner.errors)} task "
            f"families (seed {settings.seed}); held-out problems are never drawn.",
            f"{settings.batch_size} questions, {'AdamW' if is_adapter else 'Muon and AdamW'}, fp32 "
            "weights, average of the weights.",
        ),
        *(_before(start_from) if start_from and not is_adapter else []),
        "\n## Validation answers correct at the last step\n",
        "| family | correct |",
        "|---|---|",
        *(f"| {name} | {100 * last[name]:.0f} % |" for name in asked),
    ]
    if (out / SCORES).exists():
        sections += ["\n## Held-out answers correct\n"]
        sections += _score_table(out / SCORES, GROUPS[settings.group])
    sections += [
        "\n## Limits\n",
        "One question and one answer; other topics, longer lists and multi-turn conversations were "
        "never shown to it.\n",
    ]
    (path / CARD).write_text("\n".join(sections))


def _model(run: Run[LanguageLearner]) -> list[str]:
    """What a model is, and how to serve one of masked blocks with another block length."""
    settings = run.learner.settings
    num_params = sum(p.numel() for p in run.average.parameters())
    suite = "families" if settings.group == "all" else settings.group
    lines = [
        f"# A language model of {num_params / 1e6:.2f}M parameters\n",
        f"This is {run.learner.description}, in bf16. It "
        f"answers the questions of `dllm/tasks/{suite}.py` and nothing else: it knows no "
        "English beyond them, and exists so that a server can be tested on real answers.\n",
    ]
    served = settings.model.canvas_length
    others = sorted({*settings.block_lengths} - {served})
    if settings.objective in ("sdar", "llada2") and others:
        lines.append(
            f"A block has {served} tokens. It was trained with blocks of "
            f"{', '.join(map(str, others))} as well: "
            f"`vllm serve PATH --hf-overrides '{{\"block_size\": {others[0]}}}'`.\n"
        )
    return lines


def _adapter(settings: TrainSettings, start: Path | None) -> list[str]:
    """What an adapter is, and how to serve it."""
    style = f", with which its answers have the style `{settings.style}`" if settings.style else ""
    return [
        "# An adapter\n",
        f"This is a LoRA adapter of rank {settings.lora_rank} for the checkpoint `{start}`{style}: "
        f"`vllm serve {start} --enable-lora --lora-modules NAME=PATH`, and `model: NAME` in a "
        "request.\n",
    ]


def _before(start: Path) -> list[str]:
    """The checkpoint that the run started from, and the training section of its card."""
    card = (start / CARD).read_text() if (start / CARD).exists() else ""
    training = card.partition("## Training\n")[2].partition("\n## ")[0].strip()
    return [
        "\n### Before that\n",
        f"`{start}` is the checkpoint whose `{WEIGHTS}` has SHA-256 {weights_digest(start)}.\n",
        training or "It has no model card.",
    ]


def _score_table(path: Path, families: Iterable[str]) -> list[str]:
    """A table with a column for each run of ``dllm eval`` in ``scores.json``."""
    runs: dict[str, dict] = json.loads(path.read_text())
    asked = sorted({run[ALL]["num_questions"] for run in runs.values()})
    lines = [
        f"Of {' and '.join(map(str, asked))} questions, as many of each family; with the 95% "
        "interval, and denoise steps per block.\n",
        f"| family | {' | '.join(runs)} |",
        "|---" * (len(runs) + 1) + "|",
    ]
    for family in (*families, ALL):
        found = [run["families"].get(family, run.get(family)) for run in runs.values()]
        lines.append(f"| {family} | {' | '.join(map(_score, found))} |")
    return lines


def _score(result: dict | None) -> str:
    if result is None:
        return "-"
    steps = result.get("denoise_steps_per_block")
    low, high = (100 * end for end in result["interval_95"])
    text = f"{100 * result['accuracy']:.1f} % [{low:.0f} .. {high:.0f}]"
    return text if steps is None else f"{text}, {steps:.1f} steps"

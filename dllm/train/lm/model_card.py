"""The model card of a language model: data, steps, seeds, scores, limits."""

import json
from collections.abc import Iterable
from pathlib import Path

from dllm.tasks.suite import GROUPS
from dllm.train.documents import duration, settings_block
from dllm.train.lm.learner import LanguageLearner
from dllm.train.lm.settings import CONFIGS, TrainSettings
from dllm.train.run import Run
from dllm.train.run_files import CARD, LOG, read_log, started_with

SCORES = "scores.json"
CARD_OF_START = "start.md"  # model card of the checkpoint that the run started from
STARTED_FROM = "started_from"  # in run.json: digest of its weights
ALL = "all"

KINDS = {
    "diffusion": (
        "a block-diffusion language model in DiffusionGemma's format (sliding and full layers, "
        "mixture of experts, self-conditioning, tied embeddings)"
    ),
    "ar": "an autoregressive language model in Qwen3's format",
    "sdar": "a block-diffusion language model in SDAR's format (masked blocks on Qwen3)",
    "llada2": (
        "a block-diffusion language model in LLaDA2's format (masked blocks with editing, mixture "
        "of experts)"
    ),
}


def write_model_card(run: Run[LanguageLearner], path: Path) -> None:
    """Write ``README.md`` beside the weights.

    Held-out scores come from ``scores.json`` in the directory of the run, if there is one: an
    object with the output of ``dllm eval`` for every column of the table. How the initial weights
    were trained comes from ``start.md`` there, their model card.
    """
    settings, out = run.learner.settings, run.out
    assert out is not None, "a run with a model card has a directory"
    num_params = sum(p.numel() for p in run.average.parameters())
    digest = started_with(out).get(STARTED_FROM)
    start = " --start-from START" if digest else ""
    command = f"dllm train {settings.objective} --config {_config(settings)}{start} --out RUN"
    lines = [
        f"# A language model of {num_params / 1e6:.2f}M parameters",
        "",
        f"This is {KINDS[settings.objective]}, in bf16. It "
        f"answers the questions of `{_questions_of(settings)}` and nothing else: it knows no "
        "English beyond them, and exists so that a server can be tested on real answers.",
        "",
        *_blocks(settings),
        "## Training",
        "",
        "- Data: questions drawn on the fly from the train split of "
        f"{len(run.learner.errors)} task families (seed {settings.seed}); held-out problems are "
        "never drawn.",
        f"- {settings.steps} steps of {settings.batch_size} questions, Muon and AdamW, fp32 "
        "weights with bf16 matrix products, average of the weights.",
        f"- Reproduce with `{command}` and the settings below.",
        f"- {duration(run)}",
        "",
        *settings_block(settings),
        *(_start(digest, out / CARD_OF_START) if digest else []),
        "",
        "## Validation answers correct at the last step",
        "",
        *_validation_table(out / LOG),
    ]
    scores = out / SCORES
    if scores.exists():
        lines += [
            "",
            "## Held-out answers correct",
            "",
            *_score_table(scores, GROUPS[settings.group]),
        ]
    lines += [
        "",
        "## Limits",
        "",
        "One question and one answer; other topics, longer lists and multi-turn conversations were "
        "never shown to it.",
        "",
    ]
    (path / CARD).write_text("\n".join(lines))


def _questions_of(settings: TrainSettings) -> str:
    return f"dllm/tasks/{'families' if settings.group == 'all' else settings.group}.py"


def _blocks(settings: TrainSettings) -> list[str]:
    """How to serve a model of masked blocks with another block length than that of its config."""
    served = settings.model.canvas_length
    others = sorted({*settings.block_lengths} - {served})
    if settings.objective not in ("sdar", "llada2") or not others:
        return []
    return [
        f"A block has {served} tokens. It was trained with blocks of "
        f"{', '.join(map(str, others))} as well: "
        f"`vllm serve PATH --hf-overrides '{{\"block_size\": {others[0]}}}'`.",
        "",
    ]


def _config(settings: TrainSettings) -> str:
    """Path of the shipped config with these settings; ``config.toml`` if there is none."""
    paths = sorted(CONFIGS.glob("*.toml"))
    names = (path.name for path in paths if TrainSettings.load(path) == settings)
    return next((f"dllm/train/lm/configs/{name}" for name in names), "config.toml")


def _start(digest: object, card: Path) -> list[str]:
    """The checkpoint that the run started from, and the training section of its card."""
    _, _, training = (card.read_text() if card.exists() else "").partition("## Training\n")
    said = training.partition("\n## ")[0].strip() or "They have no model card."
    start = f"START is the checkpoint whose `model.safetensors` has SHA-256 {digest}."
    return ["", "### Before that", "", start, "", said]


def _validation_table(log: Path) -> list[str]:
    last = read_log(log)[-1]
    names = (name for group in GROUPS.values() for name in group if name in last)
    rows = [f"| {name} | {100 * float(last[name]):.0f} % |" for name in names]
    return ["| family | correct |", "|---|---|", *rows]


def _score_table(path: Path, families: Iterable[str]) -> list[str]:
    """A table with a column for each run of ``dllm eval`` in ``scores.json``."""
    runs: dict[str, dict] = json.loads(path.read_text())
    asked = sorted({run[ALL]["num_questions"] for run in runs.values()})
    header = ["| family |", *(f" {name} |" for name in runs)]
    lines = [
        f"Of {' and '.join(map(str, asked))} questions, as many of each family; with the 95% "
        "interval, and denoise steps per block.",
        "",
        "".join(header),
        "|---" * (len(runs) + 1) + "|",
    ]
    for family in (*families, ALL):
        found = [run["families"].get(family, run.get(family)) for run in runs.values()]
        lines.append(f"| {family} |{''.join(f' {_score(one)} |' for one in found)}")
    return lines


def _score(result: dict | None) -> str:
    if result is None:
        return "-"
    steps = result.get("denoise_steps_per_block")
    low, high = (100 * end for end in result["interval_95"])
    text = f"{100 * result['accuracy']:.1f} % [{low:.0f} .. {high:.0f}]"
    return text if steps is None else f"{text}, {steps:.1f} steps"

"""``dllm train`` for a language model: from a TOML file to a checkpoint directory."""

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from dllm.settings.command import OK, CommandError
from dllm.tasks.suite import GROUPS
from dllm.tasks.tokenizer import CHAT_TEMPLATE, save_tokenizer, train_tokenizer
from dllm.tasks.tool_tokenizer import TOOL_CHAT_TEMPLATE, train_tool_tokenizer
from dllm.train.documents import Panel, draw, require_matplotlib
from dllm.train.lm.autoregressive import Autoregressive
from dllm.train.lm.diffusion import Diffusion
from dllm.train.lm.learner import LanguageLearner, digest_of
from dllm.train.lm.llada2 import LLaDA2
from dllm.train.lm.model_card import CARD_OF_START, STARTED_FROM, write_model_card
from dllm.train.lm.objective import WEIGHTS, Objective
from dllm.train.lm.sdar import SDAR
from dllm.train.lm.settings import CONFIGS, TrainSettings
from dllm.train.progress import train_with_bar
from dllm.train.run import Run
from dllm.train.run_files import (
    CARD,
    MODEL,
    STATE,
    check_run,
    copy_log,
    started_with,
    write_json,
    write_start,
)


class Kind(NamedTuple):
    """A kind of model: its objective, and the config of the shipped one."""

    make: Callable[[TrainSettings, Tokenizer], Objective]
    config: str


KINDS = {
    "diffusion": Kind(Diffusion, "tiny-dllm.toml"),
    "ar": Kind(Autoregressive, "tiny-ar.toml"),
    "sdar": Kind(SDAR, "tiny-sdar.toml"),
    "llada2": Kind(LLaDA2, "tiny-llada2.toml"),
}
MAX_POSITIONS = 4096
ACCURACY = Panel("validation answers correct, %", lambda name: name != "steps_per_block", True)


def main(argv: Sequence[str]) -> int:
    """Train, or go on training, and write the checkpoint to ``OUT/model``.

    Raises:
        CommandError: before the first step, when something is missing or wrong.
    """
    given = parse(argv)
    require_matplotlib()
    with torch.device(given.device):
        run = open_run(load_settings(given), given.out, given.resume, given.start_from)
        train_with_bar(run, given.objective)
        draw(given.out, ACCURACY)
        model = given.out / MODEL
        export(run.average, run.learner.objective, model)
        copy_log(given.out, model)
        write_model_card(run, model)
    print(model)
    return OK


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exits with status 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="dllm train",
        description=__doc__,
        epilog="`dllm train pilot --help`: a policy of draft widths, which is made another way.",
    )
    parser.add_argument("objective", choices=tuple(KINDS), help="the kind of model")
    parser.add_argument("--config", type=Path, help="TOML; default: the one of the shipped model")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument(
        "--start-from", type=Path, help="checkpoint directory with the initial weights"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the run's checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def load_settings(given: argparse.Namespace) -> TrainSettings:
    """The settings of the run.

    Raises:
        CommandError: the config is wrong, or for another kind of model.
    """
    path = given.config or CONFIGS / KINDS[given.objective].config
    settings = TrainSettings.load(path)
    if settings.objective != given.objective:
        raise CommandError(
            f"{path} has objective = {settings.objective!r}, asked for was {given.objective!r}; "
            f"run `dllm train {settings.objective}`, or give another --config."
        )
    return settings


def open_run(
    settings: TrainSettings, out: Path, resume: bool, start_from: Path | None = None
) -> Run[LanguageLearner]:
    """A new run, or the one that the directory holds.

    Raises:
        CommandError: the directory holds a run and ``resume`` was not asked for, or the reverse,
            or the run had other settings or initial weights, or those to start from do not fit.
    """
    before = started_with(out) if resume else {}
    digest = before.get(STARTED_FROM)  # a resumed run need not name its start again
    if start_from is not None:
        for name in ("config.json", "model.safetensors"):
            if not (start_from / name).exists():
                raise CommandError(f"{start_from} holds no {name} to start from.")
        if before and digest != digest_of(start_from):
            raise CommandError(
                f"{out} did not start from the weights of {start_from}; leave out --start-from."
            )
        digest = digest_of(start_from)
    elif digest is not None and not (out / STATE).exists():
        raise CommandError(f"{out} has no checkpoint yet; name its --start-from again.")
    given = settings.to_mapping() | {STARTED_FROM: digest}
    check_run(out, given, resume)
    try:
        learner = LanguageLearner(settings, make_objective(settings), start_from)
    except ValueError as error:
        raise CommandError(str(error)) from None
    write_start(out, given)
    if start_from is not None and (start_from / CARD).exists():
        shutil.copyfile(start_from / CARD, out / CARD_OF_START)
    run = Run(learner, out)
    if resume:
        run.resume()
    return run


def make_objective(settings: TrainSettings) -> Objective:
    """The objective that the settings name."""
    is_tools = settings.group == "tools"
    tokenizer = train_tool_tokenizer() if is_tools else train_tokenizer(GROUPS[settings.group])
    return KINDS[settings.objective].make(settings, tokenizer)


def export(model: PreTrainedModel, objective: Objective, path: Path) -> None:
    """Write bf16 safetensors, config, generation config, tokenizer and chat template."""
    path.mkdir(parents=True, exist_ok=True)
    objective.save_weights(model, path)
    write_json(path / "config.json", objective.config())
    write_json(path / "generation_config.json", objective.generation_config())
    template = TOOL_CHAT_TEMPLATE if objective.settings.group == "tools" else CHAT_TEMPLATE
    save_tokenizer(objective.tokenizer, path, MAX_POSITIONS, template)
    (path / WEIGHTS).chmod(0o644)  # safetensors writes it readable by its owner only

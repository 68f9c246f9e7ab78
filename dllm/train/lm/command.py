"""``dllm train``: a training run from a TOML file to a checkpoint directory."""

import argparse
import importlib
import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dllm.settings.command import OK, CommandError
from dllm.tasks.tokenizer import train_tokenizer
from dllm.train.lm.autoregressive import Autoregressive
from dllm.train.lm.curve import draw
from dllm.train.lm.diffusion import Diffusion
from dllm.train.lm.export import copy_run_files, export
from dllm.train.lm.loop import CHECKPOINT, LOG, Trainer, digest_of
from dllm.train.lm.model_card import CARD, START, write_model_card
from dllm.train.lm.objective import Objective
from dllm.train.lm.settings import CONFIGS, TrainSettings

CURVE = "curve.svg"
MODEL = "model"


def main(argv: Sequence[str]) -> int:
    """Train, or go on training, and write the checkpoint to ``OUT/model``.

    Raises:
        CommandError: before the first step, when something is missing or wrong.
    """
    if argv[:1] == ["pilot"]:
        status: int = importlib.import_module("dllm.train.pilot.command").main(argv[1:])
        return status
    given = parse(argv)
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("the learning curve needs matplotlib: pip install 'dllm[train]'.")
    with torch.device(given.device):
        run(given)
    return OK


def run(given: argparse.Namespace) -> None:
    """From the config to the checkpoint, on torch's default device."""
    settings = load_settings(given)
    trainer = open_run(settings, given.out, given.resume, given.start_from)
    train(trainer)
    draw(given.out / LOG, given.out / CURVE)
    model = given.out / MODEL
    export(trainer.average, trainer.objective, model)
    copy_run_files(given.out, model, (LOG, CURVE))
    write_model_card(trainer, model)
    print(model)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exits with status 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="dllm train",
        description=__doc__,
        epilog="`dllm train pilot --help`: a policy of draft widths, which is made another way.",
    )
    parser.add_argument("objective", choices=("diffusion", "ar"), help="the kind of model")
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
        CommandError: the config is wrong, or for the other kind of model.
    """
    shipped = CONFIGS / {"diffusion": "tiny-dllm.toml", "ar": "tiny-ar.toml"}[given.objective]
    path = given.config or shipped
    try:
        settings = TrainSettings.load(path)
    except ValueError as error:
        raise CommandError(f"{path}: {error}") from None
    if settings.objective != given.objective:
        raise CommandError(
            f"{path} has objective = {settings.objective!r}, asked for was {given.objective!r}; "
            f"run `dllm train {settings.objective}`, or give another --config."
        )
    return settings


def open_run(
    settings: TrainSettings, out: Path, resume: bool, start_from: Path | None = None
) -> Trainer:
    """A new run, or the one that the directory holds.

    Raises:
        CommandError: the directory holds a run and ``resume`` was not asked for, or the reverse,
            or the run had other settings or initial weights, or those to start from do not fit.
    """
    exists = (out / CHECKPOINT).exists()
    if exists and not resume:
        raise CommandError(f"{out} holds a run; go on with --resume, or give another --out.")
    if resume and not exists:
        raise CommandError(f"{out} holds no {CHECKPOINT} to resume; leave out --resume.")
    if start_from is not None:
        for name in ("config.json", "model.safetensors"):
            if not (start_from / name).exists():
                raise CommandError(f"{start_from} holds no {name} to start from.")
    try:
        trainer = Trainer(settings, make_objective(settings), out, None if resume else start_from)
        if resume:
            trainer.resume()
    except ValueError as error:
        raise CommandError(str(error)) from None
    if resume and start_from is not None and digest_of(start_from) != trainer.started_from:
        raise CommandError(
            f"{out} did not start from the weights of {start_from}; leave out --start-from."
        )
    out.mkdir(parents=True, exist_ok=True)
    if start_from is not None and (start_from / CARD).exists():
        shutil.copyfile(start_from / CARD, out / START)
    return trainer


def make_objective(settings: TrainSettings) -> Objective:
    """The objective that the settings name."""
    kinds: dict[str, type[Diffusion] | type[Autoregressive]]
    kinds = {"diffusion": Diffusion, "ar": Autoregressive}
    return kinds[settings.objective](settings, train_tokenizer())


def train(trainer: Trainer) -> None:
    """Run to the last step under a progress bar."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  validation {task.fields[accuracy]}"),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task(
            trainer.settings.objective,
            total=trainer.settings.steps,
            completed=trainer.step,
            loss=trainer.loss,
            accuracy="-",
        )
        for now in trainer.run():
            accuracy = "-" if now.accuracy is None else f"{now.accuracy:.1%}"
            progress.update(bar, completed=now.step, loss=now.loss, accuracy=accuracy)

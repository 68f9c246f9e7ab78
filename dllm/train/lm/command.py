"""``dllm train`` for a language model: from a TOML file to a checkpoint directory."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from dllm.settings.command import OK, CommandError
from dllm.train.documents import Panel, require_matplotlib, write_log_and_curve
from dllm.train.lm.autoregressive import Autoregressive
from dllm.train.lm.diffusion import Diffusion
from dllm.train.lm.learner import LanguageLearner
from dllm.train.lm.llada2 import LLaDA2
from dllm.train.lm.model_card import write_model_card
from dllm.train.lm.nemotron import Nemotron
from dllm.train.lm.sdar import SDAR
from dllm.train.lm.settings import CONFIGS, TrainSettings
from dllm.train.progress import train_shown
from dllm.train.run import Run
from dllm.train.run_files import MODEL, WEIGHTS, begin, weights_digest

# Each kind of model, and the config of the shipped one's first run.
KINDS: dict[str, tuple[type[LanguageLearner], str]] = {
    "diffusion": (Diffusion, "tiny-dllm.toml"),
    "ar": (Autoregressive, "tiny-ar.toml"),
    "sdar": (SDAR, "tiny-sdar.toml"),
    "llada2": (LLaDA2, "tiny-llada2.toml"),
    "nemotron": (Nemotron, "tiny-nemotron.toml"),
}
ACCURACY = Panel("validation answers correct, %", lambda name: name != "steps_per_block", True)


def main(argv: Sequence[str]) -> int:
    """Train, or go on training, and write the checkpoint to ``OUT/model``.

    Raises:
        CommandError: before the first step, when something is missing or wrong.
    """
    given = parse(argv)
    require_matplotlib()
    disable_progress_bar()  # of `save_pretrained`, which is called at every checkpoint
    with torch.device(given.device):
        run = open_run(load_settings(given), given.out, given.resume, given.start_from)
        train_shown(run, given.objective)
        model = given.out / MODEL
        write_log_and_curve(run, model, ACCURACY)
        command = shlex.join(["dllm", "train", *(each for each in argv if each != "--resume")])
        write_model_card(run, model, command, given.start_from)
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
    parser.add_argument(
        "--lora",
        type=int,
        choices=range(1, 65),
        metavar="RANK",
        help="train an adapter of the model of --start-from, in PEFT's format, which vLLM serves",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the run's checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def load_settings(given: argparse.Namespace) -> TrainSettings:
    """The settings of the run.

    Raises:
        CommandError: the config is wrong, or for another kind of model.
    """
    path = given.config or CONFIGS / KINDS[given.objective][1]
    settings = TrainSettings.load(path)
    if settings.objective != given.objective:
        raise CommandError(
            f"{path} has objective = {settings.objective!r}, asked for was {given.objective!r}; "
            f"run `dllm train {settings.objective}`, or give another --config."
        )
    if given.lora is not None:
        settings = replace(settings, lora_rank=given.lora)
    if settings.lora_rank and given.objective == "llada2":
        raise CommandError("--lora: a LLaDA2 is trained under other names than it is served with.")
    return settings


def open_run(
    settings: TrainSettings, out: Path, resume: bool, start_from: Path | None = None
) -> Run[LanguageLearner]:
    """A new run, or the one that the directory holds.

    Raises:
        CommandError: as ``begin``, or the checkpoint to start from does not fit.
    """
    digest = None
    if start_from is not None:
        for name in ("config.json", WEIGHTS):
            if not (start_from / name).exists():
                raise CommandError(f"--start-from {start_from}: there is no {name}.")
        digest = weights_digest(start_from)
    try:
        learner = KINDS[settings.objective][0](settings).begin(start_from)
    except ValueError as error:
        raise CommandError(f"--start-from: {error}") from None
    begin(out, settings.to_mapping() | {"start_from": digest}, resume)
    run = Run(learner, out)
    if resume:
        run.resume()
    return run

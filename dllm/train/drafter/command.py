"""``dllm calibrate``: from a target and prompts to a drafter that vLLM serves beside it."""

import argparse
import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dllm.drafter.checkpoint import DrafterConfig
from dllm.drafter.samples import Sample, read_shards, recorded_acceptance, recorded_layers
from dllm.settings.command import OK, CommandError
from dllm.tools import client
from dllm.train.documents import Panel, draw, require_matplotlib
from dllm.train.drafter import export
from dllm.train.drafter.ends import TargetEnds
from dllm.train.drafter.learner import DraftLearner
from dllm.train.drafter.network import count_params
from dllm.train.drafter.presets import CONTINUED, PRESETS, drafter_config, settings_for
from dllm.train.drafter.prompts import Prompt, default_file, load_prompts
from dllm.train.drafter.responses import (
    HELDOUT,
    TRAIN,
    Collector,
    DiskEstimate,
    from_server,
    from_target,
    hidden_bytes,
    usable,
)
from dllm.train.drafter.settings import CalibrateSettings, block_of
from dllm.train.drafter.target import Target, read_config, read_drafter, target_facts
from dllm.train.progress import progress_bar, train_with_bar
from dllm.train.run import Run
from dllm.train.run_files import MODEL, check_run, copy_log, write_start

CONFIGS = Path(__file__).parent / "configs"
RESPONSES = "responses"
HELDOUT_EVERY = 20  # one of so many recorded samples is held out

# Flags that override a setting of the config or preset: (field, help text).
OVERRIDES = {
    "--num-prompts": ("responses", "prompts to train on, at most (task suite: of each family)"),
    "--heldout": ("heldout", "further prompts to measure on (task suite: of each family)"),
    "--max-tokens": ("max_tokens", "tokens of a response, at most"),
    "--steps": ("steps", "training steps"),
    "--batch-size": ("batch_size", "responses in each step"),
}
OF_RESPONSES = ("responses", "heldout", "max_tokens")  # which a buffer has already

PANELS = (
    Panel("held-out tokens a step", lambda name: name.startswith("length")),
    Panel("held-out drafts kept, %", lambda name: name.startswith("position_"), is_share=True),
)


@dataclass(frozen=True)
class Network:
    """The drafter of a run.

    Attributes:
        config: its config.json, which ``read`` is the parsed form of.
        block: positions of a draft block, the last token included.
        start_from: initial weights by name; None to draw them.
    """

    config: dict[str, object]
    read: DrafterConfig
    block: int
    start_from: dict[str, Tensor] | None


def main(argv: Sequence[str]) -> int:
    """Calibrate, or go on calibrating, and write the checkpoint to ``OUT/model``.

    Raises:
        CommandError: before any work, when something is missing or wrong.
    """
    given = parse(argv)
    require_matplotlib()
    settings = load_settings(given)
    network = load_network(given, settings)
    if given.from_buffer is None:
        given.prompts = given.prompts or default_file(given.target)
        prompts = load_prompts(given.target, given.prompts, settings)
    else:
        prompts = []
        samples, heldout = split_buffer(given.from_buffer, network.read)
    server = None
    if given.from_server is not None:
        server = client.connect(given.from_server, given.model, given.api_key)
    report_disk(given, settings, network.read, prompts)
    started = inputs_of(given, settings, network, prompts)
    check_run(given.out, started, given.resume)
    write_start(given.out, started)
    ends: TargetEnds
    if given.from_buffer is not None:
        ends = TargetEnds.read(given.target, given.device)
    else:
        ends = target = Target(given.target, given.device)
        respond = from_target(target, settings.max_tokens)
        if server is not None:
            respond = from_server(server, given.target, settings.max_tokens)
        folder, layers = given.out / RESPONSES, network.read.target_layer_ids
        torch.set_num_threads(settings.threads)
        with progress_bar("responses", len(prompts)) as bar:
            for done in Collector(folder, target, layers, settings, respond).run(prompts):
                bar.advance(done)
        samples, heldout = usable(folder / TRAIN), usable(folder / HELDOUT)
    learner = DraftLearner(
        settings, network.read, network.block, ends, samples, heldout, network.start_from
    )
    run = Run(learner, given.out)
    if given.resume:
        run.resume()
    train_with_bar(run, "calibrate")
    finish(run, network, given, argv)
    return OK


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exits with status 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="dllm calibrate", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--config", type=Path, help="TOML: settings of the run")
    shape.add_argument("--preset", choices=sorted(PRESETS), help="shape of a common target")
    data = parser.add_mutually_exclusive_group()
    data.add_argument(
        "--prompts",
        type=Path,
        help="text, one a line, or JSONL; default: shipped general prompts (for our small models: "
        "the task suite)",
    )
    data.add_argument("--from-buffer", type=Path, help="recorded traffic (docs/calibration.md)")
    parser.add_argument(
        "--from-server", metavar="URL", help="an OpenAI-compatible server writes the responses"
    )
    parser.add_argument("--model", help="its served model name (the only one, if there is one)")
    client.add_key(parser)
    parser.add_argument("--drafter", type=Path, help="go on from this drafter's weights")
    for flag, (field, text) in OVERRIDES.items():
        parser.add_argument(flag, type=int, dest=field, metavar="N", help=text)
    parser.add_argument(
        "--learning-rate",
        type=float,
        metavar="RATE",
        help="peak rate of Muon (matrix_lr); vector_lr keeps its ratio to it",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    given = parser.parse_args(argv)
    if given.from_buffer and given.from_server:
        parser.error("--from-buffer has its responses; leave out --from-server.")
    if given.drafter and given.preset:
        parser.error("--drafter brings its own shape; leave out --preset.")
    if given.model and not given.from_server:
        parser.error("--model names a model of --from-server.")
    if given.from_buffer and any(getattr(given, field) is not None for field in OF_RESPONSES):
        parser.error("--from-buffer: its responses are there; leave out the flags about them.")
    return given


def load_settings(given: argparse.Namespace) -> CalibrateSettings:
    """From ``--config``, else of ``--preset``, else of a run from a drafter; flags override them.

    Raises:
        CommandError: a setting is out of range.
    """
    if given.config is not None:
        settings = CalibrateSettings.load(given.config)
    else:
        settings = CONTINUED if given.drafter is not None else settings_for(given.preset)
    asked = {field: getattr(given, field) for field, _ in OVERRIDES.values()}
    changes = {field: value for field, value in asked.items() if value is not None}
    if given.learning_rate is not None:
        ratio = settings.vector_lr / settings.matrix_lr
        changes |= {"matrix_lr": given.learning_rate, "vector_lr": given.learning_rate * ratio}
    try:
        return replace(settings, **changes)
    except ValueError as error:
        raise CommandError(str(error)) from None


def load_network(given: argparse.Namespace, settings: CalibrateSettings) -> Network:
    """The drafter that is trained: that of ``--drafter``, or a new one of the settings' shape.

    Raises:
        CommandError: it does not fit the target.
    """
    target_config = read_config(given.target)
    facts = target_facts(target_config)
    weights = None
    if given.drafter is not None:
        config, weights = export.read_checkpoint(given.drafter)
    else:
        shape = settings.drafter
        if given.from_buffer is not None and not shape.target_layer_ids:
            # Several kinds of layers in one buffer are refused by `split_buffer`.
            noted = recorded_layers(given.from_buffer)
            shape = replace(shape, target_layer_ids=noted[0] if noted else ())
        config = drafter_config(shape, target_config, facts, _mask_token_id(given.target))
    read, block = read_drafter(config, facts), block_of(config)
    if weights is not None:
        export.build_network(read, weights, given.drafter)  # refuses weights of another shape
    return Network(config, read, block, weights)


def _mask_token_id(target: Path) -> int | None:
    """The mask token of the target's tokenizer, if it names one."""
    path = target / "tokenizer_config.json"
    named = json.loads(path.read_text()).get("mask_token") if path.exists() else None
    if named is None or not (target / "tokenizer.json").exists():
        return None
    from tokenizers import Tokenizer

    text = named if isinstance(named, str) else named["content"]
    return Tokenizer.from_file(str(target / "tokenizer.json")).token_to_id(text)


def inputs_of(
    given: argparse.Namespace,
    settings: CalibrateSettings,
    network: Network,
    prompts: Sequence[Prompt],
) -> dict[str, object]:
    """What decides the weights of the run, by name; prompts and weights by their digest."""
    asked = repr([prompt.tokens for prompt in prompts]).encode()
    weights = given.drafter and (given.drafter / export.WEIGHTS).read_bytes()
    return settings.to_mapping() | {
        "drafter config": network.config,
        "drafter weights": hashlib.sha256(weights).hexdigest() if weights else None,
        "target": str(given.target.resolve()),
        "prompts": hashlib.sha256(asked).hexdigest(),
        "buffer": str(given.from_buffer),
    }


def report_disk(
    given: argparse.Namespace,
    settings: CalibrateSettings,
    drafter: DrafterConfig,
    prompts: Sequence[Prompt],
) -> None:
    """Print how much of the disk the run may need; raises CommandError if less is free."""
    is_stored = settings.hidden_states == "stored"
    per_token = hidden_bytes(read_config(given.target), drafter) if is_stored else 0
    num_params = count_params(drafter)
    estimate = DiskEstimate.of(prompts, settings, per_token, num_params)
    print(f"disk: {estimate}; {len(prompts)} prompts, {num_params / 1e6:.2f}M parameters")
    estimate.check(given.out, given.resume)


class TooFewSamples(CommandError):
    """A recording is too short to train on."""


def split_buffer(folder: Path, drafter: DrafterConfig) -> tuple[list[Sample], list[Sample]]:
    """Recorded samples: those to train on, and those held out.

    Raises:
        TooFewSamples: there are too few.
        CommandError: their hidden states are of other layers.
    """
    samples = [sample for sample in read_shards(folder) if sample.num_anchors > 0]
    if len(samples) <= HELDOUT_EVERY:
        raise TooFewSamples(
            f"{folder} holds {len(samples)} samples with something to draft; needed: "
            f"more than {HELDOUT_EVERY}. Record for longer."
        )
    wanted = drafter.target_layer_ids
    for layers in recorded_layers(folder):
        if layers != wanted:
            raise CommandError(
                f"--from-buffer {folder} was recorded from layers {list(layers)} of the target; "
                f"the drafter reads {list(wanted)}. Give another buffer, or a config whose "
                "target_layer_ids are those of this one."
            )
    features = samples[0].hidden().shape[-1]
    if features != len(wanted) * drafter.target_hidden_size:
        raise CommandError(
            f"--from-buffer {folder}: hidden states of size {features}; the drafter reads "
            f"{len(wanted)} of size {drafter.target_hidden_size}. It was recorded with "
            "another drafter."
        )
    verified, accepted = recorded_acceptance(folder)
    if verified:
        print(
            f"buffer: {len(samples)} samples; {accepted / verified:.1%} of {verified} verified "
            "drafts were accepted when it was recorded"
        )
    kept = [sample for index, sample in enumerate(samples) if index % HELDOUT_EVERY]
    return kept, samples[::HELDOUT_EVERY]


def finish(
    run: Run[DraftLearner], network: Network, given: argparse.Namespace, argv: Sequence[str]
) -> None:
    """Checkpoint, curve and model card."""
    model = given.out / MODEL
    export.write_checkpoint(model, network.config, run.average.state_dict())
    draw(given.out, *PANELS)
    copy_log(given.out, model)
    counts = f"{len(run.learner.samples)} samples, {len(run.learner.heldout)} more held out"
    target = given.target.name
    if given.from_buffer is not None:
        data = f"live traffic recorded at {target}"
    elif given.prompts is not None:
        data = f"responses of {target} to the prompts of {given.prompts.name}"
    else:
        data = f"greedy responses of {target} to the questions of the task suite"
    shown = client.without_key([each for each in argv if each != "--resume"], given.api_key)
    command = shlex.join(["dllm", "calibrate", *shown])
    export.write_model_card(run, model, command, f"{data}: {counts}.")
    print(model)

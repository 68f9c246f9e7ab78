"""``dllm calibrate``: from a target and prompts to a drafter that vLLM serves beside it."""

import argparse
import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dllm.drafter.checkpoint import DrafterConfig, check_pair
from dllm.drafter.samples import Sample, read_shards, recorded_acceptance
from dllm.settings.command import OK, CommandError
from dllm.settings.drafting import DrafterOptions
from dllm.tools import client
from dllm.train.curve import Panel, draw, require_matplotlib
from dllm.train.drafter import export
from dllm.train.drafter.learner import DraftLearner
from dllm.train.drafter.network import DraftNetwork
from dllm.train.drafter.presets import CONTINUED, PRESETS, drafter_config, settings_for
from dllm.train.drafter.prompts import Prompt, file_prompts, suite_prompts
from dllm.train.drafter.responses import (
    HELDOUT,
    TRAIN,
    Collector,
    DiskEstimate,
    Respond,
    from_server,
    from_target,
    hidden_bytes,
    usable,
)
from dllm.train.drafter.settings import CalibrateSettings
from dllm.train.drafter.target import Target, read_config, target_facts
from dllm.train.progress import progress_bar, train_with_bar
from dllm.train.run import Run
from dllm.train.run_files import MODEL, check_run, copy_log, write_start

CONFIGS = Path(__file__).parent / "configs"
RESPONSES = "responses"
HELDOUT_EVERY = 20  # of a buffer, every so many-th sample is held out


def is_position(column: str) -> bool:
    """Whether a column of the log is the acceptance of one draft position."""
    return column.startswith("position_")


PANELS = (
    Panel("held-out acceptance length, tokens a step", lambda name: not is_position(name)),
    Panel("held-out drafts kept, %", is_position, is_share=True, legend="draft"),
)


@dataclass(frozen=True)
class Network:
    """The drafter of a run: config.json, what it means, and weights to start from."""

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
    prompts = load_prompts(given, settings)
    asked = None if given.from_server is None else client.connect(given.from_server, given.model)
    if given.from_buffer is not None:
        samples, heldout = split_buffer(given.from_buffer, network.read)
    report_disk(given, settings, network.read, prompts)
    started = inputs_of(given, settings, network, prompts)
    check_run(given.out, started, given.resume)
    write_start(given.out, started)
    target = Target(given.target, given.device)
    if given.from_buffer is None:
        respond = from_target(target, settings.max_tokens)
        if asked is not None:
            respond = from_server(asked, given.target, settings.max_tokens)
        collect(given.out / RESPONSES, target, network, settings, respond, prompts)
        samples = usable(given.out / RESPONSES / TRAIN)
        heldout = usable(given.out / RESPONSES / HELDOUT)
    learner = DraftLearner(
        settings, network.read, network.block, target, samples, heldout, network.start_from
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
        "--prompts", type=Path, help="text, one a line, or JSONL; default: the task suite"
    )
    data.add_argument(
        "--from-buffer", type=Path, help="recorded traffic (docs/calibration.md); needs --drafter"
    )
    parser.add_argument(
        "--from-server", metavar="URL", help="an OpenAI-compatible server writes the responses"
    )
    parser.add_argument("--model", help="its served model name (the only one, if there is one)")
    parser.add_argument("--drafter", type=Path, help="go on from this drafter's weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    given = parser.parse_args(argv)
    if given.from_buffer and (given.drafter is None or given.from_server):
        parser.error("--from-buffer goes on from a --drafter, without --from-server.")
    if given.drafter and given.preset:
        parser.error("--drafter brings its own shape; leave out --preset.")
    if given.model and not given.from_server:
        parser.error("--model names a model of --from-server.")
    return given


def load_settings(given: argparse.Namespace) -> CalibrateSettings:
    """Those of the config, the preset, or a run that goes on from a drafter."""
    if given.config is not None:
        return CalibrateSettings.load(given.config)
    return CONTINUED if given.drafter is not None else settings_for(given.preset)


def load_network(given: argparse.Namespace, settings: CalibrateSettings) -> Network:
    """The drafter, found to fit the target.

    Raises:
        CommandError: it does not, with both values.
    """
    target_config = read_config(given.target)
    facts = target_facts(target_config)
    weights = None
    if given.drafter is not None:
        config, weights = export.read_checkpoint(given.drafter)
    else:
        config = drafter_config(
            settings.drafter, target_config, facts, _mask_token_id(given.target)
        )
    try:
        read = DrafterConfig.from_config(config, DrafterOptions(), lambda token: None)
        check_pair(read, facts)
    except ValueError as error:
        raise CommandError(str(error)) from None
    block = int(str(config.get("block_size", settings.drafter.block_size)))
    if weights is not None:
        _check_weights(read, weights, given.drafter)
    return Network(config, read, block, weights)


def _mask_token_id(target: Path) -> int | None:
    """Of the target's tokenizer, if it names one."""
    path = target / "tokenizer_config.json"
    named = json.loads(path.read_text()).get("mask_token") if path.exists() else None
    if named is None or not (target / "tokenizer.json").exists():
        return None
    from tokenizers import Tokenizer

    text = named if isinstance(named, str) else named["content"]
    return Tokenizer.from_file(str(target / "tokenizer.json")).token_to_id(text)


def _check_weights(config: DrafterConfig, weights: dict[str, Tensor], path: Path) -> None:
    expected = {name: tensor.shape for name, tensor in DraftNetwork(config).state_dict().items()}
    for name in sorted(expected.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else "nothing"
        allowed = tuple(expected[name]) if name in expected else "nothing"
        if found != allowed:
            raise CommandError(f"--drafter {path}: {name} is {found}; its config.json: {allowed}.")


def load_prompts(given: argparse.Namespace, settings: CalibrateSettings) -> list[Prompt]:
    """What the target is asked; nothing for a buffer."""
    if given.from_buffer is not None:
        return []
    if given.prompts is not None:
        return file_prompts(given.target, given.prompts, settings)
    return suite_prompts(given.target, settings)


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
    """Print what the run may need of the disk; raises CommandError if it has less."""
    is_stored = settings.hidden_states == "stored"
    per_token = hidden_bytes(read_config(given.target), drafter) if is_stored else 0
    num_params = sum(param.numel() for param in DraftNetwork(drafter).parameters())
    estimate = DiskEstimate.of(prompts, settings, per_token, num_params)
    print(f"disk: {estimate}; {len(prompts)} prompts, {num_params / 1e6:.2f}M parameters")
    estimate.check(given.out, given.resume)


def split_buffer(folder: Path, drafter: DrafterConfig) -> tuple[list[Sample], list[Sample]]:
    """Recorded samples to train on, and those held out.

    Raises:
        CommandError: there are too few, or they are not of these layers.
    """
    samples = [sample for sample in read_shards(folder) if sample.num_anchors > 0]
    if len(samples) <= HELDOUT_EVERY:
        raise CommandError(
            f"--from-buffer {folder} holds {len(samples)} samples with something to draft; needed: "
            f"more than {HELDOUT_EVERY}. Record for longer."
        )
    features, wanted = samples[0].hidden().shape[-1], drafter.target_layer_ids
    if features != len(wanted) * drafter.target_hidden_size:
        raise CommandError(
            f"--from-buffer {folder}: hidden states of size {features}; the drafter reads "
            f"{len(wanted)} of size {drafter.target_hidden_size}. It was recorded with "
            "another drafter."
        )
    verified, accepted = recorded_acceptance(folder)
    if verified:
        print(f"buffer: {len(samples)} samples; {accepted / verified:.1%} of {verified} verified "
              "drafts were accepted when it was recorded")  # fmt: skip
    kept = [sample for index, sample in enumerate(samples) if index % HELDOUT_EVERY]
    return kept, samples[::HELDOUT_EVERY]


def collect(
    folder: Path,
    target: Target,
    network: Network,
    settings: CalibrateSettings,
    respond: Respond,
    prompts: Sequence[Prompt],
) -> None:
    """Responses and hidden states, under a progress bar."""
    torch.set_num_threads(settings.threads)
    collector = Collector(folder, target, network.read.target_layer_ids, settings, respond)
    with progress_bar("responses", len(prompts)) as bar:
        for done in collector.run(prompts):
            bar.advance(done)


def finish(
    run: Run[DraftLearner], network: Network, given: argparse.Namespace, argv: Sequence[str]
) -> None:
    """Checkpoint, curve and model card."""
    model = given.out / MODEL
    export.write_checkpoint(model, network.config, run.average.state_dict())
    draw(given.out, *PANELS)
    copy_log(given.out, model)
    counts = f"{len(run.learner.samples)} samples, {len(run.learner.heldout)} more held out"
    data = f"greedy responses of {given.target.name} to the questions of the task suite: {counts}."
    if given.from_buffer is not None:
        data = f"live traffic recorded at {given.target.name}: {counts}."
    elif given.prompts is not None:
        data = f"responses of {given.target.name} to the prompts of {given.prompts.name}: {counts}."
    command = shlex.join(["dllm", "calibrate", *(a for a in argv if a != "--resume")])
    export.write_model_card(run, model, command, data)
    print(model)

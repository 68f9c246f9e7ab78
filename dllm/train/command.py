"""``dllm train drafter``: from a target and prompts to a drafter that vLLM serves beside it."""

import argparse
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

from dllm.drafter.samples import recorded_layers
from dllm.prompts.files import BUNDLED
from dllm.settings.command import OK, CommandError
from dllm.tools import client
from dllm.train.config import drafter_config
from dllm.train.export import Drafter
from dllm.train.learner import DraftLearner
from dllm.train.model_card import write_model_card
from dllm.train.progress import progress, train_shown
from dllm.train.prompts import Prompt, load_prompts
from dllm.train.recorded import split_buffer
from dllm.train.responses import (
    HELDOUT,
    TRAIN,
    check_disk,
    collect,
    from_server,
    from_target,
    usable,
)
from dllm.train.run import Run
from dllm.train.run_files import LOG, MODEL, begin, weights_digest, write_log
from dllm.train.settings import CONTINUED, NEW, DrafterTraining, bundled_configs
from dllm.train.target import Target, read_config, target_facts
from dllm.train.target_embeddings import TargetEmbeddingsAndHead

RESPONSES = "responses"

# Flags that override a setting of the config: (field, help text).
OVERRIDES = {
    "--num-prompts": ("responses", "prompts to train on, at most"),
    "--heldout": ("heldout", "further prompts to measure on: the first of the file"),
    "--max-tokens": ("max_tokens", "tokens of a response, at most"),
    "--steps": ("steps", "training steps"),
    "--batch-size": ("batch_size", "responses in each step"),
}
OF_RESPONSES = ("responses", "heldout", "max_tokens")  # which a buffer has already


def main(argv: Sequence[str]) -> int:
    """Calibrate, or go on calibrating, and write the checkpoint to ``OUT/model``.

    Raises:
        CommandError: before any work, when something is missing or wrong.
    """
    given = parse(argv)
    settings = load_settings(given)
    target_config = read_config(given.target)
    drafter = load_drafter(given, settings, target_config)
    is_recorded = given.from_buffer is not None
    recorded = split_buffer(given.from_buffer, drafter.read) if is_recorded else None
    prompts = [] if is_recorded else load_prompts(given.target, given.prompts, settings)
    server = None
    if given.from_server is not None:
        server = client.connect(given.from_server, given.model, given.api_key)
    check_disk(given.out, given.resume, prompts, settings, drafter, target_config)
    begin(given.out, inputs_of(given, settings, drafter, prompts), given.resume)
    torch.set_num_threads(settings.threads)
    ends: TargetEmbeddingsAndHead
    if recorded is not None:
        ends, samples = TargetEmbeddingsAndHead.read(given.target, given.device), recorded
    else:
        ends = target = Target(given.target, given.device)
        respond = from_target(target, settings.max_tokens)
        if server is not None:
            respond = from_server(server, given.target, settings.max_tokens)
        folder, layers = given.out / RESPONSES, drafter.read.target_layer_ids
        with progress("responses", len(prompts)) as shown:
            for done in collect(folder, prompts, respond, target, layers, settings):
                shown.advance(done)
        samples = usable(folder / TRAIN), usable(folder / HELDOUT)
    run = Run(DraftLearner(settings, drafter, ends, *samples), given.out)
    if given.resume:
        run.resume()
    train_shown(run)
    finish(run, given, argv)
    return OK


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dllm train drafter", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument(
        "--config",
        type=Path,
        help=f"settings of the run: a TOML file, or a name: {', '.join(bundled_configs())}",
    )
    data = parser.add_mutually_exclusive_group()
    data.add_argument(
        "--prompts",
        type=Path,
        default=BUNDLED,
        help="text, one a line, or JSONL; default: bundled general prompts",
    )
    data.add_argument("--from-buffer", type=Path, help="recorded traffic (docs/calibration.md)")
    parser.add_argument(
        "--from-server", metavar="URL", help="an OpenAI-compatible server writes the responses"
    )
    parser.add_argument("--model", help="its served model name (the only one, if there is one)")
    client.add_key(parser)
    parser.add_argument("--drafter", type=Path, help="go on from this drafter's weights")
    parser.add_argument(
        "--mask-token-id",
        type=id_or_token,
        metavar="ID",
        help="token that stands at positions to draft, or its id; one that no text holds "
        "(default: the tokenizer's mask token)",
    )
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
    if given.drafter and given.mask_token_id is not None:
        parser.error("--drafter brings its own mask token; leave out --mask-token-id.")
    if given.model and not given.from_server:
        parser.error("--model names a model of --from-server.")
    if given.from_buffer and any(getattr(given, field) is not None for field in OF_RESPONSES):
        parser.error("--from-buffer: its responses are there; leave out the flags about them.")
    return given


def load_settings(given: argparse.Namespace) -> DrafterTraining:
    """The settings of ``--config``, or the defaults of a new run or of one from a drafter.

    Flags override them.

    Raises:
        CommandError: a setting is out of range.
    """
    if given.config is not None:
        settings = DrafterTraining.load(given.config)
    elif given.drafter is not None:
        settings = CONTINUED
    else:
        settings = NEW
    asked = {field: getattr(given, field) for field, _ in OVERRIDES.values()}
    changes = {field: value for field, value in asked.items() if value is not None}
    if given.learning_rate is not None:
        ratio = settings.vector_lr / settings.matrix_lr
        changes |= {"matrix_lr": given.learning_rate, "vector_lr": given.learning_rate * ratio}
    try:
        return DrafterTraining.from_mapping(settings.to_mapping() | changes)
    except ValueError as error:
        raise CommandError(str(error)) from None


def load_drafter(
    given: argparse.Namespace, settings: DrafterTraining, target_config: dict[str, object]
) -> Drafter:
    """The drafter that is trained: that of ``--drafter``, or a new one of the settings' shape.

    Raises:
        CommandError: it does not fit the target, or nothing says which token is the mask.
    """
    facts = target_facts(target_config)
    if given.drafter is not None:
        return Drafter.load(given.drafter, facts)
    shape = settings.drafter
    if given.from_buffer is not None and not shape.target_layer_ids:
        # Several kinds of layers in one buffer are refused by `split_buffer`.
        noted = recorded_layers(given.from_buffer)
        shape = replace(shape, target_layer_ids=noted[0] if noted else ())
    asked = shape.mask_token_id if given.mask_token_id is None else given.mask_token_id
    mask = asked if isinstance(asked, int) else _mask_token_id(given.target, asked)
    if mask is None:
        raise CommandError(
            f"the tokenizer of {given.target} has no mask token. Give --mask-token-id: a token "
            "that no text holds, a reserved one for instance, or an id behind the last token, if "
            f"the embedding has more rows than that (it has {facts.vocab_size})."
        )
    shape = replace(shape, mask_token_id=mask)
    return Drafter.of(drafter_config(shape, target_config, facts), facts)


def id_or_token(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _mask_token_id(target: Path, token: str | None) -> int | None:
    """The id of a token of the target's tokenizer; without a token, of its own mask token.

    Raises:
        CommandError: the tokenizer has no such token.
    """
    has_tokenizer = (target / "tokenizer.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(target) if has_tokenizer else None
    if token is None:
        return None if tokenizer is None else tokenizer.mask_token_id
    found: int | None = None if tokenizer is None else tokenizer.get_vocab().get(token)
    if found is None:
        raise CommandError(
            f"mask_token_id = {token!r} is not one token of the tokenizer of {target}; allowed: a "
            "token of its vocabulary, or an id."
        )
    return found


def inputs_of(
    given: argparse.Namespace,
    settings: DrafterTraining,
    drafter: Drafter,
    prompts: Sequence[Prompt],
) -> dict[str, object]:
    """What decides the weights of the run, by name; prompts and weights by their digest."""
    asked = repr([prompt.tokens for prompt in prompts]).encode()
    return settings.to_mapping() | {
        "drafter config": drafter.config,
        "drafter weights": weights_digest(given.drafter) if given.drafter else None,
        "target": str(given.target.resolve()),
        "prompts": hashlib.sha256(asked).hexdigest(),
        "buffer": str(given.from_buffer),
    }


def finish(run: Run, given: argparse.Namespace, argv: Sequence[str]) -> None:
    model = given.out / MODEL
    write_log(model / LOG, run.rows)
    counts = f"{len(run.learner.samples)} samples, {len(run.learner.heldout)} more held out"
    target = given.target.name
    if given.from_buffer is not None:
        data = f"live traffic recorded at {target}"
    else:
        data = f"responses of {target} to the prompts of {given.prompts.name}"
    shown = client.without_key([each for each in argv if each != "--resume"], given.api_key)
    command = shlex.join(["dllm", "train", "drafter", *shown])
    write_model_card(run, model, command, f"{data}: {counts}.")
    print(model)

"""``dllm train drafter``: responses, a run, a checkpoint with its card; ``dllm check-drafter``."""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedConfig

from dllm.drafter.samples import Sample, recorded_layers
from dllm.settings.command import FAILED, OK, CommandError, write_findings
from dllm.tools import client
from dllm.train.acceptance import Acceptance, measure, possible, total
from dllm.train.adapter import AdapterLearner
from dllm.train.export import (
    CARD,
    LOG,
    MODEL,
    Drafter,
    begin,
    drafter_config,
    weights_digest,
    write_log,
)
from dllm.train.optimizer import device_of, processor
from dllm.train.responses import (
    HELDOUT,
    TRAIN,
    Prompt,
    check_disk,
    collect,
    digest_of,
    from_server,
    from_target,
    load_prompts,
    refuse_other_model,
    say_how_long,
    split_buffer,
    usable,
)
from dllm.train.run import DraftLearner, Progress, Run, train_shown
from dllm.train.settings import CONTINUED, NEW, DrafterTraining
from dllm.train.target import (
    Target,
    TargetEmbeddingsAndHead,
    own_mask,
    read_config,
    target_facts,
)

RESPONSES = "responses"


def train(given: argparse.Namespace, argv: Sequence[str]) -> int:
    """The exit status. Raises as the command. ``argv`` is for the model card."""
    settings = load_settings(given)
    if settings.adapter is not None:
        return train_adapter(given, settings, argv)
    target_config = read_config(given.target)
    drafter = load_drafter(given, settings, target_config)
    is_recorded = given.from_buffer is not None
    recorded = split_buffer(given.from_buffer, drafter.read) if is_recorded else None
    prompts = [] if is_recorded else load_prompts(given.target, given.prompts, settings)
    server, device = None, device_of(given.device)
    if given.from_server is not None:
        server = client.connect(given.from_server, given.model, given.api_key)
        refuse_other_model(server, given.target)
    check_disk(given.out, given.resume, prompts, settings, drafter, target_config.dtype)
    begin(given.out, inputs_of(given, settings, drafter, prompts), given.resume)
    torch.set_num_threads(settings.threads)
    ends: TargetEmbeddingsAndHead
    if recorded is not None:
        ends, samples = TargetEmbeddingsAndHead.read(given.target, device), recorded
    else:
        ends = target = Target(given.target, device)
        respond = from_target(target, settings.max_tokens)
        if server is not None:
            respond = from_server(server, given.target, settings.max_tokens)
        elif not given.resume:
            say_how_long(target, prompts, settings.max_tokens, settings.generate_batch)
        folder, layers = given.out / RESPONSES, drafter.read.target_layer_ids
        progress = Progress("responses", len(prompts))
        for done in collect(folder, prompts, respond, target, layers, settings):
            progress.advance(done)
        samples = usable(folder / TRAIN), usable(folder / HELDOUT)
    run = Run(DraftLearner(settings, drafter, ends, *samples), given.out)
    if given.resume:
        run.resume()
    train_shown(run)
    finish(run, given, argv)
    return OK


def train_adapter(given: argparse.Namespace, settings: DrafterTraining, argv: Sequence[str]) -> int:
    """As ``train``, of an adapter with which the target drafts for itself."""
    if given.from_buffer or given.from_server or given.drafter:
        raise CommandError(
            "[adapter] is trained from prompts alone; leave out --from-buffer, --from-server and "
            "--drafter."
        )
    settings = settings.changed({"hidden_states": "recomputed"})  # none is read
    prompts = load_prompts(given.target, given.prompts, settings)
    begin(given.out, settings.to_mapping() | _target_and_prompts(given, prompts), given.resume)
    torch.set_num_threads(settings.threads)
    target, folder = Target(given.target, device_of(given.device)), given.out / RESPONSES
    respond = from_target(target, settings.max_tokens)
    progress = Progress("responses", len(prompts))
    for done in collect(folder, prompts, respond, target, (), settings):
        progress.advance(done)
    samples = usable(folder / TRAIN), usable(folder / HELDOUT)
    run = Run(AdapterLearner(settings, target, own_mask(given.target), *samples), given.out)
    if given.resume:
        run.resume()
    train_shown(run)
    finish(run, given, argv)
    return OK


def load_settings(given: argparse.Namespace) -> DrafterTraining:
    """Of ``--config``, or defaults; flags override. Raises CommandError: one is out of range."""
    if given.config is not None:
        settings = DrafterTraining.load(given.config)
    elif given.drafter is not None:
        settings = CONTINUED
    else:
        settings = NEW
    changes = given.overrides
    if given.learning_rate is not None:
        ratio = settings.vector_lr / settings.matrix_lr
        changes = changes | {
            "matrix_lr": given.learning_rate,
            "vector_lr": given.learning_rate * ratio,
        }
    return settings.changed(changes)


def load_drafter(
    given: argparse.Namespace, settings: DrafterTraining, target_config: PreTrainedConfig
) -> Drafter:
    """Raises CommandError: it does not fit the target, or nothing says which token is the mask."""
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


def _mask_token_id(target: Path, token: str | None) -> int | None:
    """Without ``token`` the tokenizer's mask. Raises CommandError if it has no such token."""
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
    return settings.to_mapping() | {
        "drafter config": drafter.config,
        "drafter weights": weights_digest(given.drafter) if given.drafter else None,
        "buffer": str(given.from_buffer),
        **_target_and_prompts(given, prompts),
    }


def _target_and_prompts(given: argparse.Namespace, prompts: Sequence[Prompt]) -> dict[str, object]:
    return {"target": str(given.target.resolve()), "prompts": digest_of(prompts)}


def _without_folder(argument: str) -> str:
    """An absolute path as its last part: cards get published, and say nothing of this machine."""
    flag, equals, value = argument.rpartition("=")
    return f"{flag}{equals}{Path(value).name}" if Path(value).is_absolute() else argument


def finish(run: Run, given: argparse.Namespace, argv: Sequence[str]) -> None:
    """Write log and card. Its command line is without keys, passwords and the folders of files."""
    model = given.out / MODEL
    write_log(model / LOG, run.rows)
    counts = f"{len(run.learner.samples)} samples, {len(run.learner.heldout)} more held out"
    target = given.target.name
    if given.from_buffer is not None:
        data = f"live traffic recorded at {target}"
    else:
        data = f"responses of {target} to the prompts of {given.prompts.name}"
    shown = client.without_key([each for each in argv if each != "--resume"], given.api_key)
    command = shlex.join(["dllm", "train", "drafter", *map(_without_folder, shown)])
    write_model_card(run, model, command, f"{data}: {counts}.")
    print(model)


def write_model_card(run: Run, path: Path, command: str, data: str) -> None:
    """``data``: what the weights were trained on, in a sentence."""
    learner = run.learner
    sections = [
        *learner.card(),
        *_training(run, command, data),
        "\n## Held-out prompts, greedy\n",
        acceptance_text(learner.acceptance, possible(learner.heldout, learner.num_drafts)),
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
    """``best``: the same groups, of a drafter that is always right."""
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


# --- dllm check-drafter ---------------------------------------------------------------------------

LEAST_FIRST_DRAFT = 0.1  # a drafter of another target keeps a smaller share of first drafts
STRANGER = (
    "hardly a draft is kept. It was made for another target, its config.json is wrong about the "
    "target's layers, causality, mask token or RoPE, it is not trained, or it has learned "
    "other kinds of prompts: give --prompts FILE."
)


def check(given: argparse.Namespace) -> int:
    device = device_of(given.device)
    drafter = Drafter.load(given.drafter, target_facts(read_config(given.target)))
    network = drafter.network().to(device).requires_grad_(False)
    target = Target(given.target, device)
    # All are measured; "held out" means nothing here.
    asked = DrafterTraining(heldout=1, responses=given.num_prompts)
    prompts = load_prompts(given.target, given.prompts, asked)[: given.num_prompts]
    say_how_long(target, prompts, given.max_tokens, given.num_prompts)
    samples = respond(target, prompts, given.max_tokens)
    found = total(measure(network, target, samples, drafter.block))
    best = total(possible(samples, drafter.block - 1)).length
    is_ok = found.by_position[0] >= LEAST_FIRST_DRAFT
    if given.json is not None:
        findings = {
            "target": str(given.target),
            "drafter": str(given.drafter),
            "tokens_a_step": found.length,
            "tokens_a_step_possible": best,
            "kept_by_position": found.by_position,
            "ok": is_ok,
        }
        write_findings(given.json, findings)
    if str(given.json) != "-":
        rates = ", ".join(f"{100 * rate:.0f}" for rate in found.by_position)
        print(
            f"{given.drafter} for {given.target}: {found.length:.2f} tokens a step (possible: "
            f"{best:.2f}); steps that keep 1, 2, ... drafts: {rates} %"
        )
        print("the pair fits" if is_ok else f"the pair does not fit: {STRANGER}")
    return OK if is_ok else FAILED


def respond(target: Target, prompts: Sequence[Prompt], max_tokens: int) -> list[Sample]:
    """Greedy. Raises CommandError if they are too short to measure anything."""
    responses = target.respond([prompt.tokens for prompt in prompts], max_tokens, 0.0, 0)
    samples = [
        Sample((*prompt.tokens, *response), len(prompt.tokens), prompt.group)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    if not any(sample.num_anchors for sample in samples):
        raise CommandError("no response has two tokens; give other --prompts.")
    return samples

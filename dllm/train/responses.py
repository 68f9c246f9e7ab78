"""What a drafter learns from: prompts, a target's responses to them, or recorded traffic.

Responses and their hidden states are collected in shards on disk. A shard holds one batch. Prompts,
settings and target decide what is in it, so a resumed run writes only the shards that are missing.
The bundled prompts are enough to try a calibration and to check a drafter; a drafter that is to be
used needs thousands of prompts like its own traffic.
"""

import hashlib
import math
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.filesize import decimal
from torch import Tensor
from transformers import AutoTokenizer

from dllm.drafter.checkpoint import DrafterConfig
from dllm.drafter.samples import (
    SUFFIX,
    Sample,
    read_shards,
    recorded_acceptance,
    recorded_layers,
    write_shard,
)
from dllm.prompts.files import BUNDLED, BUNDLED_DOMAINS, read_conversations
from dllm.settings.command import CommandError
from dllm.tools.client import Connection, explained
from dllm.train.export import Drafter
from dllm.train.network import count_params
from dllm.train.settings import DrafterTraining
from dllm.train.target import Target, load_batch

OF_FILE = "prompts"  # the group of a file's prompts that name no domain


@dataclass(frozen=True)
class Prompt:
    """Token ids that the target answers; reports have a line for each ``group``."""

    tokens: tuple[int, ...]
    group: str
    is_heldout: bool


def load_prompts(target: Path, file: Path, settings: DrafterTraining) -> list[Prompt]:
    """Prompts of a file, with the target's chat template; the first ``heldout`` are held out.

    A line of a text file is a prompt; a line of JSONL is an object with ``prompt`` or ``messages``,
    and perhaps ``domain``, which becomes the prompt's group. Of ``BUNDLED`` at most one prompt of
    each domain is held out. Raises CommandError if the file cannot be read, a line is wrong, there
    are too few, or the target has no tokenizer.
    """
    if file == BUNDLED:
        settings = replace(settings, heldout=min(settings.heldout, BUNDLED_DOMAINS))
    try:
        chats = read_conversations(file, is_json=file.suffix == ".jsonl")
    except ValueError as error:
        raise CommandError(f"--prompts {error}") from None
    if len(chats) <= settings.heldout:
        raise CommandError(
            f"--prompts {file}: {len(chats)} prompts, of which heldout = {settings.heldout} are "
            "kept for measuring; allowed: more prompts than that, or a config with fewer held out."
        )
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = []
    for index, (chat, domain) in enumerate(chats[: settings.heldout + settings.responses]):
        if tokenizer.chat_template is None:
            ids = tokenizer(str(chat[-1].get("content")))["input_ids"]
        else:
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:  # what transformers makes of a target without a tokenizer's files
            raise CommandError(
                f"{file}: the tokenizer of {target} makes no tokens of prompt {index + 1}; give a "
                "target that has one (tokenizer.json)."
            )
        prompts.append(Prompt(tuple(ids), domain or OF_FILE, index < settings.heldout))
    return prompts


def digest_of(prompts: Sequence[Prompt]) -> str:
    asked = repr([prompt.tokens for prompt in prompts]).encode()
    return hashlib.sha256(asked).hexdigest()


HELDOUT_EVERY = 20  # about one of so many samples is held out
MOST_HELDOUT = 200  # that are measured on: an evaluation takes seconds, however long was recorded


class TooFewSamples(CommandError):
    """A recording is too short to train on."""


def split_buffer(folder: Path, drafter: DrafterConfig) -> tuple[list[Sample], list[Sample]]:
    """Recorded samples: those to train on, and those held out.

    A sample's tokens decide on which side it is: on the same one whatever comes or is deleted.
    Raises TooFewSamples, or CommandError if hidden states are of other layers.
    """
    samples = [sample for sample in read_shards(folder) if sample.num_anchors > 0]
    if len(samples) <= HELDOUT_EVERY:
        raise TooFewSamples(
            f"{folder} holds {len(samples)} samples with something to draft; needed: more than "
            f"{HELDOUT_EVERY}. Record for longer."
        )
    digests = {sample: zlib.crc32(repr(sample.tokens).encode()) for sample in samples}
    heldout = [one for one in samples if digests[one] % HELDOUT_EVERY == 0]
    if not heldout:
        least = min(digests.values())
        heldout = [one for one in samples if digests[one] == least]
    if len(heldout) == len(samples):
        raise TooFewSamples(f"{folder} holds too few different texts. Record for longer.")
    wanted = drafter.target_layer_ids
    for layers in recorded_layers(folder):
        if layers != wanted:
            raise CommandError(
                f"{folder} was recorded from layers {list(layers)} of the target; the drafter "
                f"reads {list(wanted)}. Give another buffer, or a config whose target_layer_ids "
                "are those of this one."
            )
    features = samples[0].hidden().shape[-1]
    if features != len(wanted) * drafter.target_hidden_size:
        raise CommandError(
            f"{folder}: hidden states of size {features}; the drafter reads {len(wanted)} of size "
            f"{drafter.target_hidden_size}. It was recorded with another drafter."
        )
    verified, accepted = recorded_acceptance(folder)
    if verified:
        print(
            f"buffer: {len(samples)} samples; {accepted / verified:.1%} of {verified} verified "
            "drafts were accepted when it was recorded"
        )
    kept = set(samples) - set(heldout)
    measured = sorted(heldout, key=digests.__getitem__)[:MOST_HELDOUT]
    return [sample for sample in samples if sample in kept], measured


TRAIN, HELDOUT = "train", "heldout"
TIMED_TOKENS = 4  # of each prompt of a batch, to estimate the time
CONCURRENCY = 32  # requests to a server at once
TOKEN_BYTES = 4
# Bytes on disk of a parameter in a checkpoint: weight, average and momenta in fp32, for two
# checkpoints, because a new one is written before the old one is removed.
STATE_BYTES = 2 * 16

# (prompts, temperature, seed) -> responses as tokens, end-of-sequence included.
Respond = Callable[[Sequence[Sequence[int]], float, int], list[list[int]]]


def check_disk(
    out: Path,
    is_resumed: bool,
    prompts: Sequence[Prompt],
    settings: DrafterTraining,
    drafter: Drafter,
    dtype: torch.dtype | None,
) -> None:
    """Print how much of the disk a run may need; what a resumed run has written counts as free.

    ``dtype``: the target's. Raises CommandError: the disk has less room than that.
    """
    limit, longest = settings.max_tokens, settings.max_length
    num_tokens = sum(min(len(prompt.tokens) + limit, longest) for prompt in prompts)
    read, num_params = drafter.read, count_params(drafter.read)
    hidden = 0
    if settings.hidden_states == "stored":
        features = len(read.target_layer_ids) * read.target_hidden_size
        hidden = num_tokens * features * (dtype or torch.float32).itemsize
    needed = TOKEN_BYTES * num_tokens + hidden + STATE_BYTES * num_params
    print(
        f"disk: at most {decimal(needed)}, of which hidden states {decimal(hidden)}; "
        f"{num_params / 1e6:.2f}M parameters"
    )
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    free = shutil.disk_usage(there).free + (written if is_resumed else 0)
    if needed > free:
        raise CommandError(
            f"{out} has {decimal(free)} free and the run may need {decimal(needed)}. Give an --out "
            'on another disk, lower responses or max_tokens, or set hidden_states = "recomputed" '
            "(nothing is stored; every step then runs the target)."
        )


def say_how_long(target: Target, prompts: Sequence[Prompt], max_tokens: int, batch: int) -> None:
    """Print the most time of responses, if it is over a minute, and the memory, from one batch."""
    asked = [prompt.tokens for prompt in prompts[:batch]]
    start = time.monotonic()
    target.respond(asked, TIMED_TOKENS, 0.0, 0)
    each = (time.monotonic() - start) / TIMED_TOKENS
    minutes = math.ceil(len(prompts) / batch) * max_tokens * each / 60
    if minutes > 1:
        size = sum(param.nbytes for param in target.model.parameters())
        print(
            f"responses: at most about {minutes:.0f} minutes ({each:.2g} s a token of {len(asked)} "
            f"at once), with {decimal(size)} of weights in memory; a server is faster "
            "(--from-server)",
            flush=True,
        )


def from_target(target: Target, max_tokens: int) -> Respond:
    return lambda prompts, temperature, seed: target.respond(prompts, max_tokens, temperature, seed)


def from_server(connection: Connection, target: Path, max_tokens: int) -> Respond:
    tokenizer = AutoTokenizer.from_pretrained(target)

    def ask(prompt: Sequence[int], temperature: float, seed: int) -> list[int]:
        with explained(connection.url):
            answer = connection.client.completions.create(
                model=connection.model,
                prompt=list(prompt),
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                extra_body={"return_token_ids": True},
            )
        choice = answer.choices[0]
        ids = getattr(choice, "token_ids", None)
        if ids is None:  # a server that returns text alone
            ids = tokenizer(choice.text, add_special_tokens=False)["input_ids"]
            if choice.finish_reason == "stop":
                ids = [*ids, tokenizer.eos_token_id]
        return list(ids)

    def respond(prompts: Sequence[Sequence[int]], temperature: float, seed: int) -> list[list[int]]:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            numbered = enumerate(prompts)
            tasks = [pool.submit(ask, prompt, temperature, seed + i) for i, prompt in numbered]
            return [task.result() for task in tasks]

    return respond


def refuse_other_model(connection: Connection, target: Path) -> None:
    """Raises CommandError for another model's name: a drafter would learn what that one says.

    The name is that of the folder or repository that the server's was loaded from, where it says
    so, else the one that requests name.
    """
    given = connection.loaded_from or connection.model
    names = {_name(target.absolute()), _name(target.resolve())}
    if _name(Path(given)) not in names:
        raise CommandError(
            f"{connection.url} serves {given}, and --target is {target}; allowed: a server of the "
            "target. If they are the same, give --target a folder, or a link to it, that is called "
            f"{_name(Path(given))}."
        )


def _name(path: Path) -> str:
    """The last part of a path or repository; of a snapshot in Hugging Face's cache, the model's."""
    if path.parent.name == "snapshots":
        return path.parents[1].name.split("--")[-1]
    return path.name


def collect(
    folder: Path,
    prompts: Sequence[Prompt],
    respond: Respond,
    target: Target,
    layer_ids: tuple[int, ...],
    settings: DrafterTraining,
) -> Iterator[int]:
    """Shards that are there stay as they are. Yields the number of prompts of each."""
    size = settings.generate_batch
    for split, is_heldout in ((HELDOUT, True), (TRAIN, False)):
        chosen = [prompt for prompt in prompts if prompt.is_heldout == is_heldout]
        # Prompts of similar length together, so that there is little padding.
        chosen.sort(key=lambda prompt: (prompt.group, len(prompt.tokens)))
        temperature = 0.0 if is_heldout else settings.temperature
        (folder / split).mkdir(parents=True, exist_ok=True)
        for start in range(0, len(chosen), size):
            path = folder / split / f"{start:08}{SUFFIX}"
            batch = chosen[start : start + size]
            if not path.exists():
                asked = [prompt.tokens for prompt in batch]
                responses = respond(asked, temperature, settings.seed + start)
                samples = [
                    Sample((*one.tokens, *said)[: settings.max_length], len(one.tokens), one.group)
                    for one, said in zip(batch, responses, strict=True)
                ]
                is_stored = settings.hidden_states == "stored"
                hidden = hidden_states(samples, target, layer_ids) if is_stored else None
                write_shard(path, samples, hidden, layers=layer_ids)
            yield len(batch)


def hidden_states(
    samples: Sequence[Sample], target: Target, layer_ids: tuple[int, ...]
) -> list[Tensor]:
    """For each sample ``[tokens, features]``."""
    found = []
    for some in (samples[at : at + 8] for at in range(0, len(samples), 8)):
        features = load_batch(some, target, layer_ids).features.cpu()
        rows = zip(some, features, strict=True)
        found += [row[: len(sample.tokens)].contiguous() for sample, row in rows]
    return found


def usable(folder: Path) -> list[Sample]:
    """Samples with at least one token to draft. Raises CommandError if there are none."""
    found = [sample for sample in read_shards(folder) if sample.num_anchors > 0]
    if not found:
        raise CommandError(
            f"{folder}: no response has two tokens, so there is nothing to learn from; give other "
            "prompts, or a larger max_tokens."
        )
    return found

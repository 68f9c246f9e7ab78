"""``dllm check-drafter``: does a drafter fit its target, and if not, what is wrong."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from dllm.drafter.checkpoint import TargetFacts
from dllm.drafter.samples import Sample
from dllm.settings.command import FAILED, OK, CommandError, write_findings
from dllm.tasks.suite import FAMILIES
from dllm.train.drafter.acceptance import possible, total
from dllm.train.drafter.check import Checker, Reading, Verdict
from dllm.train.drafter.export import Drafter, block_of, checked_config, read_checkpoint
from dllm.train.drafter.prompts import Prompt, default_file, file_prompts, suite_prompts
from dllm.train.drafter.settings import CalibrateSettings
from dllm.train.drafter.target import Target, read_config, rope_of, target_facts

NUM_PROMPTS = 10
MAX_TOKENS = 96
MOST_SPECIAL_TOKENS = 32  # so many are tried as the mask token


def main(argv: Sequence[str]) -> int:
    """Check a pair. Exit status 0: it fits; 1: it does not."""
    given = parse(argv)
    target_config = read_config(given.target)
    facts = target_facts(target_config)
    config, weights = read_checkpoint(given.drafter)
    reading, refusal = read_loosely(config, facts)
    drafter = Drafter(config, reading.config, block_of(config), weights)
    network = drafter.network().to(given.device).requires_grad_(False)
    target = Target(given.target, given.device)
    samples = respond(target, load_prompts(given), given.max_tokens)
    names, rope = special_tokens(given.target), rope_of(target_config)
    verdict = Checker(network, target, samples, drafter.block, names, rope).run(reading)
    is_ok = verdict.is_ok and refusal is None
    best = total(possible(samples, drafter.block - 1)).length
    if given.json is not None:
        found = as_json(verdict, best) | {"ok": is_ok, "refused": refusal}
        pair = {"target": str(given.target), "drafter": str(given.drafter)}
        write_findings(given.json, pair | found)
    if str(given.json) != "-":
        title = f"{given.drafter} for {given.target}"
        print("\n".join(in_words(title, verdict, best, refusal)))
        print("the pair fits" if is_ok else "the pair does not fit")
    return OK if is_ok else FAILED


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exits with status 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="dllm check-drafter",
        description="Measure what a target accepts of a drafter, as its checkpoint says and read "
        "in other ways; name what is off.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("target", type=Path, help="checkpoint directory")
    parser.add_argument("drafter", type=Path, help="checkpoint directory, z-lab's format")
    parser.add_argument(
        "--prompts",
        type=Path,
        help="text or JSONL, at least --num-prompts; without it shipped general prompts (for our "
        "small models the task suite)",
    )
    parser.add_argument("--num-prompts", type=int, default=NUM_PROMPTS, help="prompts to answer")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of a response")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found; -: print")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(argv)
    if given.num_prompts < 2 or given.max_tokens < 2:
        parser.error("--num-prompts and --max-tokens are at least 2.")
    return given


def read_loosely(config: dict[str, object], facts: TargetFacts) -> tuple[Reading, str | None]:
    """The reading that the checkpoint declares, and why a server would refuse it (or None).

    A server refuses layer ids that are unsorted or out of range. They are measured all the same,
    moved into range if they have to be, so that the check can tell what was meant.

    Raises:
        CommandError: the pair is refused for another reason, so nothing can be measured.
    """
    dflash = dict(config.get("dflash_config") or {})  # type: ignore[call-overload]
    ids = dflash.get("target_layer_ids")
    try:
        read = checked_config(config, facts)
        return Reading(read, read.target_layer_ids), None
    except CommandError as error:
        refusal = str(error)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise CommandError(refusal)
    shift = min(0, facts.num_layers - 1 - max(ids)) or max(0, -min(ids))
    moved = tuple(i + shift for i in ids)
    dflash["target_layer_ids"] = sorted(set(moved))
    read = checked_config(config | {"dflash_config": dflash}, facts)
    if shift:
        refusal += f" (Measured with {list(moved)}.)"
    return Reading(read, moved), refusal


def load_prompts(given: argparse.Namespace) -> list[Prompt]:
    """So many prompts of the file, or held-out ones of as many families of the task suite."""
    file, count = given.prompts or default_file(given.target), given.num_prompts
    if file is not None:
        settings = CalibrateSettings(heldout=1, responses=count)
        return file_prompts(given.target, file, settings)[:count]
    settings = CalibrateSettings(heldout=math.ceil(count / len(FAMILIES)), responses=1)
    asked = suite_prompts(given.target, settings)
    return [prompt for prompt in asked if prompt.is_heldout][-count:]


def respond(target: Target, prompts: Sequence[Prompt], max_tokens: int) -> list[Sample]:
    """Greedy responses of the target.

    Raises:
        CommandError: they are too short to measure anything.
    """
    responses = target.respond([prompt.tokens for prompt in prompts], max_tokens, 0.0, 0)
    samples = [
        Sample((*prompt.tokens, *response), len(prompt.tokens), prompt.group)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    if sum(sample.num_anchors > 0 for sample in samples) < 2:
        raise CommandError("fewer than two responses have two tokens; give other --prompts.")
    return samples


def special_tokens(target: Path) -> dict[int, str]:
    """Tokens that could be meant as the mask: the tokenizer's added ones, by id.

    Those named like a mask come first, because of equally good readings the first one is reported.
    """
    path = target / "tokenizer.json"
    if not path.exists():
        return {}
    added = Tokenizer.from_file(str(path)).get_added_tokens_decoder()
    names = {token: added[token].content for token in sorted(added)}
    by_name = sorted(names, key=lambda token: "mask" not in names[token].lower())
    return {token: names[token] for token in by_name[:MOST_SPECIAL_TOKENS]}


def as_json(verdict: Verdict, best: float) -> dict[str, object]:
    """The findings for scripts; ``best``: tokens a step of a drafter that is always right."""
    return {
        "fits_no_reading": verdict.is_stranger,
        "tokens_a_step": verdict.declared.length,
        "tokens_a_step_possible": best,
        "kept_by_position": verdict.declared.by_position,
        "mismatches": [asdict(one) for one in verdict.mismatches],
        "tried": verdict.tried,
    }


def in_words(title: str, verdict: Verdict, best: float, refusal: str | None) -> list[str]:
    """The findings for people, one a line."""
    rates = ", ".join(f"{100 * rate:.0f}" for rate in verdict.declared.by_position)
    lines = [
        f"{title}: {verdict.declared.length:.2f} tokens a step (possible: {best:.2f}); steps that "
        f"keep 1, 2, ... drafts: {rates} %"
    ]
    if refusal is not None:
        lines.append(f"REFUSED by a server: {refusal}")
    lines += [f"MISMATCH: {mismatch}" for mismatch in verdict.mismatches]
    if verdict.is_stranger:
        lines.append(
            "MISMATCH: hardly a draft is kept, however the checkpoint is read: it was made for "
            "another target, or is not trained."
        )
    nearest = sorted(verdict.tried.items(), key=lambda one: -one[1])[:3]
    others = "; ".join(f"{name}: {length:.2f}" for name, length in nearest)
    return [*lines, f"{len(verdict.tried)} other readings were tried; best: {others}"]

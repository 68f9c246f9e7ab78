"""``dllm check-drafter``: does a drafter fit its target."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from dllm.drafter.samples import Sample
from dllm.prompts.files import BUNDLED
from dllm.settings.command import FAILED, OK, CommandError, write_findings
from dllm.train.acceptance import measure, possible, total
from dllm.train.export import Drafter
from dllm.train.prompts import Prompt, load_prompts
from dllm.train.settings import DrafterTraining
from dllm.train.target import Target, read_config, target_facts

NUM_PROMPTS = 10
MAX_TOKENS = 96
LEAST_FIRST_DRAFT = 0.1  # a drafter of another target keeps a smaller share of first drafts
STRANGER = (
    "hardly a draft is kept. It was made for another target, its config.json is wrong about the "
    "target's layers, causality, mask token or RoPE, or it is not trained."
)


def main(argv: Sequence[str]) -> int:
    """Check a pair. Exit status 0: it fits; 1: it does not.

    Raises:
        CommandError: a server would refuse it, or nothing can be measured.
    """
    given = parse(argv)
    drafter = Drafter.load(given.drafter, target_facts(read_config(given.target)))
    network = drafter.network().to(given.device).requires_grad_(False)
    target = Target(given.target, given.device)
    # All are measured; "held out" means nothing here.
    asked = DrafterTraining(heldout=1, responses=given.num_prompts)
    prompts = load_prompts(given.target, given.prompts, asked)[: given.num_prompts]
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


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dllm check-drafter",
        description="Measure what a target accepts of a drafter.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("target", type=Path, help="checkpoint directory")
    parser.add_argument("drafter", type=Path, help="checkpoint directory, z-lab's format")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=BUNDLED,
        help="text or JSONL, at least --num-prompts",
    )
    parser.add_argument("--num-prompts", type=int, default=NUM_PROMPTS, help="prompts to answer")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of a response")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found; -: print")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(argv)
    if given.num_prompts < 1 or given.max_tokens < 2:
        parser.error("--num-prompts is at least 1, --max-tokens at least 2.")
    return given


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
    if not any(sample.num_anchors for sample in samples):
        raise CommandError("no response has two tokens; give other --prompts.")
    return samples

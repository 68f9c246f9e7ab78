"""Measures what a target accepts of a drafter (``dllm check-drafter``)."""

import argparse
from collections.abc import Sequence

from dllm.drafter.samples import Sample
from dllm.settings.command import FAILED, OK, CommandError, write_findings
from dllm.train.acceptance import measure, possible, total
from dllm.train.export import Drafter
from dllm.train.optimizer import device_of
from dllm.train.responses import Prompt, load_prompts, say_how_long
from dllm.train.settings import DrafterTraining
from dllm.train.target import Target, read_config, target_facts

LEAST_FIRST_DRAFT = 0.1  # a drafter of another target keeps a smaller share of first drafts
STRANGER = (
    "hardly a draft is kept. It was made for another target, its config.json is wrong about the "
    "target's layers, causality, mask token or RoPE, or it is not trained."
)


def check(given: argparse.Namespace) -> int:
    """The exit status. Raises as the command."""
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

"""A request to quantize: its command line, checked before any work begins.

``dllm quantize`` prepares the same job from the same command line twice: to refuse at once what
cannot be done, and in LLM Compressor's environment, to do it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dllm.models import FAMILIES
from dllm.prompts.files import BUNDLED, Message, read_conversations
from dllm.quant.schemes import Scheme
from dllm.quantize.arguments import parser
from dllm.quantize.checkpoint import Checkpoint
from dllm.quantize.linears import Linear, linears, refuse_unfit
from dllm.quantize.recipes import MADE, quantized_layers
from dllm.settings.command import CommandError
from dllm.settings.denoising import WHOLE_SEQUENCE

# Files beside the weights that are copied unchanged, if the source has them.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class Job:
    source: Checkpoint  # in bf16 (or fp16, or fp32)
    scheme: Scheme
    layers: list[Linear]  # that get the scheme
    ignored: list[str]  # names and patterns of layers that are left as they are, beside ``IGNORED``
    out: Path
    prompts: list[list[Message]]  # to calibrate with; empty if the scheme needs no calibration
    blocks: int
    seed: int
    device: str


def prepare(argv: Sequence[str]) -> tuple[Job, argparse.Namespace]:
    """Raises CommandError: it cannot be done; says why and what to do."""
    args = parser().parse_args(argv)
    scheme = MADE[args.scheme]
    if args.calibration is not None and not scheme.needs_calibration:
        raise CommandError(f"--calibration is of no use with --scheme {args.scheme}; leave it out.")
    check_out(args.out)
    source = Checkpoint(args.model)
    if not any((args.model / name).is_file() for name in TOKENIZERS):
        raise CommandError(
            f"{args.model} has no {' or '.join(TOKENIZERS)}; nothing could serve it."
        )
    prompts = []
    if scheme.needs_calibration:
        _refuse_whole_sequences(source, args.scheme)
        prompts = calibration_prompts(args.calibration, args.samples)
    refuse_unfit(source)
    layers = quantized_layers(linears(source.config), scheme, args.ignore)
    options = (args.blocks, args.seed, args.device)
    return Job(source, scheme, layers, args.ignore, args.out, prompts, *options), args


def _refuse_whole_sequences(source: Checkpoint, scheme: str) -> None:
    """What is calibrated answers with a loop of blocks, which these models have none of."""
    architecture = str(source.config["architectures"][0])  # type: ignore[index]
    kind = FAMILIES[architecture].config_class()
    if kind is not None and kind(**source.config).block_size == WHOLE_SEQUENCE:
        raise CommandError(
            f"--scheme {scheme} is calibrated, and {architecture} cannot be; allowed: fp8-dynamic."
        )


def check_out(out: Path) -> None:
    parent = out.absolute().parent
    if not parent.is_dir():
        raise CommandError(f"--out {out}: there is no directory {parent}.")
    if out.exists() or out.is_symlink():
        raise CommandError(f"--out {out} exists, and nothing is overwritten; name another one.")


def calibration_prompts(file: Path | None, samples: int) -> list[list[Message]]:
    """The first ``samples`` of a file, or of the bundled prompts; their last messages are answered.

    Raises CommandError: the file cannot be read, or a line is wrong.
    """
    try:
        found = read_conversations(file or BUNDLED, is_json=True)
    except ValueError as error:
        raise CommandError(f"--calibration {error}") from None
    if not found:
        raise CommandError(f"--calibration {file} is empty; it needs one JSON object a line.")
    return [conversation.messages for conversation in found[:samples]]

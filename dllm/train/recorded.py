"""Recorded traffic of a server as training samples."""

import zlib
from pathlib import Path

from dllm.drafter.checkpoint import DrafterConfig
from dllm.drafter.samples import Sample, read_shards, recorded_acceptance, recorded_layers
from dllm.settings.command import CommandError

HELDOUT_EVERY = 20  # about one of so many samples is held out
MOST_HELDOUT = 200  # that are measured on: an evaluation takes seconds, however long was recorded


class TooFewSamples(CommandError):
    """A recording is too short to train on."""


def split_buffer(folder: Path, drafter: DrafterConfig) -> tuple[list[Sample], list[Sample]]:
    """Recorded samples: those to train on, and those held out.

    A sample's tokens decide on which side it is: on the same one whatever comes or is deleted.

    Raises:
        TooFewSamples: there are too few.
        CommandError: their hidden states are of other layers.
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

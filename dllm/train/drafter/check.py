"""Finds mismatches of a drafter and its target that cause no error, only low acceptance.

A wrong layer index, causality, mask token or RoPE is such a mismatch. The same weights are read
with other conventions that checkpoints use, one convention at a time. If another reading fits
better, it is taken over and the search goes on from there, so several mistakes are found one after
the other. Readings are compared by the loss of the target's tokens: it differs clearly even where
the number of accepted drafts does not.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dllm.drafter.checkpoint import DrafterConfig
from dllm.drafter.samples import Sample
from dllm.train.drafter.acceptance import Acceptance, measure, total
from dllm.train.drafter.network import DraftNetwork
from dllm.train.drafter.target import Target

# Another reading is better if its loss is lower by LEAST_GAIN, and by more than STANDARD_ERRORS
# standard errors of the difference, prompt by prompt. Readings that make no difference to a drafter
# (mask tokens with nearly the same embedding, say) differ by about 0.001 nats.
LEAST_GAIN = 0.02  # nats a draft
STANDARD_ERRORS = 2.0
LEAST_FIRST_DRAFT = 0.1  # a drafter of another target keeps a smaller share of first drafts
THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)


@dataclass(frozen=True)
class Reading:
    """One way to read a checkpoint.

    ``layer_ids``: layers of the target in the order in which ``fc`` takes their outputs.
    """

    config: DrafterConfig
    layer_ids: tuple[int, ...]


@dataclass(frozen=True)
class Conventions:
    """Facts of the target that give alternatives: layers, mask tokens by id, RoPE parameters."""

    num_target_layers: int
    special_tokens: Mapping[int, str]
    target_rope: Mapping[str, object]


@dataclass(frozen=True)
class Measured:
    """One reading: its loss on each prompt in nats, and its acceptance on all together."""

    losses: tuple[float, ...]
    everything: Acceptance


@dataclass(frozen=True)
class Mismatch:
    """A convention in which the checkpoint is wrong, and a better value.

    Attributes:
        what: layer index, causality, mask token, RoPE ...
        declared, better: the value of the checkpoint and the better one, in words.
        before, after: tokens a step with each.
        loss_before, loss_after: nats a draft with each.
    """

    what: str
    declared: str
    better: str
    before: float
    after: float
    loss_before: float
    loss_after: float

    def __str__(self) -> str:
        lengths = f"{self.after:.2f} tokens a step instead of {self.before:.2f}"
        losses = f"{self.loss_after:.2f} nats a draft instead of {self.loss_before:.2f}"
        return (
            f"{self.what}: the checkpoint says {self.declared}; read as {self.better} it reaches "
            f"{lengths} ({losses})"
        )


@dataclass(frozen=True)
class Verdict:
    """What the search found.

    Attributes:
        declared, best: as the checkpoint says, and with all mismatches corrected.
        mismatches: in the order in which they were found, largest gain first. Empty if
            ``is_stranger``: random weights also prefer some reading, which means nothing.
        refusal: why a server refuses the pair; None: it does not.
        tried: name and tokens a step of every alternative to the declared reading.
    """

    declared: Measured
    best: Measured
    mismatches: tuple[Mismatch, ...]
    tried: tuple[tuple[str, float], ...]
    refusal: str | None = None

    @property
    def is_stranger(self) -> bool:
        """Whether hardly any first draft is kept in any reading: made for another target."""
        rates = self.best.everything.by_position
        return not rates or rates[0] < LEAST_FIRST_DRAFT

    @property
    def is_ok(self) -> bool:
        """Whether nothing was found."""
        return not self.mismatches and not self.is_stranger and self.refusal is None


@dataclass(frozen=True)
class Checker:
    """Measures readings of one drafter on a few greedy responses of its target."""

    network: DraftNetwork
    target: Target
    samples: Sequence[Sample]
    block: int
    conventions: Conventions

    def run(self, declared: Reading) -> Verdict:
        """Search from the declared reading for one that no alternative improves."""
        reading, measured = declared, self.measure(declared)
        first = measured
        mismatches: list[Mismatch] = []
        tried: list[tuple[str, float]] = []
        while True:
            found = [
                (what, was, now, other, self.measure(other))
                for what, was, now, other in alternatives(reading, self.conventions)
            ]
            if not mismatches:
                tried = [(f"{what}: {now}", m.everything.length) for what, _, now, _, m in found]
            better = [one for one in found if is_better(one[-1], measured)]
            if not better or len(mismatches) == 4:  # there are four kinds
                verdict = Verdict(first, measured, tuple(mismatches), tuple(tried))
                return replace(verdict, mismatches=()) if verdict.is_stranger else verdict
            # Of about equally good ones take the first: likelier ones are listed first.
            least = min(one[-1].everything.mean_loss for one in better)
            what, was, now, reading, after = next(
                one for one in better if one[-1].everything.mean_loss <= least + LEAST_GAIN
            )
            mismatches.append(mismatch(what, was, now, measured, after))
            measured = after

    def measure(self, reading: Reading) -> Measured:
        """Loss and acceptance with this reading."""
        self.network.reread(reading.config)
        # Each prompt is its own group, so that readings are compared prompt by prompt.
        alone = [replace(sample, group=str(at)) for at, sample in enumerate(self.samples)]
        groups = measure(self.network, self.target, alone, self.block, reading.layer_ids)
        losses = tuple(groups[sample.group].loss for sample in alone if sample.num_anchors)
        return Measured(losses, total(groups))


def mismatch(what: str, was: str, now: str, before: Measured, after: Measured) -> Mismatch:
    """A mismatch with its measurements."""
    old, new = before.everything, after.everything
    return Mismatch(what, was, now, old.length, new.length, old.mean_loss, new.mean_loss)


def is_better(other: Measured, than: Measured) -> bool:
    """Whether one reading has a lower loss than another, beyond chance."""
    gains = [old - new for new, old in zip(other.losses, than.losses, strict=True)]
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    return statistics.fmean(gains) > max(LEAST_GAIN, STANDARD_ERRORS * error)


def alternatives(
    reading: Reading, conventions: Conventions
) -> Iterator[tuple[str, str, str, Reading]]:
    """Other readings that differ in one convention: (what, declared, alternative, reading)."""
    yield from _other_layers(reading, conventions)
    yield from _other_causality(reading)
    yield from _other_masks(reading, conventions)
    yield from _other_rope(reading, conventions)


def _other_layers(
    reading: Reading, conventions: Conventions
) -> Iterator[tuple[str, str, str, Reading]]:
    """Layer ids one lower or higher, or in another order."""
    ids = reading.layer_ids
    orders = {tuple(i + shift for i in ids): f"{shift:+} each" for shift in (-1, 1)}
    orders |= {tuple(reversed(ids)): "reversed", tuple(sorted(ids)): "ascending"}
    for other, how in orders.items():
        if other != ids and all(0 <= i < conventions.num_target_layers for i in other):
            text = f"outputs of layers {list(other)} ({how})"
            yield "layer index", f"{list(ids)}", text, replace(reading, layer_ids=other)


def _other_causality(reading: Reading) -> Iterator[tuple[str, str, str, Reading]]:
    layers = reading.config.layers
    names = {True: "causal draft positions", False: "draft positions that see each other"}
    for is_causal, name in names.items():
        other = tuple(replace(layer, is_causal=is_causal) for layer in layers)
        if other != layers:
            is_mixed = len({layer.is_causal for layer in layers}) > 1
            was = "a mixture of both" if is_mixed else names[not is_causal]
            config = replace(reading.config, layers=other)
            yield "causality", was, name, replace(reading, config=config)


def _other_masks(
    reading: Reading, conventions: Conventions
) -> Iterator[tuple[str, str, str, Reading]]:
    given = reading.config.mask_token_id
    names = conventions.special_tokens
    for token, text in names.items():
        if token != given:
            config = replace(reading.config, mask_token_id=token)
            was = f"{given} ({names.get(given, 'no special token')})"
            yield "mask token", was, f"{token} ({text})", replace(reading, config=config)


def _other_rope(
    reading: Reading, conventions: Conventions
) -> Iterator[tuple[str, str, str, Reading]]:
    config = reading.config
    given = config.rope_parameters
    is_neox = config.is_neox_style is not False
    styles = {True: "halves (is_neox_style true)", False: "pairs (is_neox_style false)"}
    other = replace(config, is_neox_style=not is_neox)
    yield "RoPE style", styles[is_neox], styles[not is_neox], replace(reading, config=other)
    theta = float(str(given["rope_theta"]))
    own = float(str(conventions.target_rope["rope_theta"]))
    for value in sorted({own, *THETAS} - {theta}):
        other = replace(config, rope_parameters={**given, "rope_theta": value})
        note = " (the target's)" if value == own else ""
        now = f"{value:g}{note}"
        yield "RoPE theta", f"{theta:g}", now, replace(reading, config=other)
    target_type = str(conventions.target_rope.get("rope_type", "default"))
    if target_type != given.get("rope_type"):
        rope = dict(conventions.target_rope)
        other = replace(config, rope_parameters=rope)
        now = f"{target_type} (the target's)"
        yield "RoPE scaling", f"{given['rope_type']}", now, replace(reading, config=other)

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
from typing import Any, NamedTuple

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
KINDS = 4  # of mismatches: layer index, causality, mask token, RoPE
THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)


@dataclass(frozen=True)
class Reading:
    """One way to read a checkpoint.

    ``layer_ids``: layers of the target in the order in which ``fc`` takes their outputs.
    """

    config: DrafterConfig
    layer_ids: tuple[int, ...]

    def but(self, **changes: Any) -> "Reading":
        """With another config.json."""
        return replace(self, config=replace(self.config, **changes))


class Alternative(NamedTuple):
    """A reading that differs from another one in one convention; both values in words."""

    what: str
    declared: str
    better: str
    reading: Reading


@dataclass(frozen=True)
class Measured:
    """One reading: its loss on each prompt in nats, and its acceptance on all together."""

    losses: list[float]
    everything: Acceptance

    def is_better_than(self, other: "Measured") -> bool:
        """Whether its loss is lower, beyond chance."""
        gains = [old - new for new, old in zip(self.losses, other.losses, strict=True)]
        error = statistics.stdev(gains) / math.sqrt(len(gains))
        return statistics.fmean(gains) > max(LEAST_GAIN, STANDARD_ERRORS * error)


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
        return (
            f"{self.what}: the checkpoint says {self.declared}; read as {self.better} it reaches "
            f"{self.after:.2f} tokens a step instead of {self.before:.2f} ({self.loss_after:.2f} "
            f"nats a draft instead of {self.loss_before:.2f})"
        )


@dataclass(frozen=True)
class Verdict:
    """What the search found.

    Attributes:
        declared: acceptance as the checkpoint says.
        mismatches: in the order in which they were found, largest gain first. Empty if
            ``is_stranger``: random weights also prefer some reading, which means nothing.
        tried: name and tokens a step of every alternative to the declared reading.
        is_stranger: hardly any first draft is kept in any reading: made for another target.
    """

    declared: Acceptance
    mismatches: list[Mismatch]
    tried: dict[str, float]
    is_stranger: bool

    @property
    def is_ok(self) -> bool:
        """Whether nothing was found."""
        return not self.mismatches and not self.is_stranger


@dataclass(frozen=True)
class Checker:
    """Measures readings of one drafter on a few greedy responses of its target.

    Attributes:
        special_tokens: of the target that could be meant as the mask, by id.
        rope: the target's RoPE parameters.
    """

    network: DraftNetwork
    target: Target
    samples: Sequence[Sample]
    block: int
    special_tokens: Mapping[int, str]
    rope: Mapping[str, object]

    def run(self, reading: Reading) -> Verdict:
        """Search from the declared reading for one that no alternative improves."""
        declared = measured = self.measure(reading)
        mismatches: list[Mismatch] = []
        tried: dict[str, float] = {}
        while True:
            found = [(one, self.measure(one.reading)) for one in self.alternatives(reading)]
            if not mismatches:
                tried = {f"{one.what}: {one.better}": m.everything.length for one, m in found}
            better = [pair for pair in found if pair[1].is_better_than(measured)]
            if not better or len(mismatches) == KINDS:
                break
            # Of about equally good ones take the first: likelier ones are listed first.
            least = min(m.everything.mean_loss for _, m in better)
            one, after = next(
                pair for pair in better if pair[1].everything.mean_loss <= least + LEAST_GAIN
            )
            old, new = measured.everything, after.everything
            lengths, losses = (old.length, new.length), (old.mean_loss, new.mean_loss)
            mismatches.append(Mismatch(*one[:3], *lengths, *losses))
            reading, measured = one.reading, after
        rates = measured.everything.by_position
        is_stranger = not rates or rates[0] < LEAST_FIRST_DRAFT
        named = [] if is_stranger else mismatches
        return Verdict(declared.everything, named, tried, is_stranger)

    def measure(self, reading: Reading) -> Measured:
        """Loss and acceptance with this reading."""
        self.network.reread(reading.config)
        # Each prompt is its own group, so that readings are compared prompt by prompt.
        alone = [replace(sample, group=str(at)) for at, sample in enumerate(self.samples)]
        groups = measure(self.network, self.target, alone, self.block, reading.layer_ids)
        losses = [groups[sample.group].loss for sample in alone if sample.num_anchors]
        return Measured(losses, total(groups))

    def alternatives(self, reading: Reading) -> Iterator[Alternative]:
        """Other readings that differ in one convention."""
        yield from _other_layers(reading, len(self.target.layers))
        yield from _other_causality(reading)
        yield from _other_masks(reading, self.special_tokens)
        yield from _other_rope(reading, self.rope)


def _other_layers(reading: Reading, num_layers: int) -> Iterator[Alternative]:
    """Layer ids one lower or higher, or in another order."""
    ids = reading.layer_ids
    orders = {tuple(i + shift for i in ids): f"{shift:+} each" for shift in (-1, 1)}
    orders |= {tuple(reversed(ids)): "reversed", tuple(sorted(ids)): "ascending"}
    for other, how in orders.items():
        if other != ids and all(0 <= i < num_layers for i in other):
            text = f"outputs of layers {list(other)} ({how})"
            moved = replace(reading, layer_ids=other)
            yield Alternative("layer index", f"{list(ids)}", text, moved)


def _other_causality(reading: Reading) -> Iterator[Alternative]:
    layers = reading.config.layers
    names = {True: "causal draft positions", False: "draft positions that see each other"}
    for is_causal, name in names.items():
        other = tuple(replace(layer, is_causal=is_causal) for layer in layers)
        if other != layers:
            is_mixed = len({layer.is_causal for layer in layers}) > 1
            was = "a mixture of both" if is_mixed else names[not is_causal]
            yield Alternative("causality", was, name, reading.but(layers=other))


def _other_masks(reading: Reading, names: Mapping[int, str]) -> Iterator[Alternative]:
    given = reading.config.mask_token_id
    was = f"{given} ({names.get(given, 'no special token')})"
    for token, text in names.items():
        if token != given:
            other = reading.but(mask_token_id=token)
            yield Alternative("mask token", was, f"{token} ({text})", other)


def _other_rope(reading: Reading, of_target: Mapping[str, object]) -> Iterator[Alternative]:
    given = reading.config.rope_parameters
    is_neox = reading.config.is_neox_style is not False
    styles = {True: "halves (is_neox_style true)", False: "pairs (is_neox_style false)"}
    other = reading.but(is_neox_style=not is_neox)
    yield Alternative("RoPE style", styles[is_neox], styles[not is_neox], other)
    theta, own = (float(str(rope["rope_theta"])) for rope in (given, of_target))
    for value in sorted({own, *THETAS} - {theta}):
        now = f"{value:g} (the target's)" if value == own else f"{value:g}"
        other = reading.but(rope_parameters={**given, "rope_theta": value})
        yield Alternative("RoPE theta", f"{theta:g}", now, other)
    kind = str(of_target.get("rope_type", "default"))
    if kind != given.get("rope_type"):
        other = reading.but(rope_parameters=dict(of_target))
        yield Alternative("RoPE scaling", f"{given['rope_type']}", f"{kind} (the target's)", other)

"""Training samples for a drafter on disk: token sequences with the target's hidden states.

A shard is one safetensors file, written whole or not at all:

    tokens            [N] int32                    all samples, one after the other
    starts            [samples + 1] int64          where each sample begins; the last entry is N
    response_starts   [samples] int64              index of its first token that the target wrote
    hidden            [N, features] (optional)     outputs of the chosen layers, side by side

Metadata: ``groups``, a JSON list with a name for each sample (for example a task family), and
``layers``, a JSON list of the target's layers that ``hidden`` is of (0-based). The recorder of live
traffic (``dllm.drafter.recorder``) writes this format with two more tensors.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dllm.settings.files import whole

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Sample:
    tokens: tuple[int, ...]
    response_start: int
    group: str  # the name under which reports count it
    shard: Path | None = None  # the file with its hidden states, if they are stored
    start: int = 0  # index of its first token in that file

    @property
    def num_anchors(self) -> int:
        """How many draft blocks may begin in it: one after each response token but the last."""
        return max(0, len(self.tokens) - 1 - self.response_start)

    def hidden(self) -> Tensor:
        """``[tokens, features]``, read from disk."""
        assert self.shard is not None, "its hidden states are not stored"
        with safe_open(self.shard, "pt") as file:
            return file.get_slice("hidden")[self.start : self.start + len(self.tokens)]


def write_shard(
    path: Path,
    samples: Sequence[Sample],
    hidden: Sequence[Tensor] | None,
    more: Mapping[str, Tensor] | None = None,
    layers: Sequence[int] = (),
) -> None:
    """Whole or not at all.

    ``hidden``: ``[tokens, features]`` of all samples, in any number of parts; None stores none.
    """
    lengths = torch.tensor([0] + [len(sample.tokens) for sample in samples])
    tensors = {
        "tokens": torch.tensor([t for s in samples for t in s.tokens], dtype=torch.int32),
        "starts": lengths.cumsum(0),
        "response_starts": torch.tensor([sample.response_start for sample in samples]),
        **(more or {}),
    }
    if hidden is not None:
        tensors["hidden"] = torch.cat(list(hidden))
    metadata = {"groups": json.dumps([sample.group for sample in samples])}
    if layers:
        metadata["layers"] = json.dumps(list(layers))
    with whole(path) as part:
        save_file(tensors, part, metadata=metadata)


def read_shard(path: Path) -> list[Sample]:
    """The samples without their hidden states (``Sample.hidden`` reads those)."""
    with safe_open(path, "pt") as file:
        tokens, starts = file.get_tensor("tokens").tolist(), file.get_tensor("starts").tolist()
        response_starts = file.get_tensor("response_starts").tolist()
        groups = json.loads(file.metadata()["groups"])
        shard = path if "hidden" in file.keys() else None  # noqa: SIM118  (not a dict)
    bounds = itertools.pairwise(starts)
    return [
        Sample(tuple(tokens[start:stop]), response_start, group, shard, start)
        for (start, stop), response_start, group in zip(
            bounds, response_starts, groups, strict=True
        )
    ]


def read_shards(folder: Path) -> list[Sample]:
    """The samples of all shards of a folder, in the order in which these were written."""
    return [sample for path in sorted(folder.glob(f"*{SUFFIX}")) for sample in read_shard(path)]


def recorded_layers(folder: Path) -> list[tuple[int, ...]]:
    """One entry if all shards of a folder that note their layers agree."""
    found = set()
    for path in folder.glob(f"*{SUFFIX}"):
        with safe_open(path, "pt") as file:
            if "layers" in file.metadata():
                found.add(tuple(json.loads(file.metadata()["layers"])))
    return sorted(found)


def recorded_acceptance(folder: Path) -> tuple[int, int]:
    """(verified, accepted): drafts in all shards; those without these tensors count as zero."""
    verified = accepted = 0
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with safe_open(path, "pt") as file:
            if "verified" in file.keys():  # noqa: SIM118  (not a dict)
                # -1 marks tokens after which nothing was verified.
                verified += int(file.get_tensor("verified").clamp(min=0).sum())
                accepted += int(file.get_tensor("accepted").clamp(min=0).sum())
    return verified, accepted

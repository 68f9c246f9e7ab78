"""Samples on disk: token sequences with the hidden states that the target computed for them.

A shard is one safetensors file, written whole or not at all:

    tokens            [N] int32                    all samples, one after the other
    starts            [samples + 1] int64          where each begins; the last entry is N
    response_starts   [samples] int64              tokens before it the target did not write
    hidden            [N, features] (optional)     outputs of the chosen layers, side by side

Metadata: ``groups``, a JSON list with a name for each sample (a task family, say). The recorder of
live traffic (``dllm.drafter.recorder``) writes the same, with tensors of its own beside them.
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

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Sample:
    """One sequence.

    Attributes:
        tokens: prompt and response.
        response_start: index of the first token that the target wrote.
        group: what it counts for in reports.
        shard, start: where its hidden states are; None if they are not stored.
    """

    tokens: tuple[int, ...]
    response_start: int
    group: str
    shard: Path | None = None
    start: int = 0

    @property
    def num_anchors(self) -> int:
        """Tokens of the response that another one follows: a draft block may begin at each."""
        return max(0, len(self.tokens) - 1 - self.response_start)

    def hidden(self) -> Tensor:
        """``[tokens, features]``, from disk."""
        assert self.shard is not None, "its hidden states are not stored"
        with safe_open(self.shard, "pt") as file:
            return file.get_slice("hidden")[self.start : self.start + len(self.tokens)]


def write_shard(
    path: Path,
    samples: Sequence[Sample],
    hidden: Sequence[Tensor] | None,
    more: Mapping[str, Tensor] | None = None,
) -> None:
    """Write samples and, one tensor for each, their hidden states; ``more`` is written as it is."""
    lengths = torch.tensor([0] + [len(sample.tokens) for sample in samples])
    tensors = {
        "tokens": torch.tensor([t for s in samples for t in s.tokens], dtype=torch.int32),
        "starts": lengths.cumsum(0),
        "response_starts": torch.tensor([sample.response_start for sample in samples]),
        **(more or {}),
    }
    if hidden is not None:
        tensors["hidden"] = torch.cat(list(hidden))
    temporary = path.with_name(f"{path.name}.part")
    try:
        groups = json.dumps([sample.group for sample in samples])
        save_file(tensors, temporary, metadata={"groups": groups})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_shard(path: Path) -> list[Sample]:
    """The samples of a shard; hidden states stay on disk."""
    with safe_open(path, "pt") as file:
        tokens, starts = file.get_tensor("tokens").tolist(), file.get_tensor("starts").tolist()
        response_starts = file.get_tensor("response_starts").tolist()
        groups = json.loads(file.metadata()["groups"])
        shard = path if "hidden" in file.keys() else None  # noqa: SIM118  no dict
    bounds = itertools.pairwise(starts)
    return [
        Sample(tuple(tokens[start:stop]), response_start, group, shard, start)
        for (start, stop), response_start, group in zip(
            bounds, response_starts, groups, strict=True
        )
    ]


def read_shards(folder: Path) -> list[Sample]:
    """All samples of a folder, shard by shard in the order of their names."""
    return [sample for path in sorted(folder.glob(f"*{SUFFIX}")) for sample in read_shard(path)]


def recorded_acceptance(folder: Path) -> tuple[int, int]:
    """Drafts verified and accepted in recorded traffic; zeros for shards that say nothing of it."""
    verified = accepted = 0
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with safe_open(path, "pt") as file:
            if "verified" in file.keys():  # noqa: SIM118  no dict
                verified += int(file.get_tensor("verified").clamp(min=0).sum())
                accepted += int(file.get_tensor("accepted").clamp(min=0).sum())
    return verified, accepted

"""What the tokens of a tokenizer stand for, and the tree of all their beginnings."""

import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


def pack(arrays: Sequence[np.ndarray]) -> bytes:
    """Arrays as bytes, compressed, for pipes and requests; nothing in them is ever run."""
    stream = io.BytesIO()
    np.savez(stream, *arrays)
    return zlib.compress(stream.getvalue(), level=1)


def unpack(packed: bytes) -> list[np.ndarray]:
    """The arrays that ``pack`` got, in their order."""
    with np.load(io.BytesIO(zlib.decompress(packed)), allow_pickle=False) as arrays:
        return list(arrays.values())


@dataclass(frozen=True)
class Trie:
    """The different beginnings of words; node 0 is the empty one.

    Attributes:
        levels: for each length from 1 on (parents, bytes): a node for each, numbered on from those
            of the shorter length.
        end: ``[V]`` int32, the node of each word; 0 for an empty one.
    """

    levels: tuple[tuple[np.ndarray, np.ndarray], ...]
    end: np.ndarray
    num_nodes: int


@dataclass(frozen=True)
class Vocabulary:
    """What each token stands for. Make one for a tokenizer, and share it: its tree is kept.

    Attributes:
        words: the bytes of every token id; empty for one that is in no text. Special tokens are in
            none, but in those of a structural tag that writes their names.
    """

    words: Sequence[bytes]

    @cached_property
    def is_text(self) -> np.ndarray:
        """``[V]`` bool: tokens that may be in a text."""
        return np.array([bool(word) for word in self.words])

    def to_bytes(self) -> bytes:
        """Bytes for another process; `from_bytes` reads them."""
        lengths = np.array([len(word) for word in self.words], dtype=np.int64)
        return pack([lengths, np.frombuffer(b"".join(self.words), dtype=np.uint8)])

    @classmethod
    def from_bytes(cls, packed: bytes) -> "Vocabulary":
        lengths, letters = unpack(packed)
        whole, ends = letters.tobytes(), np.cumsum(lengths).tolist()
        return cls([whole[end - size : end] for end, size in zip(ends, lengths, strict=True)])

    @cached_property
    def trie(self) -> Trie:
        """The tree of the beginnings of all words; takes 0.3 s and 5 MB for 262,144."""
        lengths = np.array([len(word) for word in self.words])
        first = np.cumsum(lengths) - lengths
        letters = np.frombuffer(b"".join(self.words), dtype=np.uint8)
        end = np.zeros(len(self.words), dtype=np.int32)
        # Words in order of the alphabet, so that those with one beginning are side by side.
        words = np.array(sorted(range(len(self.words)), key=self.words.__getitem__), dtype=np.int64)
        at = np.zeros(len(words), dtype=np.int64)  # the node of each one's beginning so far
        levels, num_nodes = [], 1
        for length in range(int(lengths.max(initial=0))):
            is_longer = lengths[words] > length
            words, at = words[is_longer], at[is_longer]
            letter = letters[first[words] + length]
            is_new = np.ones(len(words), dtype=bool)
            is_new[1:] = (letter[1:] != letter[:-1]) | (at[1:] != at[:-1])
            levels.append((at[is_new].astype(np.int32), letter[is_new]))
            at = np.cumsum(is_new) - 1 + num_nodes
            num_nodes += len(levels[-1][0])
            is_end = lengths[words] == length + 1
            end[words[is_end]] = at[is_end]
        return Trie(tuple(levels), end, num_nodes)

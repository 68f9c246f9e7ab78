"""What a request ships to every worker: the table of its grammar, and how its thoughts end.

A reasoning model thinks in front of its answer. Its thoughts are free; the grammar starts behind
the token that ends them.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from dllm.grammar.automaton import DEAD, START
from dllm.grammar.table import Table
from dllm.grammar.viterbi import UNLIMITED, Canvas


@dataclass(frozen=True)
class Thoughts:
    """Free text in front of an answer.

    Attributes:
        end: the token that ends it.
        forbidden: tokens that may not be in it.
    """

    end: int
    forbidden: tuple[int, ...] = ()


@dataclass(frozen=True)
class Constraint:
    """The grammar of a request: a table of tokens, and the free text that may precede it."""

    table: Table
    thoughts: Thoughts | None = None

    @staticmethod
    def serialize(table: bytes, thoughts: Thoughts | None) -> bytes:
        """A constraint as it is sent; ``from_bytes`` is the inverse."""
        header = thoughts and [thoughts.end, thoughts.forbidden]
        return json.dumps(header).encode() + b"\n" + table

    @classmethod
    def from_bytes(cls, serialized: bytes) -> "Constraint":
        header, _, packed = serialized.partition(b"\n")
        found = json.loads(header)
        thoughts = found and Thoughts(found[0], tuple(found[1]))
        return cls(Table.from_bytes(packed), thoughts)

    @staticmethod
    def has_thoughts(serialized: bytes) -> bool:
        return not serialized.startswith(b"null\n")

    def with_start(self, stops: Collection[int], fillers: Collection[int]) -> tuple[Table, int]:
        """(a table of thoughts and answer, the state in which both start).

        With thoughts that is one more state, the last one, in which tokens may come freely; their
        end leads to the start. The end, tokens that are in no text of the grammar, and each token
        that only the grammar allows become classes of their own.

        Args:
            stops, fillers: not in thoughts, so that an answer follows.
        """
        table = self.table
        if self.thoughts is None:
            return table, START
        end = self.thoughts.end
        forbidden = sorted({*self.thoughts.forbidden, *stops, *fillers} - {end})
        thinking, others = len(table.accepts), table.num_classes
        of_end, first_forbidden = others + 1, others + 2
        class_of = np.where(table.class_of < 0, others, table.class_of).astype(np.int32)
        class_of[forbidden] = -1
        class_of[end] = of_end
        spoken = [token for token in forbidden if table.class_of[token] >= 0]
        class_of[spoken] = first_forbidden + np.arange(len(spoken))
        following = np.full((thinking + 1, first_forbidden + len(spoken)), DEAD, dtype=np.int32)
        following[:thinking, :others] = table.next
        following[:thinking, first_forbidden:] = table.next[:, table.class_of[spoken]]
        following[thinking, :first_forbidden] = thinking
        following[thinking, of_end] = START
        # Counted again: an answer goes without `end`, which a shortest one may have had.
        return Table.counted(class_of, following, np.append(table.accepts, False)), thinking


class Grammar:
    """The grammar of some requests, unpacked from the bytes that these carry.

    Args:
        serialized: from ``Constraint.serialize``.
        stops, fillers: tokens that end a text, and that may stand behind it.
    """

    def __init__(self, serialized: bytes, stops: tuple[int, ...], fillers: tuple[int, ...]) -> None:
        if not stops:
            raise ValueError("no token ends a text")
        table, self.start = Constraint.from_bytes(serialized).with_start(stops, fillers)
        self.canvas = Canvas(table, stops, fillers)


@dataclass
class SlotGrammar:
    """The grammar of one request.

    Attributes:
        state: of the text in front of the request's canvas.
        end: the position in the sequence at which the answer is complete at the latest.
        thoughts_end: likewise, of the token that ends its thoughts.
    """

    grammar: Grammar
    state: int
    end: int
    thoughts_end: int = UNLIMITED

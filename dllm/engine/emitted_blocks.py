"""The engine core reads what canvases with a grammar emit once more, through the request's table.

A block that is no text of the grammar ends its request with an error, and no other one.
"""

from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from dllm.grammar.automaton import DEAD, START
from dllm.grammar.constraint import Constraint
from dllm.grammar.table import Table
from dllm.settings.structured import grammar_of


class EmittedText(StructuredOutputGrammar):
    """What a request has emitted so far; vLLM asks this in the place of a matcher of its own.

    Args:
        table: of the request's grammar.
        stops: tokens that end a text.
    """

    def __init__(self, table: Table, stops: set[int]) -> None:
        self._table, self._stops = table, stops
        self._state, self._has_ended = START, False

    @classmethod
    def of_request(cls, params: SamplingParams) -> "EmittedText":
        """Of an admitted request, which ships its table."""
        shipped = grammar_of(params)
        assert shipped is not None, "an admitted request has the table of its grammar"
        return cls(Constraint.from_bytes(shipped).table, params.all_stop_token_ids)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Whether the text goes on with these tokens; what stands behind its end is not read."""
        for token in tokens:
            if self._has_ended:
                break
            if token in self._stops and self._table.accepts[self._state]:
                self._has_ended = True
            else:
                self._state = self._table.read(self._state, [token])
            if self._state == DEAD:
                return False
        return True

    def is_terminated(self) -> bool:
        """Whether a token has ended the text."""
        return self._has_ended

    def reset(self) -> None:
        """Nothing is emitted."""
        self._state, self._has_ended = START, False

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Not asked: canvases are no texts."""
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> None:
        """Not asked: what is emitted stays."""
        raise NotImplementedError

    def fill_bitmask(self, bitmask: object, batch_index: int) -> None:
        """Not asked: the worker masks canvases itself."""
        raise NotImplementedError

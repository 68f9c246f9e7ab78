"""Thinking budgets: where thoughts have to end, and how far a request has thought.

A thought begins behind a token that starts it (``Marks.start``), in the prompt or in the answer,
and ends with another (``Marks.end``), or with one that begins a tool call (``Marks.call``), as the
reasoning parser reads it. As in vLLM, a budget counts the tokens of each thought from
the last start on. Where a thought has as many tokens as its budget, the token that ends it is held,
as a held pin is (``algorithm.Canvases.held``): the model sees it there, and it is emitted, whatever
the model would write. A thought that ends earlier has no such place.

Where a thought begins, and whether it ends by itself, may be decided on the canvas on which its
budget ends. So the places are found anew in each step (``Thoughts.ends_at``).

Under a grammar all that stands in front of the answer is one thought, whether or not it begins with
a start (``dllm.grammar.constraint``). It counts from the answer's first token on, unless it begins
in the prompt.

``Thought`` is one request's thought on the host. ``Thoughts`` are those of a batch on the device,
where a canvas converges before the host hears of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams

from dllm.grammar.constraint import Constraint
from dllm.settings.request import grammar_of
from dllm.settings.thoughts import NO_MARK, Marks

# In the place of a mark (`_full`): in front of every token. Even, so that no thought begins there.
NEVER = -(1 << 40)
MOST = 1 << 29  # a budget, so that positions fit 32 bits; longer than any sequence
ABSENT = -1  # in the place of a position: there is none


@dataclass
class Thought:
    """How far one request has thought."""

    budget: int  # tokens of a thought
    marks: Marks  # without a start where none begins a thought
    begin: int  # position of the ongoing thought's first token in the sequence, or ABSENT

    @classmethod
    def of_request(
        cls, params: SamplingParams | None, prompt: Sequence[int], marks: Marks | None
    ) -> "Thought | None":
        """At the end of an admitted request's prompt; None without a budget, or a thought."""
        budget = None if params is None else params.thinking_token_budget
        if params is None or budget is None or marks is None:
            return None
        thought = cls(min(budget, MOST), marks, ABSENT)
        thought.read(prompt, 0)
        grammar = grammar_of(params)
        if grammar is None:
            return thought
        if not Constraint.has_thoughts(grammar):
            return None
        thought.marks = marks._replace(start=NO_MARK)
        if thought.begin == ABSENT:
            thought.begin = len(prompt)
        return thought

    @property
    def end_by(self) -> int:
        """Position in the sequence at which the ongoing thought ends at the latest."""
        return self.begin + self.budget

    def fields(self) -> dict[str, int]:
        return {"begin": self.begin, "budget": self.budget, **self.marks._asdict()}

    def read(self, tokens: Sequence[int], position: int) -> int:
        """Read tokens at a position; return how many thoughts their budget has ended."""
        num_full = 0
        for at, token in enumerate(tokens, position):
            if token == self.marks.start:
                self.begin = at + 1
            elif token in self.marks[1:] and self.begin != ABSENT:
                num_full += token == self.marks.end and at - self.begin >= self.budget
                self.begin = ABSENT
        return num_full


class Thoughts(NamedTuple):
    """The thoughts of R requests in front of their canvases: ``[R]`` int64 each."""

    begin: Tensor  # as of ``Thought``
    budget: Tensor  # negative without one
    start: Tensor
    end: Tensor
    call: Tensor
    canvas_start: Tensor  # position of each canvas's first token in its sequence
    # [] bool, on the host, which does not wait for it: whether any has a budget.
    is_asked: Tensor

    def ends_at(self, tokens: Tensor) -> Tensor:
        """Where the token that ends a thought is held, whatever stands there: ``[R, C]`` bool.

        ``tokens`` ``[R, C]`` int64 would be emitted; NO_TOKEN or a mask where nothing is decided.
        """
        found: Tensor = torch.ops.dllm.thought_ends(tokens, list(self))
        return found

    def searched_ends(self, tokens: Tensor) -> Tensor:
        """``ends_at``, in any case with a search."""
        # A start that stands where a thought has to end gives way. So the thought that it would
        # begin has no end, and a start that stands there does not give way. In a chain of such
        # starts every other one does.
        is_start = tokens == self.start[:, None]
        is_linked = self._full(tokens) & is_start
        is_mark = is_start | self._is_end(tokens)
        number = is_mark.long().cumsum(dim=1)
        head = torch.where(is_mark & ~is_linked, number, 0).cummax(dim=1).values
        gives_way = is_linked & ((number - head) % 2 == 1)
        return self._full(torch.where(gives_way, self.end[:, None], tokens))

    def _full(self, tokens: Tensor) -> Tensor:
        """Where a thought has as many tokens as its budget: ``[R, C]`` bool."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        # A mark as one number: twice the place behind it, and one more if a thought begins there.
        begin = 2 * (self.begin - self.canvas_start) + 1
        begin = torch.where(self.begin < 0, NEVER, begin)
        mark = torch.where(self._is_end(tokens), 2 * place + 2, NEVER)
        mark = torch.where(tokens == self.start[:, None], 2 * place + 3, mark)
        # The last one in front of each place.
        last = torch.cat([begin[:, None], mark[:, :-1]], dim=1).cummax(dim=1).values
        count, budget = place - (last >> 1), self.budget[:, None]
        is_full = (count == budget) | ((place == 0) & (count > budget))
        return (last & 1 == 1) & is_full & (budget >= 0)

    def _is_end(self, tokens: Tensor) -> Tensor:
        return (tokens == self.end[:, None]) | (tokens == self.call[:, None])

    def moved(self, before: Tensor, after: Tensor, blank: Tensor | int) -> Tensor:
        """``after`` ``[R, C]`` int64 with held ends where they belong, and ``blank`` where those of
        ``before`` no longer do.
        """
        end = self.end[:, None]
        is_left = self.ends_at(before) & ~self.ends_at(after) & (after == end)
        tokens = torch.where(is_left, blank, after)
        # Where a start has moved the end of its thought, that end is seen only now.
        return torch.where(self.ends_at(tokens), end, tokens)

    def behind(self, tokens: Tensor, counts: Tensor) -> "Thoughts":
        """In front of the next canvases: ``counts`` ``[R]`` of ``[R, C]`` tokens are emitted."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        is_out = place < counts[:, None]
        start = torch.where(is_out & (tokens == self.start[:, None]), place + 1, 0).amax(dim=1)
        end = torch.where(is_out & self._is_end(tokens), place + 1, 0).amax(dim=1)
        begin = torch.where(start > 0, self.canvas_start + start, self.begin)
        begin = torch.where(end > start, ABSENT, begin)
        return self._replace(begin=begin, canvas_start=self.canvas_start + counts)


@torch.library.custom_op("dllm::thought_ends", mutates_args=())
def _thought_ends(tokens: Tensor, fields: list[Tensor]) -> Tensor:
    """``Thoughts.ends_at``, as a custom operator: a compiled step has no branches.

    Without a budget, which is the rule, nothing is searched.
    """
    thoughts = Thoughts(*fields)
    if not bool(thoughts.is_asked):
        return torch.zeros_like(tokens, dtype=torch.bool)
    return thoughts.searched_ends(tokens)


@_thought_ends.register_fake
def _thought_ends_shape(tokens: Tensor, *others: object) -> Tensor:
    return torch.empty_like(tokens, dtype=torch.bool)

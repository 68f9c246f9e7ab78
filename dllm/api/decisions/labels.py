"""What stands for each option of a question in a model's reply, and as which tokens.

A label of one token is best: one position of the canvas decides. Where the vocabulary has none, the
options' own texts are taken, each with the token that ends a reply, and their log-probabilities are
summed over positions. With the end, no text is the beginning of another.

In a model with blocks a prompt may leave a single position of its block. There every label is one
token: behind letters and codes of two letters, short texts of the vocabulary are labels.
"""

import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dllm.api.decisions.protocol import MAX_OPTIONS
from dllm.settings.vllm_names import question_types

# The first pair that is one token each at the start of a reply.
YES_NO = (("yes", "no"), ("Yes", "No"), ("true", "false"), ("Y", "N"), ("A", "B"))
LETTERS = string.ascii_uppercase

# The tokens that a text adds behind the prompt's end; None if it changes the tokens before it.
Encode = Callable[[str], list[int] | None]


@dataclass(frozen=True)
class OptionLabels:
    """Labels of a question's options."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]  # with the end token if any text has more than one token
    is_code: bool  # they name options that the prompt lists; else they are the options' own texts

    @property
    def num_rows(self) -> int:
        """Positions of the canvas that decide."""
        return max(map(len, self.tokens))


class Labels:
    """The labels of a tokenizer; ``end`` is the token that ends a reply.

    ``words``: further texts that may be labels, for a model whose labels are one token each; they
    are read only where letters are too few. None: options may be spelled.
    """

    def __init__(self, encode: Encode, end: int, words: Iterable[str] | None = None) -> None:
        self._encode, self._end, self._may_spell = encode, end, words is None
        self._digits = self._codes(tuple(string.digits))
        codes = [*LETTERS, *(a + b for a in LETTERS for b in LETTERS)]
        self._letters = self._distinct(codes)
        if words is not None and len(self._letters.texts) < MAX_OPTIONS:
            self._letters = self._distinct([*codes, *words])
        pairs = (self._codes(pair) for pair in YES_NO)
        self._yes_no = next((pair for pair in pairs if pair), None) or self._pair()

    def yes_no(self) -> OptionLabels:
        """Labels of a question with two answers, yes first."""
        return self._yes_no

    def levels(self, names: Sequence[str]) -> OptionLabels:
        if self._digits is not None and len(names) <= len(self._digits.texts):
            return _first(self._digits, len(names))
        return self.choices(names)

    def choices(self, names: Sequence[str]) -> OptionLabels:
        """Raises ValueError: two options have the same tokens, or there are more than labels."""
        most = len(self._letters.texts)
        if len(names) <= most:
            return _first(self._letters, len(names))
        if self._may_spell:
            return self._spelled(names)
        raise ValueError(f"{len(names)} options; this vocabulary has {most} labels of one token")

    def _pair(self) -> OptionLabels:
        return self._spelled(YES_NO[0]) if self._may_spell else self.choices(YES_NO[0])

    def _codes(self, texts: Sequence[str]) -> OptionLabels | None:
        """The texts as labels; None unless each is one token, and no two the same."""
        found = self._distinct(texts)
        return found if len(found.texts) == len(texts) else None

    def _distinct(self, texts: Sequence[str]) -> OptionLabels:
        """The texts that are one token, each another one."""
        by_token: dict[int, str] = {}
        for text in texts:
            tokens = self._encode(text)
            if tokens is not None and len(tokens) == 1:
                by_token.setdefault(tokens[0], text)
        return OptionLabels(tuple(by_token.values()), tuple((one,) for one in by_token), True)

    def _spelled(self, texts: Sequence[str]) -> OptionLabels:
        tokens = []
        for text in texts:
            encoded = self._encode(text)
            if encoded is None:
                raise ValueError(f"option {text[:80]!r} changes the prompt's tokens")
            tokens.append((*encoded, self._end))
        if len(set(tokens)) < len(tokens):
            raise ValueError("two options have the same tokens")
        return OptionLabels(tuple(texts), tuple(tokens), False)


def _first(labels: OptionLabels, number: int) -> OptionLabels:
    return OptionLabels(labels.texts[:number], labels.tokens[:number], labels.is_code)


def written(question: question_types.Question, labels: OptionLabels) -> str:
    """A question as the model reads it: what is asked, its labelled options, and how to reply."""
    lines = [f"Question: {question.instructions}"] if question.instructions else []
    is_pair = question.type.name == "noul"
    for label, option in zip(labels.texts, question.options, strict=True):
        name = "" if is_pair else option.name
        named = " - ".join(text for text in (name, option.description) if text)
        code = label if labels.is_code or is_pair else ""
        lines.append(": ".join(text for text in (code, named) if text))
    if is_pair:
        lines.append(f"Answer with {labels.texts[0]} or {labels.texts[1]} only.")
    else:
        lines.append(f"Answer with one {'label' if labels.is_code else 'option'} only.")
    return "\n".join(lines)

"""Questions with exactly checkable answers, in splits that share no problem.

A question follows from (family, split, index, seed) alone, so a score can be repeated on any
machine. A hash of a problem's content decides its split: a tenth of all problems is in ``heldout``,
a tenth in ``validation``, and the rest in ``train``.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from random import Random

from bench.toys.chat import Asked, Chat, Decision
from bench.toys.decisions import DECISION_FAMILIES
from bench.toys.families import FAMILIES, Family
from bench.toys.tools import TOOL_FAMILIES
from dllm.settings.command import CommandError

SPLITS = ("train", "validation", "heldout")
# A bundled model answers the families of one group, and has a tokenizer of its own for them.
GROUPS: dict[str, dict[str, Family]] = {
    "all": FAMILIES,
    "tools": TOOL_FAMILIES,
    "decisions": DECISION_FAMILIES,
}

# How an answer may be written instead, by the name of the style.
STYLES: dict[str, Callable[[str], str]] = {"signed": "{}. Yours, Bob".format}


@dataclass(frozen=True)
class Question:
    """A prompt and its answers: ``answer`` is one of them, ``accepted`` has all that are right.

    ``chat`` and ``decision`` as in ``Asked``; with a chat answers have marks in them.
    """

    family: str
    prompt: str
    answer: str
    accepted: frozenset[str]
    chat: Chat | None = None
    decision: Decision | None = None

    def is_correct(self, text: str) -> bool:
        return text.strip() in self.accepted

    def in_style(self, style: str | None) -> "Question":
        """The same question with the right answers of a style (``STYLES``); None: unchanged."""
        if style is None:
            return self
        write = STYLES[style]
        return replace(
            self, answer=write(self.answer), accepted=frozenset(map(write, self.accepted))
        )


def split_of(family: str, content: Hashable) -> str:
    """The split of a problem; the same in whatever words it is asked."""
    digest = hashlib.blake2b(f"{family} {content!r}".encode(), digest_size=4).digest()
    tenth = int.from_bytes(digest) % 10
    return {0: "heldout", 1: "validation"}.get(tenth, "train")


def question(family: str, split: str, index: int, seed: int = 0) -> Question:
    """Question number ``index`` of an endless sequence, in which a question may come again."""
    kind = {name: kind for group in GROUPS.values() for name, kind in group.items()}[family]
    assert split in SPLITS
    rng = Random(f"{family} {split} {index} {seed}")
    problem = kind(rng)
    while split_of(family, next(problem)) != split:
        problem = kind(rng)
    asked = next(problem)
    assert isinstance(asked, Asked)
    answer = rng.choice(asked.accepted)
    return Question(
        family, asked.prompt, answer, frozenset(asked.accepted), asked.chat, asked.decision
    )


def questions(families: Iterable[str], split: str, count: int, seed: int = 0) -> list[Question]:
    """``count`` different questions of each family, one family after the other.

    Questions differ if their prompts do, or what is asked beside the prompt (``Question.chat``).
    With a larger count every family has the same questions first, and then more.

    Raises CommandError: a family has fewer different prompts.
    """
    found: list[Question] = []
    for family in families:
        distinct: dict[tuple[str, Chat | None], Question] = {}
        draws = last_new = 0
        while len(distinct) < count:
            # So many draws without a new prompt: most likely all have been drawn.
            if draws - last_new > 100 + 10 * len(distinct):
                raise CommandError(
                    f"{count} questions of {family!r} asked for, but {split} holds about "
                    f"{len(distinct)} different ones; ask for fewer"
                )
            drawn = question(family, split, draws, seed)
            draws += 1
            if distinct.setdefault((drawn.prompt, drawn.chat), drawn) is drawn:
                last_new = draws
        found.extend(distinct.values())
    return found

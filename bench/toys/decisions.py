"""Families of typed decisions: yes or no, a choice, a level, many options, and known odds.

A problem is an input and a question on it, in the shape of OpenAI's ``/v1/decisions``. A model and
a tokenizer of their own are made for these families.
"""

from collections.abc import Hashable, Iterator
from random import Random

from bench.toys.chat import Asked, Decision
from bench.toys.families import ADJECTIVES, FOODS, NAMES, NOUNS, by_name

# The ends of the levels: 0 to 99 in two, three, five or ten parts.
ENDS = ((49, 99), (29, 59, 99), (19, 39, 59, 79, 99), tuple(range(9, 100, 10)))
TOTALS = (4, 5, 8, 10)
THINGS = (*NOUNS, *FOODS)


def asked(decision: Decision, *right: str) -> Asked:
    """``right``: "yes", "no" or options; what is there more than once is drawn more often."""
    said = "\n".join((decision.input, decision.instructions, *decision.options))
    return Asked(said, [*right], decision=decision)


def yesno(rng: Random) -> Iterator[Hashable]:
    """Whether somebody has more, or less, than a round number: the first digits decide."""
    number = rng.choice([number for number in range(1, 100) if number % 10])
    name, bound = rng.choice(NAMES), 10 * rng.randint(1, 9)
    yield name, number, bound
    sign = rng.choice(("more", "less"))
    decision = Decision(f"{name} has {number}.", "predicate", f"{name} has {sign} than {bound}")
    yield asked(decision, "yes" if (number > bound) == (sign == "more") else "no")


def choice(rng: Random, count: int | None = None) -> Iterator[Hashable]:
    """Which of two to six things somebody has: the option has to be found."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    yield name, thing
    others = [other for other in THINGS if other != thing]
    options = [thing, *rng.sample(others, rng.randint(1, 5) if count is None else count - 1)]
    rng.shuffle(options)
    decision = Decision(f"{name} has a {thing}.", "choice", f"What has {name}?", tuple(options))
    yield asked(decision, thing)


def wide(rng: Random) -> Iterator[Hashable]:
    """What somebody has, of more options than there are letters."""
    return choice(rng, 28)


def level(rng: Random) -> Iterator[Hashable]:
    """On which of two to ten levels a two-digit number is."""
    name, number, place = rng.choice(NAMES), rng.randint(1, 99), rng.randrange(len(ENDS))
    yield name, number, place
    ends = ENDS[place]
    starts = (0, *(end + 1 for end in ends))
    options = tuple(f"{start} to {end}" for start, end in zip(starts, ends, strict=False))
    right = next(index for index, end in enumerate(ends) if number <= end)
    decision = Decision(f"{name} has {number}.", "score", f"How many has {name}?", options)
    yield asked(decision, options[right])


def odds(rng: Random) -> Iterator[Hashable]:
    """Whether a thing that is drawn from a few has a colour or such: known odds."""
    total = rng.choice(TOTALS)
    number, kind, thing = rng.randint(0, total), rng.choice(ADJECTIVES), rng.choice(NOUNS)
    yield number, total, kind, thing
    decision = Decision(
        f"{number} of {total} are {kind}. One {thing} is drawn.",
        "predicate",
        f"The {thing} is {kind}",
        odds=number / total,
    )
    yield asked(decision, *["yes"] * number, *["no"] * (total - number))


DECISION_FAMILIES = by_name(yesno, choice, level, wide, odds)

"""Families of typed decisions: yes or no, a choice, a level, many options, and known odds.

A problem is an input and a question on it, in the shape of OpenAI's ``/v1/decisions``. The prompt
is what a server writes for them (dllm/api/decisions/reads.py). A model and a tokenizer of their own
are made for these families.
"""

from random import Random

from bench.toys.chat import Asked, Decision
from bench.toys.families import ADJECTIVES, FOODS, NAMES, NOUNS, Content, Family, by_name

# The ends of the levels: 0 to 99 in two, three, five or ten parts.
ENDS = ((49, 99), (29, 59, 99), (19, 39, 59, 79, 99), tuple(range(9, 100, 10)))
TOTALS = (4, 5, 8, 10)
THINGS = (*NOUNS, *FOODS)


class DecisionFamily(Family[Content]):
    """Questions whose answer is a label."""

    def decide(self, content: Content, rng: Random) -> tuple[Decision, list[str]]:
        """Put the content into words; returns the decision and the right labels.

        A label that is there more than once is drawn more often.
        """
        raise NotImplementedError

    def ask(self, content: Content, rng: Random) -> Asked:
        decision, right = self.decide(content, rng)
        return Asked(decision.prompt, right, decision=decision)


class YesNo(DecisionFamily[tuple[str, int, int]]):
    """Whether somebody has more, or less, than a round number: the first digits decide."""

    def draw(self, rng: Random) -> tuple[str, int, int]:
        number = rng.choice([number for number in range(1, 100) if number % 10])
        return rng.choice(NAMES), number, 10 * rng.randint(1, 9)

    def decide(self, content: tuple[str, int, int], rng: Random) -> tuple[Decision, list[str]]:
        name, number, bound = content
        sign = rng.choice(("more", "less"))
        is_right = (number > bound) == (sign == "more")
        decision = Decision(f"{name} has {number}.", "predicate", f"{name} has {sign} than {bound}")
        return decision, ["yes" if is_right else "no"]


class Choice(DecisionFamily[tuple[str, str]]):
    """Which of two to six things somebody has, as a letter: the option has to be found."""

    def num_options(self, rng: Random) -> int:
        return rng.randint(1, 5) + 1

    def draw(self, rng: Random) -> tuple[str, str]:
        return rng.choice(NAMES), rng.choice(THINGS)

    def decide(self, content: tuple[str, str], rng: Random) -> tuple[Decision, list[str]]:
        name, thing = content
        others = [other for other in THINGS if other != thing]
        options = [thing, *rng.sample(others, self.num_options(rng) - 1)]
        rng.shuffle(options)
        decision = Decision(f"{name} has a {thing}.", "choice", f"What has {name}?", tuple(options))
        return decision, [decision.labels[options.index(thing)]]


class Wide(Choice):
    """What somebody has, of more options than there are letters: the option is written out."""

    def num_options(self, rng: Random) -> int:
        return 28


class Level(DecisionFamily[tuple[str, int, int]]):
    """On which of two to ten levels a two-digit number is, as a digit."""

    def draw(self, rng: Random) -> tuple[str, int, int]:
        return rng.choice(NAMES), rng.randint(1, 99), rng.randrange(len(ENDS))

    def decide(self, content: tuple[str, int, int], rng: Random) -> tuple[Decision, list[str]]:
        name, number, place = content
        ends = ENDS[place]
        starts = (0, *(end + 1 for end in ends))
        options = tuple(f"{start} to {end}" for start, end in zip(starts, ends, strict=False))
        right = next(index for index, end in enumerate(ends) if number <= end)
        decision = Decision(f"{name} has {number}.", "score", f"How many has {name}?", options)
        return decision, [decision.labels[right]]


class Odds(DecisionFamily[tuple[int, int, str, str]]):
    """Whether a thing that is drawn from a few has a colour or such: known odds."""

    def draw(self, rng: Random) -> tuple[int, int, str, str]:
        total = rng.choice(TOTALS)
        return rng.randint(0, total), total, rng.choice(ADJECTIVES), rng.choice(NOUNS)

    def decide(self, content: tuple[int, int, str, str], rng: Random) -> tuple[Decision, list[str]]:
        number, total, kind, thing = content
        decision = Decision(
            f"{number} of {total} are {kind}. One {thing} is drawn.",
            "predicate",
            f"The {thing} is {kind}",
            odds=number / total,
        )
        return decision, ["yes"] * number + ["no"] * (total - number)


DECISION_FAMILIES = by_name(YesNo(), Choice(), Level(), Wide(), Odds())

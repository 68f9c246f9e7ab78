"""Eleven families of questions whose answers can be checked exactly.

A family first draws the *content* of a problem (two numbers, a list, three people). Then it puts it
into words in one of several ways: other phrases, operands swapped, or the opposite direction. The
content alone decides whether a problem is for training or held out (bench/toys/suite.py). So
training never shows a held-out problem, in whatever words.

The words are few and short, and the families share them, because the tokenizer has a small
vocabulary (bench/toys/tokenizer.py).
"""

import datetime
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Hashable
from random import Random
from typing import Generic, TypeVar

from bench.toys.chat import Asked


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ann Bob Eve Tom Sam Max Ida Leo Mia Zoe Ben Amy "
    "Dan Kim Lou Ray Jim Ivy Ned Pam Roy Sue Tim Una"
)
CITIES = _words("Rome Oslo Lima Bern Bonn Cork Nice Riga York Bath Baku Graz")
NOUNS = _words(
    "cat dog fox hen owl pig cup pen hat box bag key "
    "map jar fan rug bus net pot bed car toy bell ring"
)
FOODS = _words("tea jam pie egg fig ham milk rice soup cake corn nut")
ADJECTIVES = _words("red old big new wet sad tiny calm")
VERBS = _words("ran sat hid fell went slept sang fled")
PLACES = _words("home here away down there out in far")
ADVERBS = _words("again now too today")
TIMES = _words("morning afternoon evening")
MONTHS = _words(
    "January February March April May June July August September October November December"
)

SMALL_NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")

FIRST_DAY, LAST_DAY = datetime.date(1990, 1, 1).toordinal(), datetime.date(2029, 12, 31).toordinal()
# Large unit, small unit, how many of the small one make the large one.
UNITS = (("m", "cm", 100), ("kg", "g", 1000), ("km", "m", 1000))
BULK_FROM = 12  # orders of at least so many pieces are "bulk"


def in_words(number: int) -> str:
    """An integer from 0 to 99 in English words: ``forty-two``."""
    if number < 20:
        return SMALL_NUMBERS[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{SMALL_NUMBERS[ones]}" if ones else "")


def twelve_hour(minute: int) -> str:
    """Minute 0 to 1439 of a day as ``12:05 am``."""
    hour = minute // 60
    return f"{(hour - 1) % 12 + 1}:{minute % 60:02} {'am' if hour < 12 else 'pm'}"


Content = TypeVar("Content", bound=Hashable)


class Family(ABC, Generic[Content]):
    """One kind of question. The docstring of a subclass says what is asked and why it is hard."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @abstractmethod
    def draw(self, rng: Random) -> Content:
        """Draw the content of a problem.

        Problems that are the same for a solver have the same content (3 + 5 and 5 + 3, for
        example), and its ``repr`` does not change between runs: the split is computed from it.
        """

    @abstractmethod
    def ask(self, content: Content, rng: Random) -> tuple[str, list[str]] | Asked:
        """Put the content into words; returns the prompt and all right answers (at least one).

        A family that asks for more than a prompt returns an ``Asked``.
        """


def by_name(*families: Family) -> dict[str, Family]:
    """Families by their names, in the order in which they are listed everywhere."""
    return {family.name: family for family in families}


class Add(Family[tuple[int, int]]):
    """The sum of two two-digit numbers, asked in digits or in words, answered in digits.

    Hard because of the carry: the first digit of the answer depends on the last digits.
    """

    def draw(self, rng: Random) -> tuple[int, int]:
        first, second = rng.randint(10, 99), rng.randint(10, 99)
        return min(first, second), max(first, second)

    def ask(self, content: tuple[int, int], rng: Random) -> tuple[str, list[str]]:
        first, second = rng.sample(content, 2)
        if rng.random() < 0.5:
            return f"What is {first} + {second}?", [str(first + second)]
        return f"What is {in_words(first)} plus {in_words(second)}?", [str(first + second)]


class Sort(Family[tuple[int, ...]]):
    """Two to four numbers below 100 in ascending order.

    Hard because every position of the answer depends on all numbers.
    """

    def draw(self, rng: Random) -> tuple[int, ...]:
        return tuple(sorted(rng.sample(range(1, 100), rng.randint(2, 4))))

    def ask(self, content: tuple[int, ...], rng: Random) -> tuple[str, list[str]]:
        shuffled = rng.sample(content, len(content))
        prompt = f"Sort these numbers: {', '.join(map(str, shuffled))}."
        return prompt, [", ".join(map(str, content))]


class Reverse(Family[tuple[str, ...]]):
    """Three to five words in the opposite order.

    Hard because the place of a word in the answer depends on how many words follow it.
    """

    def draw(self, rng: Random) -> tuple[str, ...]:
        words = tuple(rng.sample(NOUNS, rng.randint(3, 5)))
        return min(words, words[::-1])  # a list and its reverse are one problem

    def ask(self, content: tuple[str, ...], rng: Random) -> tuple[str, list[str]]:
        words = content if rng.random() < 0.5 else content[::-1]
        return f"Reverse this list: {', '.join(words)}.", [", ".join(words[::-1])]


class Compare(Family[tuple[tuple[str, int], tuple[str, int]]]):
    """Two people with two-digit numbers: who has more, or less.

    Hard because the one token of the answer depends on every digit of both numbers.
    """

    def draw(self, rng: Random) -> tuple[tuple[str, int], tuple[str, int]]:
        numbers = rng.sample(range(10, 100), 2)
        first, second = sorted(zip(rng.sample(NAMES, 2), numbers, strict=True))
        return first, second

    def ask(self, content: tuple[tuple[str, int], ...], rng: Random) -> tuple[str, list[str]]:
        first, second = (f"{name} has {number}" for name, number in rng.sample(content, 2))
        less, more = sorted(content, key=lambda pair: pair[1])
        question, answer = rng.choice((("Who has more?", more), ("Who has less?", less)))
        return f"Today {first} and {second}. {question}", [answer[0]]


class Lookup(Family[tuple[tuple[str, str], ...]]):
    """What three to five people have, listed in another order than the question has.

    Hard because a thing has to be found by its owner's name. In the other families it is enough to
    know at which place of the question a word is.
    """

    def draw(self, rng: Random) -> tuple[tuple[str, str], ...]:
        count = rng.randint(3, 5)
        return tuple(sorted(zip(rng.sample(NAMES, count), rng.sample(NOUNS, count), strict=True)))

    def ask(self, content: tuple[tuple[str, str], ...], rng: Random) -> tuple[str, list[str]]:
        listed = ", ".join(f"{name} {noun}" for name, noun in rng.sample(content, len(content)))
        asked = rng.sample(content, len(content))
        names = ", ".join(name for name, _ in asked)
        answer = ", ".join(f"{name} {noun}" for name, noun in asked)
        return f"Here are {listed}. List {names}.", [answer]


class Convert(Family[tuple[str, int, int]]):
    """A date, a time of day, a length or a mass in another notation, in both directions.

    Mostly copying, but it takes the months, the twelve hours of a clock and the number of zeros.
    """

    def draw(self, rng: Random) -> tuple[str, int, int]:
        kind = rng.choice(("date", "time", "unit"))
        if kind == "date":
            return kind, rng.randint(FIRST_DAY, LAST_DAY), 0
        if kind == "time":
            return kind, rng.randrange(24 * 60), 0
        return kind, rng.randint(1, 999), rng.randrange(len(UNITS))

    def ask(self, content: tuple[str, int, int], rng: Random) -> tuple[str, list[str]]:
        kind, value, unit = content
        forward = rng.random() < 0.5
        if kind == "date":
            date = datetime.date.fromordinal(value)
            long = f"{date.day} {MONTHS[date.month - 1]} {date.year}"
            if forward:
                return f"Write the date {date} in words.", [long]
            return f"Write the date {long} in ISO format.", [str(date)]
        if kind == "time":
            full = f"{value // 60:02}:{value % 60:02}"
            if forward:
                return f"Write the time {full} with am or pm.", [twelve_hour(value)]
            return f"Write the time {twelve_hour(value)} with 24 hours.", [full]
        large, small, factor = UNITS[unit]
        if forward:
            return f"Convert {value} {large} to {small}.", [f"{value * factor} {small}"]
        return f"Convert {value * factor} {small} to {large}.", [f"{value} {large}"]


class Extract(Family[tuple[str, int, str]]):
    """Name, age and city of a sentence as JSON with the keys in a fixed order.

    Easy copying, but the order of the three in the sentence varies.
    """

    def draw(self, rng: Random) -> tuple[str, int, str]:
        return rng.choice(NAMES), rng.randint(10, 99), rng.choice(CITIES)

    def ask(self, content: tuple[str, int, str], rng: Random) -> tuple[str, list[str]]:
        name, age, city = content
        sentence = rng.choice(
            (
                f"{name} is {age} and lives in {city}.",
                f"In {city} lives {name}, who is {age}.",
                f"{name} from {city} is {age}.",
                f"At {age}, {name} went to {city}.",
            )
        )
        return (
            f"Write name, age and city as JSON: {sentence}",
            [json.dumps({"name": name, "age": age, "city": city})],
        )


class Schema(Family[tuple[str, int, str]]):
    """A short order as JSON with fixed keys, one a boolean that is true from twelve pieces on.

    Nearly all of the answer can be copied; the boolean has to be derived.
    """

    def draw(self, rng: Random) -> tuple[str, int, str]:
        return rng.choice(FOODS), rng.randint(1, 40), rng.choice(NAMES)

    def ask(self, content: tuple[str, int, str], rng: Random) -> tuple[str, list[str]]:
        food, count, name = content
        order = rng.choice(
            (f"{count} {food} for {name}", f"{name}: {count} {food}", f"{food} for {name}: {count}")
        )
        filled = {"item": food, "count": count, "for": name, "bulk": count >= BULK_FROM}
        return f"Write this order as JSON, bulk from {BULK_FROM}: {order}.", [json.dumps(filled)]


class Edit(Family[tuple[str, str, str, str]]):
    """A short sentence, copied with one word replaced, removed or appended.

    Easy copying, but behind the changed word all words may be shifted by one place.
    """

    def draw(self, rng: Random) -> tuple[str, str, str, str]:
        lists = (ADJECTIVES, NOUNS, VERBS, PLACES)
        adjective, noun, verb, place = (rng.choice(words) for words in lists)
        return adjective, noun, verb, place

    def ask(self, content: tuple[str, str, str, str], rng: Random) -> tuple[str, list[str]]:
        words = list(content)
        sentence = f"The {' '.join(words)}."
        edit = rng.choice(("replace", "remove", "append"))
        if edit == "replace":
            place = rng.randrange(len(words))
            old = words[place]
            same_kind = (ADJECTIVES, NOUNS, VERBS, PLACES)[place]
            words[place] = rng.choice([word for word in same_kind if word != old])
            task = f"Replace {old} by {words[place]}"
        elif edit == "remove":
            task = f"Remove {words.pop(rng.randrange(len(words)))}"
        else:
            words.append(rng.choice(ADVERBS))
            task = f"Append {words[-1]}"
        return f"{task}: {sentence}", [f"The {' '.join(words)}."]


def _all_of(*choices: tuple[str, ...]) -> list[str]:
    """Every string that takes one of each choice, in order."""
    return ["".join(parts) for parts in itertools.product(*choices)]


class Prose(Family[tuple[str, str, str, str]]):
    """A thank-you note or a greeting in a few words, of which very many are right.

    High entropy: several words can be chosen freely. Hard because the choices have to fit each
    other, and some shift all words behind them by one place.
    """

    def draw(self, rng: Random) -> tuple[str, str, str, str]:
        first, second = rng.sample(NAMES, 2)
        if rng.random() < 0.5:
            return "thank", first, second, rng.choice(NOUNS)
        return "greet", first, second, rng.choice(TIMES)

    def ask(self, content: tuple[str, str, str, str], rng: Random) -> tuple[str, list[str]]:
        kind, first, second, about = content
        if kind == "thank":
            prompt = f"Thank {first} for the {about}, from {second}."
            return prompt, _all_of(
                ("Dear", "Hi", "Hello"),
                (f" {first}, ",),
                ("thank you", "thanks", "many thanks"),
                (f" for the {about}. It is ",),
                ("great", "nice", "so nice"),
                (". ",),
                ("Love", "Best", "Yours"),
                (f", {second}",),
            )
        prompt = f"Greet {first} and {second} in the {about}."
        return prompt, _all_of(
            (f"Good {about}, {first} and {second}! ",),
            ("How are you", "Are you well"),
            ("? ",),
            ("Nice to see", "Good to see", "So nice to see"),
            (" you",),
            (" again", " here", " today"),
            (".", "!"),
        )


class Report(Family[tuple[tuple[str, str], ...]]):
    """One sentence for each of seven to ten people.

    Copying, but longer than one canvas: the next canvas has to go on where the last one ended.
    """

    def draw(self, rng: Random) -> tuple[tuple[str, str], ...]:
        names = rng.sample(NAMES, rng.randint(7, 10))
        return tuple(sorted((name, rng.choice(CITIES)) for name in names))

    def ask(self, content: tuple[tuple[str, str], ...], rng: Random) -> tuple[str, list[str]]:
        people = rng.sample(content, len(content))
        listed = ", ".join(f"{name} {city}" for name, city in people)
        answer = " ".join(f"{name} lives in {city}." for name, city in people)
        return f"Write a sentence for each: {listed}.", [answer]


FAMILIES = by_name(
    Add(),
    Sort(),
    Reverse(),
    Compare(),
    Lookup(),
    Convert(),
    Extract(),
    Schema(),
    Edit(),
    Prose(),
    Report(),
)

"""Eleven families of questions whose answers can be checked exactly.

A family is a generator. It draws the *content* of a problem (two numbers, a list, three people) and
yields it; asked to go on, it puts the problem into words in one of several ways and yields an
``Asked``. The content alone decides whether a problem is for training or held out
(bench/toys/suite.py): problems that are the same for a solver (3 + 5 and 5 + 3) have the same, and
its ``repr`` does not change between runs. So training never shows a held-out problem, in whatever
words. The words are few and short, and families share them: the tokenizer has a small vocabulary.
"""

import datetime
import itertools
import json
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from random import Random

from bench.toys.chat import Asked

Family = Callable[[Random], Iterator[Hashable]]

_FILE = Path(__file__).with_name("words.json")
WORDS = {name: tuple(text.split()) for name, text in json.loads(_FILE.read_text()).items()}
NAMES, CITIES, NOUNS, FOODS = (WORDS[name] for name in ("names", "cities", "nouns", "foods"))
ADJECTIVES, VERBS, PLACES = (WORDS[name] for name in ("adjectives", "verbs", "places"))
ADVERBS, TIMES, MONTHS = (WORDS[name] for name in ("adverbs", "times", "months"))
SMALL_NUMBERS, TENS = WORDS["small_numbers"], WORDS["tens"]

FIRST_DAY, LAST_DAY = datetime.date(1990, 1, 1).toordinal(), datetime.date(2029, 12, 31).toordinal()
# Large unit, small unit, how many of the small one make the large one.
UNITS = (("m", "cm", 100), ("kg", "g", 1000), ("km", "m", 1000))
BULK_FROM = 12  # orders of at least so many pieces are "bulk"


def in_words(number: int) -> str:
    """An integer from 0 to 99 in English words: ``forty-two``."""
    if number < 20:
        return SMALL_NUMBERS[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{WORDS['small_numbers'][ones]}" if ones else "")


def twelve_hour(minute: int) -> str:
    """Minute 0 to 1439 of a day as ``12:05 am``."""
    hour = minute // 60
    return f"{(hour - 1) % 12 + 1}:{minute % 60:02} {'am' if hour < 12 else 'pm'}"


def by_name(*families: Family) -> dict[str, Family]:
    return {family.__name__: family for family in families}


def add(rng: Random) -> Iterator[Hashable]:
    """The sum of two two-digit numbers; its first digit depends on a carry."""
    first, second = rng.randint(10, 99), rng.randint(10, 99)
    content = min(first, second), max(first, second)
    yield content
    first, second = rng.sample(content, 2)
    words = f"{in_words(first)} plus {in_words(second)}"
    said = f"{first} + {second}" if rng.random() < 0.5 else words
    yield Asked(f"What is {said}?", [str(first + second)])


def sort(rng: Random) -> Iterator[Hashable]:
    """Two to four numbers below 100 in ascending order."""
    content = tuple(sorted(rng.sample(range(1, 100), rng.randint(2, 4))))
    yield content
    shuffled = ", ".join(map(str, rng.sample(content, len(content))))
    yield Asked(f"Sort these numbers: {shuffled}.", [", ".join(map(str, content))])


def reverse(rng: Random) -> Iterator[Hashable]:
    """Three to five words in the opposite order."""
    words = tuple(rng.sample(NOUNS, rng.randint(3, 5)))
    content = min(words, words[::-1])  # a list and its reverse are one problem
    yield content
    words = content if rng.random() < 0.5 else content[::-1]
    yield Asked(f"Reverse this list: {', '.join(words)}.", [", ".join(words[::-1])])


def compare(rng: Random) -> Iterator[Hashable]:
    """Two people with two-digit numbers: who has more, or less."""
    numbers = rng.sample(range(10, 100), 2)
    content = tuple(sorted(zip(rng.sample(NAMES, 2), numbers, strict=True)))
    yield content
    first, second = (f"{name} has {number}" for name, number in rng.sample(content, 2))
    less, more = sorted(content, key=lambda pair: pair[1])
    asked, answer = rng.choice((("Who has more?", more), ("Who has less?", less)))
    yield Asked(f"Today {first} and {second}. {asked}", [answer[0]])


def lookup(rng: Random) -> Iterator[Hashable]:
    """What three to five people have: each thing has to be found by its owner's name."""
    count = rng.randint(3, 5)
    content = tuple(sorted(zip(rng.sample(NAMES, count), rng.sample(NOUNS, count), strict=True)))
    yield content
    listed = ", ".join(f"{name} {noun}" for name, noun in rng.sample(content, len(content)))
    asked = rng.sample(content, len(content))
    names = ", ".join(name for name, _ in asked)
    answer = ", ".join(f"{name} {noun}" for name, noun in asked)
    yield Asked(f"Here are {listed}. List {names}.", [answer])


def convert(rng: Random) -> Iterator[Hashable]:
    """A date, a time of day, a length or a mass in another notation, in both directions."""
    kind, unit = rng.choice(("date", "time", "unit")), 0
    if kind == "date":
        value = rng.randint(FIRST_DAY, LAST_DAY)
    elif kind == "time":
        value = rng.randrange(24 * 60)
    else:
        value, unit = rng.randint(1, 999), rng.randrange(len(UNITS))
    yield kind, value, unit
    forward = rng.random() < 0.5
    if kind == "date":
        date = datetime.date.fromordinal(value)
        long, iso = f"{date.day} {WORDS['months'][date.month - 1]} {date.year}", str(date)
        there = f"Write the date {iso} in words.", long
        back = f"Write the date {long} in ISO format.", iso
    elif kind == "time":
        full, half = f"{value // 60:02}:{value % 60:02}", twelve_hour(value)
        there = f"Write the time {full} with am or pm.", half
        back = f"Write the time {half} with 24 hours.", full
    else:
        large, small, factor = UNITS[unit]
        few, many = f"{value} {large}", f"{value * factor} {small}"
        there, back = (f"Convert {few} to {small}.", many), (f"Convert {many} to {large}.", few)
    prompt, answer = there if forward else back
    yield Asked(prompt, [answer])


def extract(rng: Random) -> Iterator[Hashable]:
    """Name, age and city of a sentence as JSON; their order in the sentence varies."""
    name, age, city = rng.choice(NAMES), rng.randint(10, 99), rng.choice(CITIES)
    yield name, age, city
    sentence = rng.choice(
        (
            f"{name} is {age} and lives in {city}.",
            f"In {city} lives {name}, who is {age}.",
            f"{name} from {city} is {age}.",
            f"At {age}, {name} went to {city}.",
        )
    )
    answer = json.dumps({"name": name, "age": age, "city": city})
    yield Asked(f"Write name, age and city as JSON: {sentence}", [answer])


def schema(rng: Random) -> Iterator[Hashable]:
    """A short order as JSON, with a boolean that has to be derived: true from twelve pieces on."""
    food, count, name = rng.choice(FOODS), rng.randint(1, 40), rng.choice(NAMES)
    yield food, count, name
    order = rng.choice(
        (f"{count} {food} for {name}", f"{name}: {count} {food}", f"{food} for {name}: {count}")
    )
    filled = {"item": food, "count": count, "for": name, "bulk": count >= BULK_FROM}
    yield Asked(f"Write this order as JSON, bulk from {BULK_FROM}: {order}.", [json.dumps(filled)])


def edit(rng: Random) -> Iterator[Hashable]:
    """A short sentence, copied with one word replaced, removed or appended."""
    lists = (ADJECTIVES, NOUNS, VERBS, PLACES)
    words = [rng.choice(known) for known in lists]
    yield tuple(words)
    sentence = f"The {' '.join(words)}."
    kind = rng.choice(("replace", "remove", "append"))
    if kind == "replace":
        place = rng.randrange(len(words))
        old = words[place]
        words[place] = rng.choice([word for word in lists[place] if word != old])
        task = f"Replace {old} by {words[place]}"
    elif kind == "remove":
        task = f"Remove {words.pop(rng.randrange(len(words)))}"
    else:
        words.append(rng.choice(ADVERBS))
        task = f"Append {words[-1]}"
    yield Asked(f"{task}: {sentence}", [f"The {' '.join(words)}."])


def prose(rng: Random) -> Iterator[Hashable]:
    """A thank-you note or a greeting, of which very many are right: choices have to fit."""
    first, second = rng.sample(NAMES, 2)
    thanks = rng.random() < 0.5
    about = rng.choice(NOUNS if thanks else TIMES)
    yield "thank" if thanks else "greet", first, second, about
    parts: tuple[tuple[str, ...], ...]
    if thanks:
        prompt = f"Thank {first} for the {about}, from {second}."
        parts = (
            *(("Dear", "Hi", "Hello"), (f" {first}, ",), ("thank you", "thanks", "many thanks")),
            *((f" for the {about}. It is ",), ("great", "nice", "so nice"), (". ",)),
            *(("Love", "Best", "Yours"), (f", {second}",)),
        )
    else:
        prompt = f"Greet {first} and {second} in the {about}."
        parts = (
            *((f"Good {about}, {first} and {second}! ",), ("How are you", "Are you well"), ("? ",)),
            *(("Nice to see", "Good to see", "So nice to see"), (" you",)),
            *((" again", " here", " today"), (".", "!")),
        )
    yield Asked(prompt, ["".join(chosen) for chosen in itertools.product(*parts)])


def report(rng: Random) -> Iterator[Hashable]:
    """One sentence for each of seven to ten people: longer than one canvas."""
    names = rng.sample(NAMES, rng.randint(7, 10))
    content = tuple(sorted((name, rng.choice(CITIES)) for name in names))
    yield content
    people = rng.sample(content, len(content))
    listed = ", ".join(f"{name} {city}" for name, city in people)
    answer = " ".join(f"{name} lives in {city}." for name, city in people)
    yield Asked(f"Write a sentence for each: {listed}.", [answer])


FAMILIES = by_name(
    *(add, sort, reverse, compare, lookup, convert, extract, schema, edit, prose, report)
)

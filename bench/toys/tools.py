"""Families of questions that are answered with a tool call, with JSON, or behind a thought.

Another model and another tokenizer are made for them (checkpoints/tiny-tools). Each question comes
with a ``Chat``: the tools that the prompt lists, in which style, and whether the model is to think
first. These are drawn anew for every question; the content alone decides the split.
"""

import json
from collections.abc import Hashable, Iterator
from random import Random

from bench.toys.chat import DAYS, STYLES, TOOLS, UNITS, Asked, Chat, answer_text, call_text
from bench.toys.families import CITIES, FOODS, NAMES, by_name

# fmt: off
SURNAMES = (
    "Bell", "Cole", "Dean", "Ford", "Gray", "Hill", "King", "Lane",
    "Moss", "Page", "Reed", "Todd", "Wade", "Hunt", "Rose", "West",
)
# fmt: on
NO_TOOL = "I have no tool for that."
ADULT_FROM = 18  # years


def with_tool(
    rng: Random,
    tool: str,
    prompt: str,
    arguments: dict[str, str | int],
    without: tuple[str, str] = ("No tool fits.", NO_TOOL),
) -> Asked:
    """A question for one tool, asked with it and, now and then, without it.

    ``without``: the thought and the answer when the tool is not listed.
    """
    others = [name for name in TOOLS if name != tool]
    listed = rng.sample(others, rng.randint(0, 2))
    is_listed = rng.random() < 0.75
    if is_listed:
        listed.append(tool)
    rng.shuffle(listed)
    chat = Chat(tuple(listed), rng.random() < 0.5, rng.choice(STYLES))
    thought, answer = without
    if is_listed:
        thought, answer = f"I call {tool}.", call_text(tool, arguments, chat.style)
    return Asked(prompt, [answer_text(thought, answer, chat)], chat)


def weather(rng: Random) -> Iterator[Hashable]:
    """The weather in a city on a day, in one of two units: three arguments are copied."""
    city, day, unit = rng.choice(CITIES), rng.choice(DAYS), rng.choice(UNITS)
    yield city, day, unit
    prompt = rng.choice(
        (
            f"What is the weather in {city} on {day} in {unit}?",
            f"How warm is it on {day} in {city}? Use {unit}.",
            f"Weather in {unit} for {city}, {day}.",
        )
    )
    yield with_tool(rng, "get_weather", prompt, {"city": city, "day": day, "unit": unit})


def total(rng: Random) -> Iterator[Hashable]:
    """The sum of a two-digit and a one-digit number; without the tool, the model adds by itself.

    The thought has the sum of the last digits, of which the carry is to be read off.
    """
    content = rng.randint(10, 99), rng.randint(1, 9)
    yield content
    first, second = rng.sample(content, 2)
    prompt = rng.choice((f"What is {first} + {second}?", f"Add {first} and {second}."))
    last = f"{first % 10} + {second % 10} = {first % 10 + second % 10}"
    yield with_tool(rng, "add", prompt, {"a": first, "b": second}, (last, str(first + second)))


def alarm(rng: Random) -> Iterator[Hashable]:
    """An alarm for a thing to eat or drink: ``7:05`` is the integers 7 and 5."""
    hour, label, minute = rng.randrange(24), rng.choice(FOODS), rng.randrange(60)
    yield hour, label, minute
    time = f"{hour}:{minute:02}"
    prompt = rng.choice(
        (
            f"Wake me at {time} for {label}.",
            f"Set an alarm for {label} at {time}.",
            f"I want {label} at {time}.",
        )
    )
    yield with_tool(rng, "set_alarm", prompt, {"hour": hour, "label": label, "minute": minute})


def phone(rng: Random) -> Iterator[Hashable]:
    """The phone number of a person with first name and surname: one argument of two words."""
    content = rng.choice(NAMES), rng.choice(SURNAMES)
    yield content
    name = " ".join(content)
    prompt = rng.choice(
        (f"What is the number of {name}?", f"Look up {name}.", f"I want to call {name}.")
    )
    yield with_tool(rng, "lookup", prompt, {"name": name})


def record(rng: Random) -> Iterator[Hashable]:
    """Facts about a person as JSON with the keys that are named; one is derived from the age."""
    name, age, city = rng.choice(NAMES), rng.randint(1, 60), rng.choice(CITIES)
    yield name, age, city
    is_adult = age >= ADULT_FROM
    facts = {"name": name, "age": age, "city": city, "adult": is_adult}
    keys = rng.sample(list(facts), rng.randint(2, 4))
    sentence = rng.choice((f"{name} from {city} is {age}", f"{name} is {age} and lives in {city}"))
    prompt = f"Write {', '.join(keys)} as JSON: {sentence}."
    thought = f"{age} is {'' if is_adult else 'not '}{ADULT_FROM} or more."
    chat = Chat(thinking=rng.random() < 0.5, style=rng.choice(STYLES))
    answer = json.dumps({key: facts[key] for key in keys})
    yield Asked(prompt, [answer_text(thought, answer, chat)], chat)


TOOL_FAMILIES = by_name(weather, total, alarm, phone, record)

"""Families of questions that are answered with a tool call, with JSON, or behind a thought.

They stand apart from the eleven of ``families``: another model and another tokenizer are made for
them (checkpoints/tiny-tools). Each question comes with a ``Chat``: the tools that the prompt
lists, in which style, and whether the model is to think first. These are drawn anew for every
question; the content alone decides the split, as in the other families.
"""

import json
from random import Random

from bench.toys.chat import DAYS, STYLES, TOOLS, UNITS, Asked, Chat, answer_text, call_text
from bench.toys.families import CITIES, FOODS, NAMES, Content, Family, by_name

# fmt: off
SURNAMES = (
    "Bell", "Cole", "Dean", "Ford", "Gray", "Hill", "King", "Lane",
    "Moss", "Page", "Reed", "Todd", "Wade", "Hunt", "Rose", "West",
)
# fmt: on
NO_TOOL = "I have no tool for that."
ADULT_FROM = 18  # years


class ToolFamily(Family[Content]):
    """Questions for one tool, asked with it and, now and then, without it."""

    tool: str

    def request(self, content: Content, rng: Random) -> tuple[str, dict[str, str | int]]:
        """Put the content into words; returns the prompt and the arguments of the call."""
        raise NotImplementedError

    def without_tool(self, arguments: dict[str, str | int]) -> tuple[str, str]:
        """The thought and the answer when the tool is not listed."""
        return "No tool fits.", NO_TOOL

    def ask(self, content: Content, rng: Random) -> Asked:
        prompt, arguments = self.request(content, rng)
        others = [name for name in TOOLS if name != self.tool]
        listed = rng.sample(others, rng.randint(0, 2))
        is_listed = rng.random() < 0.75
        if is_listed:
            listed.append(self.tool)
        rng.shuffle(listed)
        chat = Chat(tuple(listed), rng.random() < 0.5, rng.choice(STYLES))
        if is_listed:
            thought = f"I call {self.tool}."
            answer = call_text(self.tool, arguments, chat.style)
        else:
            thought, answer = self.without_tool(arguments)
        return Asked(prompt, [answer_text(thought, answer, chat)], chat)


class Weather(ToolFamily[tuple[str, str, str]]):
    """The weather in a city on a day, in one of two units.

    All three arguments are copied from the question, where their order varies.
    """

    tool = "get_weather"

    def draw(self, rng: Random) -> tuple[str, str, str]:
        return rng.choice(CITIES), rng.choice(DAYS), rng.choice(UNITS)

    def request(
        self, content: tuple[str, str, str], rng: Random
    ) -> tuple[str, dict[str, str | int]]:
        city, day, unit = content
        prompt = rng.choice(
            (
                f"What is the weather in {city} on {day} in {unit}?",
                f"How warm is it on {day} in {city}? Use {unit}.",
                f"Weather in {unit} for {city}, {day}.",
            )
        )
        return prompt, {"city": city, "day": day, "unit": unit}


class Total(ToolFamily[tuple[int, int]]):
    """The sum of a two-digit and a one-digit number; without the tool, the model adds by itself.

    The thought has the sum of the last digits, of which the carry is to be read off.
    """

    tool = "add"

    def draw(self, rng: Random) -> tuple[int, int]:
        return rng.randint(10, 99), rng.randint(1, 9)

    def request(self, content: tuple[int, int], rng: Random) -> tuple[str, dict[str, str | int]]:
        first, second = rng.sample(content, 2)
        prompt = rng.choice((f"What is {first} + {second}?", f"Add {first} and {second}."))
        return prompt, {"a": first, "b": second}

    def without_tool(self, arguments: dict[str, str | int]) -> tuple[str, str]:
        first, second = int(arguments["a"]), int(arguments["b"])
        last = f"{first % 10} + {second % 10} = {first % 10 + second % 10}"
        return last, str(first + second)


class Alarm(ToolFamily[tuple[int, str, int]]):
    """An alarm at a time of day, for a thing to eat or drink.

    Copying, except that ``7:05`` is the integers 7 and 5.
    """

    tool = "set_alarm"

    def draw(self, rng: Random) -> tuple[int, str, int]:
        return rng.randrange(24), rng.choice(FOODS), rng.randrange(60)

    def request(
        self, content: tuple[int, str, int], rng: Random
    ) -> tuple[str, dict[str, str | int]]:
        hour, label, minute = content
        time = f"{hour}:{minute:02}"
        prompt = rng.choice(
            (
                f"Wake me at {time} for {label}.",
                f"Set an alarm for {label} at {time}.",
                f"I want {label} at {time}.",
            )
        )
        return prompt, {"hour": hour, "label": label, "minute": minute}


class Phone(ToolFamily[tuple[str, str]]):
    """The phone number of a person with first name and surname: one argument of two words."""

    tool = "lookup"

    def draw(self, rng: Random) -> tuple[str, str]:
        return rng.choice(NAMES), rng.choice(SURNAMES)

    def request(self, content: tuple[str, str], rng: Random) -> tuple[str, dict[str, str | int]]:
        name = " ".join(content)
        prompt = rng.choice(
            (f"What is the number of {name}?", f"Look up {name}.", f"I want to call {name}.")
        )
        return prompt, {"name": name}


class Record(Family[tuple[str, int, str]]):
    """Facts about a person as JSON with the keys that the question names, in its order.

    One of the keys is a boolean that has to be derived from the age.
    """

    def draw(self, rng: Random) -> tuple[str, int, str]:
        return rng.choice(NAMES), rng.randint(1, 60), rng.choice(CITIES)

    def ask(self, content: tuple[str, int, str], rng: Random) -> Asked:
        name, age, city = content
        is_adult = age >= ADULT_FROM
        facts = {"name": name, "age": age, "city": city, "adult": is_adult}
        keys = rng.sample(list(facts), rng.randint(2, 4))
        sentence = rng.choice(
            (f"{name} from {city} is {age}", f"{name} is {age} and lives in {city}")
        )
        prompt = f"Write {', '.join(keys)} as JSON: {sentence}."
        thought = f"{age} is {'' if is_adult else 'not '}{ADULT_FROM} or more."
        chat = Chat(thinking=rng.random() < 0.5, style=rng.choice(STYLES))
        answer = json.dumps({key: facts[key] for key in keys})
        return Asked(prompt, [answer_text(thought, answer, chat)], chat)


TOOL_FAMILIES = by_name(Weather(), Total(), Alarm(), Phone(), Record())

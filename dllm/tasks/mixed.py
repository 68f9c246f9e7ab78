"""General prompts in any number, for a calibration without a file of one's own.

    python -m dllm.tasks.mixed 3000 > prompts.jsonl

Twelve kinds of prompts, those of the shipped file (``prompts.SHIPPED``), which has other texts. They
are made of templates, so they have the forms of real requests, and far less of their variety:
traffic of your own is better.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator

SLOT = re.compile(r"\{(\w+)\}")

SLOTS = {
    "topic": "black holes|photosynthesis|the French Revolution|electric cars|bread baking|chess|"
    "coral reefs|inflation|vaccines|the Roman Empire|solar panels|machine learning|glaciers|"
    "jazz|beekeeping|the water cycle|coffee|honey bees|earthquakes|blockchain|yoga|volcanoes|"
    "public libraries|wind energy|the printing press|bicycles|space travel|antibiotics|sleep|"
    "urban gardening|the human heart|recycling|dinosaurs|the stock market|tea|rivers|batteries",
    "who": "a ten year old|a beginner|a busy manager|a student|my grandmother|a tourist|an engineer",
    "place": "Berlin|a small village|Tokyo|the mountains|Lisbon|a space station|Toronto|the coast",
    "person": "Maria Lopez|John Smith|Aisha Khan|Tom Becker|Li Wei|Emma Brown|Peter Novak|Sara Ali",
    "job": "teacher|nurse|software developer|chef|farmer|pilot|librarian|carpenter|journalist",
    "firm": "Acme Ltd|Blue River Foods|Orion Labs|Green Valley School|Summit Bank|Delta Travel",
    "day": "Monday|Tuesday at 10:00|3 May 2025|next Friday|12 June|Thursday afternoon",
    "thing": "laptop|garden chair|coffee machine|phone|tent|desk lamp|water bottle|bicycle|backpack",
    "n": "2|3|4|5|6|7|8|12|15|20|25|40",
    "m": "9|10|11|14|18|30|36|45|60|75|90|120",
    "lang": "Python|JavaScript|Java|C++|Go|Rust|TypeScript|C",
    "task": "reverses a string|checks whether a number is prime|sorts a list of numbers|counts the "
    "words of a text|computes the factorial of n|finds the largest number of a list|removes "
    "duplicates from a list|checks whether a word is a palindrome|computes Fibonacci numbers|reads a "
    "CSV file and prints its rows|merges two sorted lists|converts Celsius to Fahrenheit|finds the "
    "most frequent character|validates an email address|computes the average of a list|does a binary "
    "search|flattens a nested list|counts vowels|generates a random password|parses a date|groups "
    "words by their length|computes the greatest common divisor|writes a dictionary to a JSON file",
    "tongue": "French|German|Spanish|Italian|Portuguese|English|Dutch",
    "text": "The meeting was moved to {day} because {person} is ill. Please tell the others.|"
    "{person} is a {job} from {place}. Every day at {n} o'clock the {thing} has to be checked.|"
    "We ordered {n} pieces of the {thing} from {firm}, and only {m} percent of them work.|"
    "The city of {place} opened a museum about {topic}. It has {m} rooms and costs {n} euros.|"
    "I think that {topic} is interesting, but most people know little about {topic}.|"
    "{firm} announced on {day} that {person} will lead the team for {topic}.|"
    "My {thing} broke after {n} days. I wrote to {firm} and nobody answered.|"
    "Scientists who study {topic} found that {m} of {n}0 samples were different from before.|"
    "In {place} people like {topic}. They meet on {day} and talk for {n} hours.",
    "style": "more formal|friendlier|shorter|in plain language|in the past tense|as a list|"
    "in the third person|more persuasive|without mistakes",
    "goal": "learn {topic}|save money|sleep better|plan a trip to {place}|find a job as a {job}|"
    "be more productive|eat healthier food|prepare for an exam about {topic}|organise my desk",
    "fields": "name, date, place|person, company, product|name, job, city|subject, number, unit",
}

KINDS = {
    "code_python": "Write a Python function that {task}. Add a docstring.|Write a Python program that "
    "{task}, and a test for it.|Write a Python class for a {thing} with {n} attributes and a method "
    "that {task}.|How do I write code in Python that {task}? Show an example.",
    "code_other": "Write a {lang} function that {task}.|Show me how to write a program in {lang} that "
    "{task}, and explain it step by step.|Write a SQL query that lists the {n} newest rows of a table "
    "`{thing}s`.|Write an HTML page about {topic} with a heading and a list.",
    "maths": "A {thing} costs {m} euros. How much do {n} of them cost? Show each step.|Solve {n}x + "
    "{m} = {m}. Explain each step.|{person} has {m} apples and gives {n} of them away. How many are "
    "left?|What is {n} percent of {m}0?|A train goes {m} km in {n} hours. How fast is it?",
    "extraction": "Extract the fields {fields} from this text as JSON.\n\n{text}|List all names and "
    "numbers in this text.\n\n{text} {text}|Return a JSON object with the keys {fields}. Use null for "
    "what is missing.\n\n{text} {text}",
    "summary": "Summarise this text in one sentence.\n\n{text} {text} {text}|Give this text a headline, "
    "then summarise it in {n} words.\n\n{text} {text}|What are the main points?\n\n{text} {text}",
    "translation": "Translate into {tongue}: {text}|Translate this into {tongue}, and keep the tone.\n\n"
    "{text} {text}|How do you say in {tongue}: I need a {thing} on {day}?",
    "chat": "What is {topic}?|Explain {topic} to {who}.|Why is {topic} important?|Give me advice: I want "
    "to {goal}.|What should I know about {topic} before I {goal}?|Hi! Can you help me to {goal}?|What "
    "is the difference between {topic} and {topic}?",
    "rewriting": "Rewrite this text {style}.\n\n{text} {text}|Correct the grammar: {text}|Make this "
    "sentence {style}: {text}|Turn this into an email to {person}: {text}",
    "reasoning": "{person} is older than {person}, and {person} is older than both. Who is the youngest? "
    "Think step by step.|Compare {topic} and {topic} in a table.|Is it better to buy or to rent a "
    "{thing} for {n} months, at {m} euros? Explain.|What are the pros and cons of {topic}?",
    "tools": "Write a JSON object for a {thing} with name, price and {n} tags.|Write a YAML file that "
    "configures a server for {topic} on port {m}00.|Convert to CSV: {person}, {job}, {place}; {person}, "
    "{job}, {place}.|Write a JSON Schema for an order of a {thing}: id, customer, number.",
    "writing": "Write a short story about a {job} and a {thing} in {place}.|Write a poem about {topic}."
    "|Write an email to {person} of {firm} about the {thing} that arrives on {day}.|List {n} ideas for a "
    "blog about {topic}.|Write a product description of a {thing} by {firm}.|Write an outline for a talk "
    "about {topic} for {who}.",
    "non_english": "Erkläre kurz, was {topic} ist.|Explique {topic} en cinq phrases.|Escribe una lista "
    "de {n} consejos sobre {topic}.|Scrivi una breve storia su un {job}.",
}


def mixed(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Different prompts with their ``domain``, the kinds in turn; ends early where none is left."""
    rng = random.Random(seed)
    kinds = {kind: templates.split("|") for kind, templates in KINDS.items()}
    slots = {name: choices.split("|") for name, choices in SLOTS.items()}

    def fill(text: str) -> str:
        return SLOT.sub(lambda slot: fill(rng.choice(slots[slot[1]])), text)

    seen: set[str] = set()
    for index in range(20 * count):
        kind = list(kinds)[index % len(kinds)]
        prompt = fill(rng.choice(kinds[kind]))
        if prompt not in seen and len(seen) < count:
            seen.add(prompt)
            yield {"domain": kind, "prompt": prompt}


def main() -> None:
    """Print them as JSONL."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for each in mixed(given.count, given.seed):
        print(json.dumps(each, ensure_ascii=False))


if __name__ == "__main__":
    main()

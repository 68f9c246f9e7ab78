"""Questions, their splits, and the tokenizers of the models that answer them."""

import json
import re
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from random import Random

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from bench.toys.families import CITIES, FOODS, NAMES, in_words
from bench.toys.suite import (
    FAMILIES,
    SPLITS,
    TOOL_FAMILIES,
    Question,
    question,
    split_of,
)
from dllm.prompts.files import json_lines
from tests.support.toy_prompts import SPECIAL_TOKENS, TOKEN_ID, encode_prompt

EVERY = [*FAMILIES, *TOOL_FAMILIES]


def drawn(family: str, split: str, count: int = 300) -> list[Question]:
    return [question(family, split, index) for index in range(count)]


# --------------------------------------------------------------------------------------------------
# Questions and splits


@pytest.mark.parametrize("family", EVERY)
def test_a_question_is_a_function_of_its_arguments(family: str) -> None:
    """Nothing depends on what was drawn before."""
    first = drawn(family, "train", 20)
    assert first == drawn(family, "train", 20)
    assert first != [question(family, "train", i, seed=1) for i in range(20)]


@pytest.mark.parametrize("family", EVERY)
def test_a_right_answer_is_accepted_and_a_changed_one_is_not(family: str) -> None:
    for item in drawn(family, "heldout", 100):
        assert item.is_correct(item.answer)
        assert item.is_correct(f" {item.answer}\n")
        assert not item.is_correct(item.answer + "x")
        assert not item.is_correct(item.answer[:-1])
        assert not item.is_correct("")


@pytest.mark.parametrize("family", EVERY)
def test_every_problem_is_in_one_split(family: str) -> None:
    """Also in other phrasings: the split is asked of the content, which all phrasings share."""
    kind, rng = (FAMILIES | TOOL_FAMILIES)[family], Random(0)
    contents = [next(kind(rng)) for _ in range(3000)]
    shares = Counter(split_of(family, content) for content in contents)
    # 3000 draws: the standard deviation of a tenth is 16. The smallest family with tools has 224
    # problems: a tenth of them is 22, with a deviation of 4.5, of which three are 180 of the draws.
    most = 100 if family in FAMILIES else 180
    assert abs(shares["heldout"] - 300) < most
    assert abs(shares["validation"] - 300) < most
    by_prompt = {split: {q.prompt for q in drawn(family, split, 1000)} for split in SPLITS}
    assert not by_prompt["train"] & by_prompt["heldout"]
    assert not by_prompt["train"] & by_prompt["validation"]
    assert not by_prompt["validation"] & by_prompt["heldout"]


def test_phrasings_of_one_problem_share_its_content() -> None:
    """Operand order, direction and list order are not part of what is hashed."""
    for index in range(20):
        first, second = next(FAMILIES["add"](Random(index)))  # type: ignore[misc]
        words = next(FAMILIES["reverse"](Random(index)))
        people = next(FAMILIES["compare"](Random(index)))
        assert first <= second and words <= words[::-1] and list(people) == sorted(people)  # type: ignore


# --------------------------------------------------------------------------------------------------
# Answers, worked out again from the prompt


def numbers(text: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", text)]


VALUE = {in_words(number): number for number in range(100)}
FACTORS = {"m to cm": 100, "kg to g": 1000, "km to m": 1000}
FORMATS = {
    "in words": ("Write the date %Y-%m-%d in words.", "%d %B %Y"),
    "ISO format": ("Write the date %d %B %Y in ISO format.", "%Y-%m-%d"),
    "am or pm": ("Write the time %H:%M with am or pm.", "%I:%M %p"),
    "24 hours": ("Write the time %I:%M %p with 24 hours.", "%H:%M"),
}


def added(prompt: str) -> str:
    words = prompt.removeprefix("What is ").removesuffix("?").replace(" plus ", " + ").split(" + ")
    return str(sum(int(word) if word.isdigit() else VALUE[word] for word in words))


def compared(prompt: str) -> str:
    facts, asked = prompt.split(". ")
    people = [part.split(" has ") for part in facts.removeprefix("Today ").split(" and ")]
    has = {name: int(number) for name, number in people}
    return {"Who has more?": max, "Who has less?": min}[asked](has, key=has.__getitem__)


def looked_up(prompt: str) -> str:
    listed, asked = prompt.removeprefix("Here are ").split(". List ")
    has = dict(person.split() for person in listed.split(", "))
    names = asked.removesuffix(".").split(", ")
    assert sorted(names) == sorted(has)
    return ", ".join(f"{name} {has[name]}" for name in names)


def converted(prompt: str) -> str:
    if not prompt.startswith("Convert"):
        given, wanted = next(pair for kind, pair in FORMATS.items() if kind in prompt)
        text = datetime.strptime(prompt, given).strftime(wanted)
        text = re.sub("^0", "", text) if wanted[:2] in ("%d", "%I") else text
        return text.replace("AM", "am").replace("PM", "pm")
    value, unit = prompt.removeprefix("Convert ").removesuffix(".").split(" ", 1)
    start, end = unit.split(" to ")
    if unit in FACTORS:
        return f"{int(value) * FACTORS[unit]} {end}"
    return f"{int(value) // FACTORS[f'{end} to {start}']} {end}"


def extracted(prompt: str) -> str:
    words = re.findall(r"\w+", prompt.partition(": ")[2])
    (name,), (city,) = ([word for word in words if word in known] for known in (NAMES, CITIES))
    return json.dumps({"name": name, "age": numbers(prompt)[0], "city": city})


def ordered(prompt: str) -> str:
    bulk_from, count = numbers(prompt)
    words = re.findall(r"\w+", prompt.partition(f"{bulk_from}: ")[2])
    (food,), (name,) = ([word for word in words if word in known] for known in (FOODS, NAMES))
    return json.dumps({"item": food, "count": count, "for": name, "bulk": count >= bulk_from})


def edited(prompt: str) -> str:
    task, sentence = prompt.split(": ")
    words = sentence.removesuffix(".").split()
    match task.split():
        case ["Replace", old, "by", new]:
            words[words.index(old)] = new
        case ["Remove", old]:
            words.remove(old)
        case ["Append", new]:
            words.append(new)
    return " ".join(words) + "."


def reported(prompt: str) -> str:
    listed = prompt.removeprefix("Write a sentence for each: ").removesuffix(".").split(", ")
    assert 7 <= len(listed) <= 10
    return " ".join(f"{person.replace(' ', ' lives in ')}." for person in listed)


SOLVERS: dict[str, Callable[[str], str]] = {
    "add": added,
    "sort": lambda prompt: ", ".join(map(str, sorted(numbers(prompt)))),
    "reverse": lambda prompt: ", ".join(
        prompt.removeprefix("Reverse this list: ").removesuffix(".").split(", ")[::-1]
    ),
    "compare": compared,
    "lookup": looked_up,
    "convert": converted,
    "extract": extracted,
    "schema": ordered,
    "edit": edited,
    "report": reported,
}


@pytest.mark.parametrize("family", SOLVERS)
def test_answers_are_right(family: str) -> None:
    for item in drawn(family, "train", 1000 if family == "convert" else 300):
        assert item.accepted == {SOLVERS[family](item.prompt)}, item


# --------------------------------------------------------------------------------------------------
# Tokenizer


@pytest.mark.parametrize("name", ["tiny-ar", "tiny-decisions", "tiny-tools"])
def test_a_bundled_tokenizer_knows_every_byte_and_the_marks(name: str) -> None:
    tokenizer = Tokenizer.from_file(f"checkpoints/{name}/tokenizer.json")
    single = [token for token in tokenizer.get_vocab() if len(token) == 1]
    assert len(single) == 256, "a byte without a token"
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(TOKEN_ID.values())


def test_prompts_are_encoded_as_the_chat_template_does() -> None:
    tokenizer = Tokenizer.from_file("checkpoints/tiny-ar/tokenizer.json")
    reference = AutoTokenizer.from_pretrained("checkpoints/tiny-ar")
    for family in FAMILIES:
        for item in drawn(family, "validation", 20):
            prompt = f" {item.prompt} "
            expected = reference.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_dict=False,
            )
            assert encode_prompt(tokenizer, prompt) == expected


def test_a_line_ends_where_json_lines_end(tmp_path):
    """Other separators of lines stand in a string of JSON as they are."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\r\n\n"c"', encoding="utf-8")
    assert json_lines(file) == [
        (f"{file}, line 1", {"prompt": "a\u2028b"}),
        (f"{file}, line 3", "c"),
    ]

"""Questions, their splits, and the tokenizer that is learned from them."""

import hashlib
import inspect
import json
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from dllm.tasks.families import in_words, twelve_hour
from dllm.tasks.suite import (
    FAMILIES,
    SPLITS,
    TOOL_FAMILIES,
    Question,
    question,
    questions,
    split_of,
)
from dllm.tasks.tokenizer import (
    SPECIAL_TOKENS,
    TOKEN_ID,
    VOCAB_SIZE,
    encode_answer,
    encode_prompt,
    save_tokenizer,
    train_tokenizer,
)
from dllm.tasks.tool_tokenizer import (
    GEMMA_TOKENS,
    HERMES_TOKENS,
    TOOL_CHAT_TEMPLATE,
    encode_chat,
    train_tool_tokenizer,
)
from dllm.tasks.tool_tokenizer import VOCAB_SIZE as TOOL_VOCAB_SIZE

TOKENIZER, TOOL_TOKENIZER = train_tokenizer(), train_tool_tokenizer()
EVERY = [*FAMILIES, *TOOL_FAMILIES]


def drawn(family: str, split: str, count: int = 300) -> list[Question]:
    return [question(family, split, index) for index in range(count)]


# --------------------------------------------------------------------------------------------------
# Questions and splits


def test_there_are_eleven_described_families() -> None:
    names = "add, sort, reverse, compare, lookup, convert, extract, schema, edit, prose, report"
    assert ", ".join(FAMILIES) == names
    assert all(len(family.description) > 50 for family in FAMILIES.values())


# The first questions of each family. Scores of the bundled models, and what they have not seen in
# training, are of these questions.
DIGESTS = {
    "add": "436dd0ca5b86", "sort": "76a9d4ac06af", "reverse": "1a7ca35c860a",
    "compare": "6a5660ad610e", "lookup": "523a9a78d242", "convert": "13006b5e1519",
    "extract": "8f39b4182223", "schema": "7fc0519c1aeb", "edit": "21ba1d4e26df",
    "prose": "b592c6eeee7e", "report": "3ea7c047fd51", "weather": "464720e38e25",
    "total": "56606a587921", "alarm": "b5476094eed9", "phone": "869323831a0a",
    "record": "b954b9556290",
}  # fmt: skip


@pytest.mark.parametrize("family", EVERY)
def test_a_question_is_a_function_of_its_arguments(family: str) -> None:
    """In every process and version the same: nothing depends on what was drawn before."""
    found = [question(family, split, index) for split in SPLITS for index in range(20)]
    said = repr([(one.prompt, one.answer, sorted(one.accepted), one.chat) for one in found])
    assert hashlib.sha256(said.encode()).hexdigest()[:12] == DIGESTS[family]
    assert drawn(family, "train", 20) != [question(family, "train", i, seed=1) for i in range(20)]


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
    contents = [kind.draw(rng) for _ in range(3000)]
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
    rng = Random(0)
    for family in FAMILIES.values():
        content = family.draw(rng)
        prompts = {family.ask(content, rng)[0] for _ in range(50)}
        assert len(prompts) > 1 or family.name == "prose"
    words = FAMILIES["reverse"].draw(Random(1))
    assert words <= words[::-1]


def test_many_distinct_questions_of_each_family() -> None:
    found = questions(FAMILIES, "heldout", 500)
    assert [q.family for q in found] == [name for name in FAMILIES for _ in range(500)]
    assert len({(q.family, q.prompt) for q in found}) == len(found)
    assert questions(["sort"], "heldout", 20) == questions(["sort"], "heldout", 30)[:20]
    # A prompt may come again, with other tools, in the other style, or with a thought.
    found = questions(TOOL_FAMILIES, "heldout", 200)
    assert len({(q.family, q.prompt, q.chat) for q in found}) == len(found) == 1000


def test_more_questions_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="5000 questions of 'add' asked for, but heldout holds"):
        questions(["add"], "heldout", 5000)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown family 'sorted'; did you mean 'sort'"):
        question("sorted", "train", 0)
    with pytest.raises(
        ValueError, match=r"unknown split 'test'\. Allowed: train, validation, heldout"
    ):
        question("sort", "test", 0)


# --------------------------------------------------------------------------------------------------
# Answers, worked out again from the prompt


def numbers(text: str) -> list[int]:
    return [int(word) for word in "".join(c if c.isdigit() else " " for c in text).split()]


def test_sums_are_right() -> None:
    value = {in_words(number): number for number in range(100)}
    assert len(value) == 100
    for item in drawn("add", "train"):
        if "+" in item.prompt:
            assert sum(numbers(item.prompt)) == int(item.answer)
        else:
            first, second = item.prompt.removeprefix("What is ").removesuffix("?").split(" plus ")
            assert value[first] + value[second] == int(item.answer)
    assert in_words(19) == "nineteen"
    assert in_words(42) == "forty-two"
    assert in_words(80) == "eighty"


def test_lists_are_sorted_and_reversed() -> None:
    for item in drawn("sort", "train"):
        assert numbers(item.answer) == sorted(numbers(item.prompt))
    for item in drawn("reverse", "train"):
        given = item.prompt.removeprefix("Reverse this list: ").removesuffix(".").split(", ")
        assert item.answer.split(", ") == given[::-1]


def test_comparisons_are_right() -> None:
    kinds = Counter()
    for item in drawn("compare", "train"):
        facts, asked = item.prompt.split(". ")
        people = [part.split(" has ") for part in facts.removeprefix("Today ").split(" and ")]
        has = {name: int(number) for name, number in people}
        kinds[asked] += 1
        pick = {"Who has more?": max, "Who has less?": min}[asked]
        assert item.answer == pick(has, key=has.__getitem__), item
    assert len(kinds) == 2


def test_everyone_asked_for_is_looked_up() -> None:
    for item in drawn("lookup", "train"):
        listed, asked = item.prompt.removeprefix("Here are ").split(". List ")
        has = dict(person.split() for person in listed.split(", "))
        names = asked.removesuffix(".").split(", ")
        assert item.answer == ", ".join(f"{name} {has[name]}" for name in names)
        assert sorted(names) == sorted(has)


def test_conversions_are_right() -> None:
    assert twelve_hour(0) == "12:00 am"
    assert twelve_hour(12 * 60 + 5) == "12:05 pm"
    assert twelve_hour(13 * 60) == "1:00 pm"
    factors = {"m to cm": 100, "kg to g": 1000, "km to m": 1000}
    asked = {(q.prompt, q.answer) for q in drawn("convert", "train", 3000)}
    for prompt, answer in asked:
        if prompt.startswith("Convert"):
            value, unit = prompt.removeprefix("Convert ").removesuffix(".").split(" ", 1)
            to = unit.split()[-1]
            if unit in factors:
                assert answer == f"{int(value) * factors[unit]} {to}"
            else:
                reverse = " to ".join(unit.split(" to ")[::-1])
                assert answer == f"{int(value) // factors[reverse]} {to}"
        else:
            formats = {
                "in words": ("Write the date %Y-%m-%d in words.", "%d %B %Y"),
                "ISO format": ("Write the date %d %B %Y in ISO format.", "%Y-%m-%d"),
                "am or pm": ("Write the time %H:%M with am or pm.", "%I:%M %p"),
                "24 hours": ("Write the time %I:%M %p with 24 hours.", "%H:%M"),
            }
            given, wanted = next(pair for kind, pair in formats.items() if kind in prompt)
            assert datetime.strptime(prompt, given) == datetime.strptime(answer, wanted)


def test_json_answers_parse_and_agree_with_the_prompt() -> None:
    for item in drawn("extract", "train"):
        record = json.loads(item.answer)
        assert list(record) == ["name", "age", "city"]
        assert all(str(value) in item.prompt for value in record.values())
    for item in drawn("schema", "train"):
        order = json.loads(item.answer)
        assert list(order) == ["item", "count", "for", "bulk"]
        assert order["bulk"] is (order["count"] >= 12)
        assert {order["item"], order["for"], str(order["count"])} <= set(
            item.prompt.removesuffix(".").replace(":", " ").split()
        )


def test_edits_are_right() -> None:
    for item in drawn("edit", "train"):
        task, sentence = item.prompt.split(": ")
        words = sentence.removesuffix(".").split()
        match task.split():
            case ["Replace", old, "by", new]:
                words[words.index(old)] = new
            case ["Remove", old]:
                words.remove(old)
            case ["Append", new]:
                words.append(new)
        assert item.answer == " ".join(words) + "."


def test_prose_accepts_every_text_of_its_grammar() -> None:
    items = drawn("prose", "train")
    assert {len(item.accepted) for item in items} == {81, 36}
    shown = Counter(item.answer.split()[0] for item in items if item.prompt.startswith("Thank"))
    assert set(shown) == {"Dear", "Hi", "Hello"}
    sizes = {len(q.accepted) for name in EVERY if name != "prose" for q in drawn(name, "train")}
    assert sizes == {1}


def test_reports_say_a_sentence_for_each() -> None:
    for item in drawn("report", "train", 50):
        listed = item.prompt.removeprefix("Write a sentence for each: ").removesuffix(".")
        sentences = [f"{person.replace(' ', ' lives in ')}." for person in listed.split(", ")]
        assert item.answer == " ".join(sentences)
        assert 7 <= len(sentences) <= 10


# --------------------------------------------------------------------------------------------------
# Tokenizer


def test_training_a_tokenizer_again_gives_the_same_one() -> None:
    for train, made, most in (
        (train_tokenizer, TOKENIZER, VOCAB_SIZE),
        (train_tool_tokenizer, TOOL_TOKENIZER, TOOL_VOCAB_SIZE),
    ):
        assert train().to_str() == made.to_str()
        assert most - 64 < made.get_vocab_size() <= most
        single = [token for token in made.get_vocab() if len(token) == 1]
        assert len(single) == 256, "a byte without a token"
    marks = (*SPECIAL_TOKENS, *GEMMA_TOKENS)
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == list(TOKEN_ID.values())
    assert [TOOL_TOKENIZER.token_to_id(token) for token in marks] == list(range(len(marks)))
    size = TOOL_TOKENIZER.get_vocab_size()
    last = [TOOL_TOKENIZER.token_to_id(token) for token in HERMES_TOKENS]
    assert last == [size - 2, size - 1]


def encoded(item: Question) -> tuple[Tokenizer, list[int]]:
    """The tokenizer of a question's family, and the prompt's ids."""
    if item.chat is None:
        return TOKENIZER, encode_prompt(TOKENIZER, item.prompt)
    return TOOL_TOKENIZER, encode_chat(TOOL_TOKENIZER, item)


def test_prompts_are_encoded_as_the_chat_template_does(tmp_path: Path) -> None:
    save_tokenizer(TOKENIZER, tmp_path, model_max_length=512)
    plain = AutoTokenizer.from_pretrained(tmp_path)
    save_tokenizer(TOOL_TOKENIZER, tmp_path, 512, TOOL_CHAT_TEMPLATE)
    with_tools = AutoTokenizer.from_pretrained(tmp_path)
    for family in EVERY:
        for item in drawn(family, "validation", 20):
            chat = item.chat
            reference = plain if chat is None else with_tools
            expected = reference.apply_chat_template(
                [{"role": "user", "content": f" {item.prompt} "}],
                tools=None if chat is None else chat.schemas or None,
                add_generation_prompt=True,
                return_dict=False,
                **({} if chat is None else chat.template_kwargs),
            )
            assert encoded(replace(item, prompt=f" {item.prompt} "))[1] == expected


@pytest.mark.parametrize("family", EVERY)
def test_the_prompt_does_not_change_the_encoding_of_the_answer(family: str) -> None:
    for item in drawn(family, "train", 50):
        tokenizer, prompt = encoded(item)
        answer = encode_answer(tokenizer, item.answer)
        text = f"{tokenizer.decode(prompt, skip_special_tokens=False)}{item.answer}<eos>"
        assert tokenizer.encode(text, add_special_tokens=False).ids == prompt + answer
        assert tokenizer.decode(answer[:-1], skip_special_tokens=False) == item.answer
        if item.chat is None:
            assert (
                text == f"<bos><|turn>user\n{item.prompt}<turn|>\n<|turn>model\n{item.answer}<eos>"
            )
        else:
            assert len(prompt) <= 128 and len(answer) <= 64


def test_an_answer_that_begins_with_a_space_is_refused() -> None:
    with pytest.raises(ValueError, match="must not begin with whitespace, got ' 5'"):
        encode_answer(TOKENIZER, " 5")


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_fit_a_canvas_except_reports(family: str) -> None:
    for item in drawn(family, "train", 500):
        assert len(encode_prompt(TOKENIZER, item.prompt)) <= 60
        length = len(encode_answer(TOKENIZER, item.answer))
        assert 32 < length <= 96 if family == "report" else length <= 32


def test_every_family_is_documented_where_it_is_defined() -> None:
    for family in FAMILIES.values():
        assert inspect.getdoc(type(family)), family.name

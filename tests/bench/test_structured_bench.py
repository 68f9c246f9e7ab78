"""The forms of bench/structured.py: what is valid, and what is right."""

import json
from dataclasses import replace

import pytest

from bench import structured
from bench.structured import FORMS
from dllm.tasks.suite import questions

(QUESTION,) = questions(["extract"], "heldout", 1)
KNOWN = json.loads(QUESTION.answer)
IN_FORM = {
    "as trained": KNOWN,
    "age as a string": KNOWN | {"age": str(KNOWN["age"])},
    "two of three keys": {key: KNOWN[key] for key in ("name", "city")},
    "keys in another order": KNOWN,
    "one level deeper": {"person": KNOWN},
}


@pytest.mark.parametrize("name", IN_FORM)
def test_an_answer_in_its_form_is_right_and_another_is_not(name: str) -> None:
    form, answer = FORMS[name], IN_FORM[name]
    assert form.judged(QUESTION, json.dumps(answer)) == (True, True)
    wrong = json.dumps(answer).replace(KNOWN["city"], "Nowhere")
    assert form.judged(QUESTION, wrong) == (True, False)
    assert form.judged(QUESTION, json.dumps(answer | {"more": 1})) == (False, False)
    assert form.judged(QUESTION, "no JSON") == (False, False)


def test_a_text_in_its_form_is_right_and_another_is_not() -> None:
    date = replace(QUESTION, accepted=frozenset({"2024-05-06"}))
    form = FORMS["dates with slashes"]
    assert form.judged(date, "2024/05/06") == (True, True)
    assert form.judged(date, "2024/05/07") == (True, False)
    assert form.judged(date, "2024-05-06") == (False, False)
    name = replace(QUESTION, accepted=frozenset({"Ann"}))
    assert FORMS["a word in front"].judged(name, "Answer: Ann.") == (True, True)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_there_are_questions_for_each_form(form: structured.Form) -> None:
    assert any(form.word in one.prompt for one in questions([form.family], "heldout", 40))

"""What is served of a schema is held: judged by the official suite and by ``jsonschema``."""

import json

import hypothesis
import jsonschema
import pytest
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema

from dllm.grammar.children import Children
from tests.support import schema_judge as judge
from tests.support.drawn_schemas import free_schemas, openai_schemas

NOT_JUDGED = "relative-json-pointer"  # the package calls "12" none

needs_suite = pytest.mark.skipif(not judge.SUITE.exists(), reason="make setup-all: the suite")


@pytest.fixture(scope="module")
def children():
    made = Children(judge.BYTES, seconds=600)  # no test here is about time
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def javascript():
    """JSON Schema's patterns are JavaScript's; ``jsonschema`` reads them as Python's."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (jsonschema._keywords, jsonschema._utils):
            patched.setattr(module, "re", judge.JavaScriptPatterns)
        yield


class Count:
    """Of schemas, and of the values that are of them."""

    def __init__(self):
        self.served, self.values, self.rejected = 0, 0, 0
        self.wrong: list[tuple[str, list[str]]] = []

    def __str__(self):
        return f"{self.served} served, {self.rejected} of {self.values} values rejected"

    def judge(self, case, children, num_texts):
        table = judge.compiled(case.schema, children)
        if table is None:
            return
        self.served += 1
        if wrong := judge.wrong_texts(case, table, num_texts):
            self.wrong.append((json.dumps(case.schema), wrong[:3]))
        valid = [value for value, is_valid in case.values if is_valid]
        self.values += len(valid)
        self.rejected += sum(not judge.accepts(table, judge.spelled(value)) for value in valid)


@needs_suite
@pytest.mark.parametrize(
    ("step", "num_texts", "least"),
    [(6, 30, 40), (1, 200, 285)],
    ids=["some", "all"],
)
def test_no_text_breaks_a_schema_of_the_suite(step, num_texts, least, children):
    cases, count = judge.suite()[::step], Count()
    for case in cases:
        if NOT_JUDGED not in case.name:
            count.judge(case, children, num_texts)
    print(
        f"{len(cases)} schemas: {count.served} served, {count.rejected} of {count.values} rejected"
    )
    assert count.wrong == []
    assert count.served >= least
    assert count.rejected <= count.values / 5


@pytest.mark.parametrize("style", [free_schemas, openai_schemas], ids=["free", "openai"])
@pytest.mark.parametrize(
    ("num_schemas", "num_texts"),
    [(25, 20), (500, 200)],
    ids=["some", "many"],
)
def test_no_text_breaks_a_drawn_schema(style, num_schemas, num_texts, children):
    cases = drawn_cases(style(), num_schemas)
    count = Count()
    for case in cases:
        count.judge(case, children, num_texts)
    print(f"{len(cases)} schemas: {count}")
    assert count.wrong == []
    assert count.served > 0
    if num_schemas > 100:  # of fewer, the shares depend on chance
        assert count.served >= len(cases) * 3 / 4
        assert count.rejected <= count.values / 5


def drawn_cases(schemas, count) -> list[judge.Case]:
    """Different schemas, and two values of each.

    In one order of imports they are the same ones: hypothesis draws constants from what is loaded.
    """
    found: dict[str, judge.Case] = {}

    @hypothesis.settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.data())
    def draw(data):
        schema = data.draw(schemas)
        try:
            values = [(data.draw(from_schema(schema)), True) for _ in range(2)]
        except (hypothesis.errors.InvalidArgument, AssertionError):  # the package's own
            values = []
        if judge.is_valid_schema(schema):
            found[json.dumps(schema, sort_keys=True)] = judge.Case(schema, values=values)

    draw()
    return list(found.values())

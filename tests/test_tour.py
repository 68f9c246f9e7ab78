"""docs/tour.md names functions that exist, and is no longer than it says."""

import ast
import re
from functools import cache

from tests.support.process import ROOT

MOST_LINES = 1200
STOP = re.compile(r"^\* `([\w/]+\.py)`: ((?:`[\w.]+`[,.]?\s*)+)", re.MULTILINE)


@cache
def definitions(path: str) -> dict[str, int]:
    """Functions and classes of a file, by dotted name: how many lines each has."""
    found: dict[str, int] = {}

    def collect(node: ast.AST, within: str) -> None:
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                assert one.end_lineno is not None
                found[within + one.name] = one.end_lineno - one.lineno + 1
                collect(one, f"{within}{one.name}.")

    collect(ast.parse((ROOT / path).read_text()), "")
    return found


def test_the_tour_names_what_there_is_and_is_short() -> None:
    stops = STOP.findall((ROOT / "docs/tour.md").read_text())
    named = [(path, name) for path, names in stops for name in re.findall(r"`([\w.]+)`", names)]
    assert len(named) > 40 and len(set(named)) == len(named)
    missing = [(path, name) for path, name in named if name not in definitions(path)]
    assert not missing
    assert sum(definitions(path)[name] for path, name in named) <= MOST_LINES


def test_every_line_of_the_tour_that_is_a_stop_is_read() -> None:
    text = (ROOT / "docs/tour.md").read_text()
    assert text.count("\n* `") == len(STOP.findall(text))

"""Which tests run when: all that ``tests/levels.toml`` does not name are those of ``make test``.

``make test-all`` has those named under ``extended`` as well, ``make test-nightly`` those under
``nightly``. A name is that of a test function, or ``name[case]``, or ``[case]`` for that case of
every test of the file; a case is what pytest writes between brackets, or the part of a parameter.
A file without names is meant as a whole. ``*`` stands for all files.
"""

import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LEVELS: dict[str, dict[str, list[str]]] = tomllib.loads((TESTS / "levels.toml").read_text())


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test with its levels."""
    file = item.path.relative_to(TESTS).as_posix()
    function, cases = item.name.split("[")[0], {""}
    if call := getattr(item, "callspec", None):
        cases |= {call.id, *call._idlist}
    named = {(case and f"{at}[{case}]") or at for case in cases for at in ("", function)}
    for level, files in LEVELS.items():
        for key in {"*", file} & files.keys():
            if files[key] == [] or named & {*files[key]}:
                item.add_marker(level)
            _met[level, key] |= named


_met: dict[tuple[str, str], set[str]] = defaultdict(set)  # what the tests of a file are called


def unknown(level: str) -> dict[str, set[str]]:
    """By file, names of a level that no collected test has; none of a file that has no test."""
    met = {file: _met[level, file] for file in LEVELS[level]}
    missing = {file: {*names} - met[file] for file, names in LEVELS[level].items()}
    return {file: names for file, names in missing.items() if names or not met[file]}

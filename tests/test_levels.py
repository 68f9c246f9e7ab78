"""What ``tests/levels.toml`` names is there."""

from tests.support.levels import LEVELS, TESTS


def test_every_name_is_one_of_a_test():
    for files in LEVELS.values():
        for file in files.keys() - {"*"}:
            text = (TESTS / file).read_text()
            functions = {name.split("[")[0] for name in files[file]} - {""}
            assert {name for name in functions if f"def {name}(" not in text} == set(), file

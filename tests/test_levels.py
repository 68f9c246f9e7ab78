"""Which tests run when: what ``tests/levels.toml`` names is there."""

import pytest

from tests.support.levels import LEVELS, unknown


@pytest.mark.parametrize("level", LEVELS)
def test_every_name_is_one_of_a_test(level, pytestconfig):
    if pytestconfig.args != pytestconfig.getini("testpaths"):
        pytest.skip("only some of the tests were collected")
    assert unknown(level) == {}

"""How pytest-xdist spreads the tests over its workers: ``pytest --numprocesses 2``.

A worker takes a whole file, so that what the file starts is started once. Files with the same
``pytest_plugins``, a module with a server that they share, count as one. Files with a test that is
marked as slow are first, so that none is left for the end.
"""

import functools
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def group_of(nodeid: str) -> str:
    """What a worker takes at once: a file, or all files with the same plugins."""
    file = nodeid.split("::", 1)[0]
    return plugins_of(file) or file


@functools.cache
def plugins_of(file: str) -> str:
    """The line of a file that names its plugins; empty if there is none."""
    found = re.search(r"^pytest_plugins = .*", (ROOT / file).read_text(), re.MULTILINE)
    return found[0] if found else ""


@pytest.hookimpl(trylast=True)  # behind `-m` and `-k`, which leave some out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker, put the slow groups first; every worker sorts in the same way."""
    if hasattr(config, "workerinput"):
        slow = {group_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: group_of(item.nodeid) not in slow)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be missing, or turned off
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A scheduler that hands out groups in the order in which they were collected."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)

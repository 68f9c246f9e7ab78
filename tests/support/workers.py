"""How pytest-xdist spreads the tests over its workers: ``pytest --numprocesses 2``.

A worker takes a whole file, so that what the file starts is started once. Tests of the server that
several files share (the fixture ``server`` of ``server_harness``) count as one file. Files that are
marked as slow are first, so that none is left for the end.
"""

from typing import Any

import pytest

SHARED_SERVER = "@server"  # ends the names of its tests in a worker


def group_of(nodeid: str) -> str:
    """What a worker takes at once: a file, or all tests of the shared server."""
    return SHARED_SERVER if nodeid.endswith(SHARED_SERVER) else nodeid.split("::", 1)[0]


def asks_shared_server(item: Any) -> bool:
    """Whether the test's fixture ``server`` is that of the whole run; a file may have its own."""
    found = item._fixtureinfo.name2fixturedefs.get("server")
    return bool(found) and found[-1].scope == "session"


@pytest.hookimpl(trylast=True)  # behind `-m` and `-k`, which leave some out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker, put the slow groups first; every worker sorts in the same way."""
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        if asks_shared_server(item):
            item._nodeid += SHARED_SERVER
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

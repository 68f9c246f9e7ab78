"""Plugin of pytest: leaves out the tests that a list names with a reason."""

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from dllm.patches.neighbours import vllm_version


class LeftOut:
    """Deselects what ``left_out.toml`` names. A pattern that names no test is an error.

    Args:
        path: of the list.
        group: of ``suite.toml``, which runs.
        files: that the group runs.
    """

    def __init__(self, path: Path, group: str, files: list[str]) -> None:
        entries = tomllib.loads(path.read_text())["left_out"]
        self.patterns = {
            pattern
            for entry in entries
            if group in entry.get("groups", [group])
            and vllm_version().startswith(entry.get("version", ""))
            for pattern in entry["tests"]
            if any(fnmatchcase(file, pattern.split("::")[0]) for file in files)
        }

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left_out = {item: self._patterns_of(item) for item in items}
        unused = self.patterns.difference(*left_out.values())
        if unused and not config.option.keyword:
            raise pytest.UsageError(f"left_out.toml: no test is called {sorted(unused)}")
        items[:] = [item for item in items if not left_out[item]]
        config.hook.pytest_deselected(items=[item for item in left_out if left_out[item]])

    def _patterns_of(self, item: pytest.Item) -> set[str]:
        """Those that name the test's file, the test, or this case of it."""
        case = item.nodeid.removeprefix("tests/")
        names = (case.partition("::")[0], case.partition("[")[0], case)
        return {p for p in self.patterns if any(fnmatchcase(name, p) for name in names)}

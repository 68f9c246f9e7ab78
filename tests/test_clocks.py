"""No wait, limit or rate of ours depends on the wall clock, which an administrator may set."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
WALL = {"time.time", "time.time_ns", "time.localtime", "datetime.now", "datetime.utcnow"}
# Moments that are only told, and compared with nothing.
TOLD = {"dllm/api/events.py": {"time.time"}}


def wall_clocks(source: str) -> set[str]:
    """What a module reads the wall clock with."""
    tree = ast.parse(source)
    read = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    ends = tuple(f".{name}" for name in WALL)
    return {name for name in read | imported if name in WALL or name.endswith(ends)}


def test_the_wall_clock_is_only_told():
    found = {
        path.relative_to(ROOT).as_posix(): clocks
        for folder in ("dllm", "attention", "quant")
        for path in (ROOT / folder).rglob("*.py")
        if (clocks := wall_clocks(path.read_text()))
    }
    assert found == TOLD


def test_a_wall_clock_is_found():
    assert wall_clocks("import time\nend = time.time() + 5") == {"time.time"}
    assert wall_clocks("from time import time") == {"time.time"}
    assert wall_clocks("import datetime\ndatetime.datetime.now()") == {"datetime.datetime.now"}
    assert not wall_clocks("import time\ntime.monotonic()")

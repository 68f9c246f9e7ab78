"""Which series packaging/grafana.json names, and which a server has."""

import json
import re
from pathlib import Path

DASHBOARD = Path(__file__).parents[2] / "packaging" / "grafana.json"
NAME = re.compile(r"\b(?:vllm:|dllm:|http_)\w+")


def named_by_row() -> dict[str, set[str]]:
    """Row of the dashboard -> names of the series that its panels ask for."""
    found: dict[str, set[str]] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] == "row":
            row = found.setdefault(panel["title"], set())
        for target in panel.get("targets", ()):
            names = set(NAME.findall(target["expr"]))
            assert names, f"{panel['title']}: no series in {target['expr']}"
            row |= names
    return found


def served(metrics: str) -> set[str]:
    """Names of the series in a reply of /metrics."""
    return set(re.findall(r"^[a-z][\w:]*", metrics, re.MULTILINE))

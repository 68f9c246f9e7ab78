"""README section about the bundled models, read from their model cards."""

import re
from pathlib import Path

from bench.context import ROOT
from bench.markdown import markdown

MODELS = ("tiny-dllm", "tiny-ar")
GOOD = 95.0  # per cent


def models(_results: Path) -> str:
    """Size, training time and right answers to held-out questions through ``vllm serve``."""
    lines = [_line(name) for name in MODELS]
    header = [
        "",
        "parameters",
        "training, one core",
        f"families with {GOOD:g} % or more",
        "the hardest",
        "all",
    ]
    return markdown(header, lines)


def _line(name: str) -> list[str]:
    card = ROOT / "checkpoints" / name / "README.md"
    text = card.read_text()
    scores = dict(re.findall(r"^\| (\w+) \| ([^|]+?) \|", text.split("## Held-out")[1], re.M))
    of_all = scores.pop("all")
    del scores["family"]
    percents = {family: float(score.split(" %")[0]) for family, score in scores.items()}
    hardest = min(percents, key=lambda family: percents[family])
    size = re.search(r"of ([\d.]+M) parameters", text)
    assert size, f"{card} does not say how many parameters"
    minutes = sum(map(int, re.findall(r"^- (\d+) minutes on", text, re.M)))
    return [
        f"[{name}](checkpoints/{name}/README.md)",
        size[1],
        f"{minutes} minutes",
        f"{sum(percent >= GOOD for percent in percents.values())} of {len(percents)}",
        f"{hardest}: {scores[hardest]}",
        of_all,
    ]

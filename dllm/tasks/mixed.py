"""General prompts in any number, for a calibration without a file of one's own.

    python -m dllm.tasks.mixed 3000 > prompts.jsonl

Twelve kinds of prompts, those of the shipped file (``prompts.SHIPPED``), which has other texts.
They are made of templates, so they have the forms of real requests, and far less of their variety:
traffic of your own is better.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

SLOT = re.compile(r"\{(\w+)\}")

TEMPLATES = Path(__file__).parent / "data" / "templates.json"


def mixed(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Different prompts with their ``domain``, the kinds in turn; ends early where none is left."""
    rng = random.Random(seed)
    given = json.loads(TEMPLATES.read_text())
    kinds, slots = given["kinds"], given["slots"]

    def fill(text: str) -> str:
        return SLOT.sub(lambda slot: fill(rng.choice(slots[slot[1]])), text)

    seen: set[str] = set()
    for index in range(20 * count):
        kind = list(kinds)[index % len(kinds)]
        prompt = fill(rng.choice(kinds[kind]))
        if prompt not in seen and len(seen) < count:
            seen.add(prompt)
            yield {"domain": kind, "prompt": prompt}


def main() -> None:
    """Print them as JSONL."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for each in mixed(given.count, given.seed):
        print(json.dumps(each, ensure_ascii=False))


if __name__ == "__main__":
    main()

"""How long grammars take to become tables over 262,144 tokens; writes `grammar_build.csv`.

    python -m bench.grammar_build [--rounds 5] [--vocab 262144]

For each grammar: the states, classes and edges of its table, and seconds to get it
* cold: xgrammar compiles it in a child that is running, and the table is built;
* from a file, by a process that has not seen it;
* from memory.
Before the first grammar the words are ordered into a tree (its own line), once for a tokenizer.

The words are those of a tokenizer of 131,072 that vLLM brings along (Tekken), and joins of them.
"""

import argparse
import base64
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.context import RESULTS, Rows, progress, provenance, write_csv
from bench.tables import markdown, section
from dllm.grammar.children import Children
from dllm.grammar.compile import Compiler, Spec
from dllm.grammar.table import Table
from dllm.grammar.vocabulary import Vocabulary

NUM_SPECIAL = 32
FILE = "grammar_build.csv"
COLUMNS = ("cold_s", "file_s", "memory_s")


def closed_object(properties: dict[str, object], required: Sequence[str]) -> dict[str, object]:
    """The schema of an object without other properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT = {"type": "string"}
SMALL = closed_object(
    {"name": TEXT, "age": {"type": "integer"}, "ok": {"type": "boolean"}}, ["name", "age", "ok"]
)
FLIGHT = closed_object(
    {
        "from": TEXT,
        "to": TEXT,
        "date": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
        "passengers": {"type": "integer", "minimum": 1, "maximum": 9},
        "cabin": {"enum": ["economy", "business", "first"]},
        "flexible": {"type": "boolean"},
        "stops": {"type": "array", "items": TEXT, "maxItems": 3},
    },
    ["from", "to", "date"],
)
TOOL_CALL = closed_object(
    {"name": {"enum": ["search_flights"]}, "arguments": FLIGHT}, ["name", "arguments"]
)
ENUMS = closed_object(
    {f"field_{i}": {"enum": [f"value_{j}" for j in range(i % 5 + 2)]} for i in range(60)}, []
)
CHOICES = [f"option number {i * 7919 % 100_003}" for i in range(1000)]
SPECS = {
    "small schema": Spec("json", json.dumps(SMALL)),
    "tool call": Spec("json", json.dumps(TOOL_CALL)),
    "60 optional enums": Spec("json", json.dumps(ENUMS)),
    "json_object": Spec("json", '{"type": "object"}'),
    "date": Spec("regex", "[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]"),
    "choice of 1,000": Spec("grammar", "root ::= " + " | ".join(map(json.dumps, CHOICES))),
}


def words_of(vocab_size: int, seed: int = 0) -> tuple[bytes, ...]:
    """Words of every id; the last ones are special tokens without any."""
    import mistral_common

    path = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    listed = json.loads(path.read_text())["vocab"][: vocab_size - NUM_SPECIAL]
    words = [base64.b64decode(entry["token_bytes"]) for entry in listed]
    known, common, rng = set(words), words[256:40_000], random.Random(seed)
    while len(words) < vocab_size - NUM_SPECIAL:
        joined = rng.choice(common) + rng.choice(common)
        if len(joined) <= 16 and joined not in known:
            known.add(joined)
            words.append(joined)
    return (*words, *[b""] * NUM_SPECIAL)


@dataclass(frozen=True)
class Build:
    """One line of the CSV: one grammar; medians of seconds."""

    vocab_size: int
    grammar: str
    states: int | None
    classes: int | None
    edges: int | None
    levels: int | None  # of nesting that are kept; -1 for all
    cold_s: float
    file_s: float | None
    memory_s: float | None


def timed(build: Callable[[Spec], Table], spec: Spec) -> tuple[float, Table]:
    """(seconds, what it returned)."""
    start = time.perf_counter()
    found = build(spec)
    return time.perf_counter() - start, found


def measure(name: str, vocabulary: Vocabulary, children: Children, rounds: int) -> Build:
    """Medians of a grammar; in each round nothing is in the folder or in memory at first."""
    spec, times = SPECS[name], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            cold, found = timed(Compiler(vocabulary, Path(folder), children).table, spec)
            compiler = Compiler(vocabulary, Path(folder), children)
            from_file, _ = timed(compiler.table, spec)
            from_memory, _ = timed(compiler.table, spec)
        times.append((cold, from_file, from_memory))
    sizes = len(found.accepts), found.num_classes, len(found.edges[0]), found.levels
    medians = (statistics.median(column) for column in zip(*times, strict=True))
    return Build(len(vocabulary.words), name, *sizes, *medians)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=262_144)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV")
    options = parser.parse_args(arguments)
    about = provenance("bench.grammar_build")
    progress(f"{options.vocab:,} words")
    vocabulary, children = Vocabulary(words_of(options.vocab)), Children()
    start = time.perf_counter()
    _ = vocabulary.trie, vocabulary.digest
    tree = time.perf_counter() - start
    lines = [
        Build(options.vocab, "tree of the words", None, None, None, None, tree, None, None),
    ]
    Compiler(vocabulary, None, children).table(SPECS["date"])  # the child runs
    for name in SPECS:
        progress(name)
        lines.append(measure(name, vocabulary, children, options.rounds))
        print(lines[-1], flush=True)
    children.close()
    write_csv(options.results / FILE, [asdict(line) | about for line in lines])
    return 0


def grammar_build(results: Path) -> str:
    """Section of docs/structured.md: how long grammars take."""
    return section(results / FILE, "python -m bench.grammar_build", _table)


def _table(rows: Rows) -> str:
    heading = ["grammar", "states", "classes", "compiled", "from a file", "from memory"]
    lines = [
        [
            row["grammar"],
            row["states"] or "-",
            row["classes"] or "-",
            *(f"{float(row[name]):.2g} s" if row[name] else "-" for name in COLUMNS),
        ]
        for row in rows
    ]
    return markdown((heading, lines))


if __name__ == "__main__":
    sys.exit(main())

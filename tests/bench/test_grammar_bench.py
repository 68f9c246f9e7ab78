"""`python -m bench.grammar_build` measures every grammar and writes its CSV."""

from pathlib import Path

from bench import grammar_build
from bench.context import read_csv


def test_it_measures_every_grammar(tmp_path: Path) -> None:
    options = ["--vocab", "2000", "--rounds", "1", "--results", str(tmp_path)]
    assert grammar_build.main(options) == 0
    tree, *lines = read_csv(tmp_path / grammar_build.FILE)
    assert float(tree["cold_s"]) > 0 and not tree["states"]
    assert [line["grammar"] for line in lines] == list(grammar_build.SPECS)
    for line in lines:
        assert int(line["edges"]) >= int(line["states"]) - 1 > 0
        assert (int(line["levels"]) > 0) == (line["grammar"] == "json_object")
        assert 0 < float(line["memory_s"]) <= float(line["cold_s"])


def test_words_differ_and_cover_all_bytes() -> None:
    words = grammar_build.words_of(140_000)
    assert len(words) == 140_000 and words[-1] == b""
    spelled = words[: -grammar_build.NUM_SPECIAL]
    assert len(set(spelled)) == len(spelled)
    assert {bytes([byte]) for byte in range(256)} <= set(spelled)

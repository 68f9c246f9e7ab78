"""The benchmark of remote drafts: who drafts how, and the worker that knows the answers."""

import json
from pathlib import Path
from types import SimpleNamespace

from bench import remote
from bench.remote import KNOWN_AHEAD, PLAIN, KnownDrafts
from bench.servers import SERVE_FLAGS


def test_everybody_has_a_name_and_the_first_drafts_nothing(tmp_path: Path) -> None:
    given = SimpleNamespace(drafts=8, serve_flags=SERVE_FLAGS)
    plain, *others = remote.contestants(given, tmp_path)  # type: ignore[arg-type]
    assert plain.name == PLAIN and plain.server and "--speculative-config" not in plain.server.flags
    options = {}
    for one in others:
        assert one.server is not None
        options[one.name] = json.loads(one.server.flags[-1])["dllm"]["remote"]
    assert len(options) == len(others)
    adaptive = options[f"{KNOWN_AHEAD}, adaptive"]
    assert "policy" not in adaptive  # the default
    *_, listen, _, ahead = remote.worker_command(KNOWN_AHEAD, 8, tmp_path)
    assert adaptive["workers"] == [listen] and ahead == "9"


def test_known_drafts_are_the_rest_of_a_text() -> None:
    drafts = KnownDrafts([[1, 2, 3, 4], [1, 5]], step_s=0)
    runs = drafts.start([1, 2], 3), drafts.start([1, 5], 1), drafts.start([7], 1)
    assert drafts.step() == [(runs[0], [3], False), (runs[1], [0], True), (runs[2], [0], True)]
    assert drafts.step() == [(runs[0], [4], False)]
    drafts.stop(runs[0])
    assert drafts.step() == []

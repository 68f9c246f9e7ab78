"""The benchmark of watching: its parts run, and nobody pays for what nobody watches."""

import threading
from types import SimpleNamespace

from bench import watching
from bench.context import read_csv


def test_the_parts_of_a_step_are_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watching, "REPEATS", 20)
    path = tmp_path / "watching.csv"
    assert watching.main(["--rounds", "0", "--results", str(tmp_path)]) == 0
    values = {row["what"]: float(row["value"]) for row in read_csv(path)}
    assert len(values) == 5 and all(name in capsys.readouterr().out for name in list(values)[:1])
    nobody = values["nobody watches: worker, core and API server"]
    assert 0 < nobody < values["one watcher: worker"]
    assert values["one watcher: an event"] > 1000


def test_the_interval_of_a_median():
    low, high = watching._interval([1.0] * 30 + [1.1] * 3)
    assert low == high == 1.0
    low, high = watching._interval([0.9, 1.0, 1.1, 1.2] * 5)
    assert 0.9 <= low < 1.05 < high <= 1.2


def test_a_stream_that_fails_is_said():
    """The neighbours do not wait for it."""
    nowhere = SimpleNamespace(url="http://127.0.0.1:1", options=SimpleNamespace(model="m"))
    said: list[BaseException] = []

    def run():
        try:
            with watching._stream(nowhere, {}):
                pass
        except OSError as error:
            said.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert said and not thread.is_alive()

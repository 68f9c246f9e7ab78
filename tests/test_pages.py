"""Pages are short, their links lead somewhere, and the commands that they print exist."""

import argparse
import importlib
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import readme
from bench.context import ROOT
from dllm.cli import COMMANDS

CARDS = sorted(ROOT.glob("checkpoints/*/README.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
EVERY = [*PAGES, *sorted(ROOT.glob("packaging/*.md")), *CARDS]
LIMITS = {"README.md": 9_000, "ARCHITECTURE.md": 9_000}  # bytes


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """What links to the headings of a page, as GitHub spells them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", EVERY, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    wrong = []
    for link in (one for one in links if "://" not in one):
        file, _, anchor = link.partition("#")
        to = page.parent / file if file else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_bytes()) <= LIMITS.get(page.name, 12_500)


@pytest.mark.parametrize("card", CARDS, ids=name_of)
def test_a_model_card_is_short(card: Path) -> None:
    assert card.read_text().count("\n") <= 60


def test_code_that_cards_show_is_in_this_history() -> None:
    git = "git", "-C", str(ROOT)
    whole = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True)
    if whole.stdout.strip() != b"false":
        pytest.skip("a copy without the whole history")
    shown = {
        each for card in CARDS for each in re.findall(r"git show (\w+:\S+?)[`\s]", card.read_text())
    }
    for commit, _, path in (one.partition(":") for one in shown):
        subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"], check=True)
        if "NAME" not in path:
            subprocess.run([*git, "cat-file", "-e", f"{commit}:{path}"], check=True)
    assert shown


@pytest.mark.parametrize("page", EVERY, ids=name_of)
def test_commands_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    modules = set(re.findall(r"python -m ((?:bench|dllm)(?:\.\w+)*)", text))
    assert all(importlib.util.find_spec(module) for module in modules), modules
    named = re.findall(r"(?:^|`|^ {4}|bin/)dllm (?!-)([a-z][\w -]*)", text, re.MULTILINE)
    wrong = [one for one in named if not any(f"{one} ".startswith(f"{n} ") for n in COMMANDS)]
    assert not wrong


class ParsedError(BaseException):
    """A command line was parsed: stop before the command begins."""


BLOCKS = "".join(
    block.group() for page in PAGES for block in readme.MARKED.finditer(page.read_text())
)
PUBLISHED = sorted(set(re.findall(r"`(python -m bench[^`]*)`", BLOCKS)))


@pytest.mark.parametrize("line", PUBLISHED)
def test_the_command_behind_a_table_has_options_of_today(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def only_parse(*given: Any) -> None:
        parse(*given)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    _, _, module, *options = shlex.split(line)
    with pytest.raises(ParsedError):
        importlib.import_module(module).main(options)

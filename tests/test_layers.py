"""Imports point one way: a package imports lower layers only, and there is no circle of modules."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import run_python

ROOT = Path(__file__).parents[1]
# From the ground up. Packages of one layer do not import each other.
LAYERS = (
    ("dllm.attention", "dllm.quant"),
    ("dllm.settings", "dllm.prompts", "dllm.ops", "dllm.cpu", "dllm.grammar"),
    ("dllm.engine",),
    ("dllm.models", "dllm.drafter", "dllm.api"),
    ("dllm.remote",),
    ("dllm.patches", "dllm.quantize", "dllm.tools"),
    ("dllm.train", "dllm.doctor"),
    ("dllm.cli",),
)
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
# `dllm/__init__.py` holds the version and the entry point, which imports when it is called.
ROOT_PACKAGE = "dllm"
WITHOUT_VLLM = ("dllm.ops", "dllm.grammar", "dllm.prompts", "dllm.cpu", "dllm.quantize")
# Neither is installed with the packages.
OUTSIDE = ("bench", "tests")


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    """Every module of our packages, by dotted name."""
    found = {}
    for package in ("dllm", "attention", "quant"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if package == "dllm" else ("dllm", *parts)  # dllm/attention is a link
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text())
    return found


def imports(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """What a module imports, wherever in it, as the longest dotted name that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module


def named(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Modules that a module names in strings ("module:Class"): they are there to be imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.split(":")[0]
            yield from (each for each in (name, name.rpartition(".")[0]) if each in known)


def package_of(module: str) -> str | None:
    """The package that a module is in; None for other packages and for `dllm/__init__.py`."""
    return next((package for package in LAYER_OF if f"{module}.".startswith(f"{package}.")), None)


def violations(modules: dict[str, ast.Module]) -> list[str]:
    """Imports that do not go down, and circles between modules."""
    known = set(modules)
    imported = {name: set(imports(tree, known)) for name, tree in modules.items()}
    wrong = []
    for name, tree in modules.items():
        package = package_of(name)
        everything = {*imported[name], *named(tree, known)}
        wrong += [f"{name} imports {each}" for each in everything if each.split(".")[0] in OUTSIDE]
        if package is None:
            assert name == ROOT_PACKAGE, f"{name} is in no package of LAYERS"
            at_once = ast.Module([node for node in tree.body if is_import(node)], [])
            wrong += [f"{name} imports {each}" for each in {*imports(at_once, known)} & known]
            continue
        for other in everything & known - {ROOT_PACKAGE}:
            below = package_of(other)
            if below is None or (below != package and LAYER_OF[below] >= LAYER_OF[package]):
                wrong.append(f"{name} imports {other}")
    graph = {name: others & known for name, others in imported.items()}
    del graph[ROOT_PACKAGE]
    return wrong + circles(graph)


def is_import(node: ast.AST) -> bool:
    """Whether a statement imports when the module is imported, not when a function is called."""
    return isinstance(node, ast.Import | ast.ImportFrom)


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import themselves through others; what imports nothing is taken away in turn."""
    left = {name: others & set(graph) for name, others in graph.items()}
    while leaves := {name for name, others in left.items() if not others & set(left)}:
        left = {name: others for name, others in left.items() if name not in leaves}
    return [f"{name} is in a circle, or imports one" for name in left]


def test_imports_go_down_and_never_in_a_circle(modules):
    assert violations(modules) == []


@pytest.mark.parametrize("package", WITHOUT_VLLM)
def test_lower_packages_know_no_vllm(package, modules):
    found = [
        (name, imported)
        for name, tree in modules.items()
        if package_of(name) == package
        for imported in imports(tree, set(modules))
        if imported.split(".")[0] == "vllm"
    ]
    assert found == []


def test_what_quantizes_is_imported_without_vllm():
    """Its environment has none: neither a family's settings nor what they import may need it."""
    lines = (
        "import sys, dllm.models",
        "sys.modules['vllm'] = None",  # whoever imports it fails
        "for family in dllm.models.FAMILIES.values(): family.settings_class()",
        "import dllm.models.unmasking.reference, dllm.models.llada2.reference",
    )
    run_python("-c", "\n".join(lines))


def test_every_package_says_what_it_is():
    for package in LAYER_OF:
        path = ROOT / package.replace(".", "/") / "__init__.py"
        if path.parent.is_dir():
            assert ast.get_docstring(ast.parse(path.read_text())), path


@pytest.mark.parametrize(
    ("where", "line", "complaint"),
    [
        ("dllm.engine.state", "from dllm.models.gemma import rule", "engine.state imports"),
        ("dllm.ops.noise", "def f():\n    import dllm.settings.checks", "ops.noise imports"),
        ("dllm.attention.masks", "from dllm.attention.reference import x", "circle"),
        ("dllm.heap", "", "dllm.heap is in no package"),
        ("dllm.engine.spans", 'X = "dllm.models.gemma.rule:Rules"', "engine.spans imports"),
        ("dllm.cpu.gumbel", "from bench import tables", "cpu.gumbel imports bench"),
        ("dllm", "from dllm.models import FAMILIES", "dllm imports dllm.models"),
    ],
)
def test_a_planted_violation_is_found(where, line, complaint, modules):
    before = modules[where].body if where in modules else []
    planted = ast.Module([*before, *ast.parse(line).body], [])
    try:
        found = violations(modules | {where: planted})
    except AssertionError as error:
        found = [str(error)]
    assert any(complaint in each for each in found), found

"""What our source takes from vLLM, and what vLLM's source says of it; neither has to be imported.

Both are read as syntax trees. So modules that cannot be imported here are checked, too.
"""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dllm.settings import vllm_names

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for folder in ("dllm", "attention", "quant") for path in (ROOT / folder).rglob("*.py")
)
# Methods that change a dictionary, a list or a set.
CHANGES = ("add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update")
WRAPPERS = ("property", "classmethod", "staticmethod")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Class(NamedTuple):
    """A class, and the module that defines it."""

    module: str
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return f"{self.module}.{self.node.name}"

    @property
    def is_ours(self) -> bool:
        return not self.module.startswith("vllm")

    @property
    def methods(self) -> dict[str, Function]:
        return {node.name: node for node in self.node.body if isinstance(node, Function)}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@functools.cache
def file_of(module: str) -> Path | None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(found.origin) if found is not None and found.origin else None


def module_of(path: Path) -> str:
    """The name under which a file of ours is imported."""
    if not path.is_relative_to(ROOT):
        return path.stem
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name if name.startswith("dllm") else f"dllm.{name}"


@functools.cache
def imported(path: Path, module: str) -> dict[str, str]:
    """The dotted name behind each name that a file imports, anywhere in it."""
    parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = {}
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            found |= {each.asname or each.name: f"{source}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.split(".")[0]
                found[each.asname or first] = each.name if each.asname else first
    return found


def installed(name: str) -> str:
    """A name of vLLM, or of our module of those that differ, as the installed vLLM has it."""
    for ours, places in vllm_names.PLACES.items():
        for place in (f"{vllm_names.__name__}.{ours}", *places):
            if f"{name}.".startswith(f"{place}."):
                return vllm_names.place_of(ours) + name.removeprefix(place)
    return name


def names_of_vllm(path: Path) -> dict[str, str]:
    """What a file of ours imports from vLLM: the dotted name behind each of its own names."""
    names = {name: installed(meant) for name, meant in imported(path, module_of(path)).items()}
    return {name: meant for name, meant in names.items() if meant.split(".")[0] == "vllm"}


def class_named(name: str, path: Path | None, module: str) -> Class | None:
    """The class that a (dotted) name means in a file; None: it is neither ours nor vLLM's."""
    for node in nodes_of(path) if path else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            return Class(module, node)
    first, _, rest = name.partition(".")
    meant = installed(imported(path, module).get(first, "")) if path else ""
    if meant.split(".")[0] not in ("vllm", "dllm"):
        return None
    owner, _, last = f"{meant}.{rest}".rstrip(".").rpartition(".")
    return class_named(last, file_of(owner), owner)


def behind(cls: Class, path: Path | None = None) -> Iterator[Class]:
    """The class and all its bases, ours and vLLM's, in the order in which a name is looked up."""
    yield cls
    for node in cls.node.bases:
        name = ast.unparse(node).partition("[")[0]
        base = class_named(name, path or file_of(cls.module), cls.module)
        if base is not None:
            yield from behind(base)


def subclasses_of_vllm(paths: Sequence[Path] = SOURCES) -> dict[Class, list[Class]]:
    """Our classes with a base of vLLM's, anywhere in a file, and what is `behind` each."""
    classes = (
        (Class(module_of(path), node), path)
        for path in paths
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    )
    found = {cls: list(behind(cls, path)) for cls, path in classes}
    return {cls: lines for cls, lines in found.items() if not all(one.is_ours for one in lines)}


class Override(NamedTuple):
    """A method of ours in front of one of vLLM's with the same name."""

    ours: Class
    base: Class
    name: str

    def __str__(self) -> str:
        return f"{self.ours.node.name}.{self.name}"


def overrides(paths: Sequence[Path] = SOURCES) -> list[Override]:
    """Every method of ours that replaces one of vLLM's, also of bases that stand beside vLLM's."""
    found = {
        Override(ours, base, name)
        for line in subclasses_of_vllm(paths).values()
        for ours in line
        if ours.is_ours
        for name in ours.methods
        if (base := next((one for one in line if not one.is_ours and name in one.methods), None))
    }
    return sorted(found, key=str)


def assignments(path: Path) -> Iterator[tuple[ast.expr, ast.expr | Function | None]]:
    """(target, value) of a file: of all that it assigns to, deletes, sets or replaces.

    "?" stands for the name of an attribute that is not written out.
    """
    nodes, values, loops = nodes_of(path), {}, {}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = getattr(node, "targets", None) or [node.target]
            values |= {id(target): node.value for target in targets}
        elif isinstance(node, ast.For):
            names = [ast.unparse(each) for each in getattr(node.target, "elts", [node.target])]
            items = [getattr(item, "elts", [item]) for item in getattr(node.iter, "elts", ())]
            meant = [dict(zip(names, item, strict=False)) for item in items]
            loops |= dict.fromkeys(map(id, ast.walk(node)), meant)
    for node in nodes:
        is_place = isinstance(node, ast.Attribute | ast.Subscript)
        if is_place and isinstance(node.ctx, ast.Store | ast.Del):
            yield node, values.get(id(node))
        elif (given := setting(node)) is not None:
            owner, name, value = given
            for item in loops.get(id(node)) or [{}]:
                named = item.get(ast.unparse(name), name)
                place = item.get(ast.unparse(owner), owner)
                yield ast.Attribute(place, getattr(named, "value", "?")), value


def setting(node: ast.AST) -> Sequence[ast.expr | Function | None] | None:
    """Owner, name and value of a call of setattr, or of our decorator; no value is deleted."""
    if isinstance(node, Function):
        ours = next(filter(is_replacing, node.decorator_list), None)
        return ours and [*ours.args, ast.Constant(node.name), node]
    called = getattr(node, "func", None)
    name = getattr(called, "id", getattr(called, "attr", None))
    is_set = name in ("setattr", "delattr", "__setattr__", "__delattr__") and len(node.args) > 1
    return [*node.args, None][:3] if is_set else None


def is_replacing(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", None) == "replaces"


# Modules of vLLM whose classes hold data: configurations, messages, parameters. Their fields are
# there to be set.
DATA = (
    "config",
    "engine/arg_utils.py",
    "entrypoints",
    "outputs.py",
    "sampling_params.py",
    "transformers_utils/model_arch_config_convertor.py",
    "v1/core/sched/output.py",
    "v1/engine/__init__.py",
    "v1/metrics/stats.py",
    "v1/outputs.py",
    "v1/worker/gpu/input_batch.py",
)
# Modules of vLLM whose objects run a model.
MACHINERY = ("compilation", "lora", "model_executor/layers", "v1")
MEMBER = re.compile(
    r"^ +(?:async )?def (\w+)|\bself\.(\w+)\b[^=\n(]*[^=!<>\n]?=(?!=)", re.MULTILINE
)


def of_vllm(places: Sequence[str]) -> Iterator[Path]:
    """vLLM's files below these paths in its package."""
    package = file_of("vllm")
    assert package is not None
    for place in places:
        path = package.parent / place
        yield from path.rglob("*.py") if path.is_dir() else [path]


@functools.cache
def fields_of_data() -> set[str]:
    """Names that classes of DATA declare."""
    return {
        field.target.id
        for path in of_vllm(DATA)
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


@functools.cache
def members_of_machinery() -> set[str]:
    """Names of methods, and of attributes that methods set on self, of classes of MACHINERY.

    By regular expressions: syntax trees of so many files take half a minute.
    """
    texts = (path.read_text() for path in of_vllm(MACHINERY))
    return {name for text in texts for pair in MEMBER.findall(text) for name in pair} - {""}


def set_on_self(cls: Class) -> set[str]:
    """Attributes that a class's methods set on self, and those that become ours (``Part``)."""
    set_in_methods = {
        target.attr
        for node in ast.walk(cls.node)
        for target in targets_of(node)
        if isinstance(target, ast.Attribute) and getattr(target.value, "id", None) == "self"
    }
    return set_in_methods | {
        str(getattr(node.target, "id", ""))
        for node in cls.node.body
        if isinstance(node, ast.AnnAssign) and "Part(" in ast.unparse(node)
    }


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to; each of several."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from getattr(target, "elts", [target])
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target


def set_on_objects(path: Path) -> set[str]:
    """Expressions of a file that replace a part of an object that vLLM runs: "runner.sample".

    That is an attribute of another object than self, if it has the name of a method or attribute of
    vLLM's MACHINERY and of no field of DATA; the class of an object; an object that is made anew in
    place, by a call of ``Class.__init__``.
    """
    theirs, found = names_of_vllm(path), set()
    for target, _ in assignments(path):
        if not isinstance(target, ast.Attribute):
            continue
        is_own = getattr(target.value, "id", None) in ("self", *theirs)
        is_theirs = target.attr in members_of_machinery() - fields_of_data()
        if not is_own and (is_theirs or target.attr in ("__class__", "?")):
            found.add(ast.unparse(target))
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".__init__"):
            is_super = ast.unparse(node.func).startswith("super()")
            made = node.args[0] if node.args and not is_super else None
            if made is not None and getattr(made, "id", None) != "self":
                found.add(f"{ast.unparse(made)}.__init__")
    return found


class Replaced(NamedTuple):
    """A dotted name of vLLM that a file of ours assigns to, and the function it gets, if any."""

    name: str
    function: Function | None


def replaced(path: Path) -> list[Replaced]:
    """Names of vLLM that a file assigns to, derives, puts as modules, and tables it changes."""
    theirs = names_of_vllm(path)
    found = []
    for target, value in assignments(path):
        names, owner = [], target
        while isinstance(owner, ast.Attribute | ast.Subscript):
            # What is in brackets is an entry, and no name of vLLM.
            names = [owner.attr, *names] if isinstance(owner, ast.Attribute) else []
            owner = owner.value
        if owner is not target and getattr(owner, "id", None) in theirs:
            name = ".".join([theirs[owner.id], *names])
            found.append(Replaced(name, function_behind(value, path)))
        module = module_put(target, path)
        if module.split(".")[0] == "vllm":
            found.append(Replaced(module, None))
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "derives":
            found.append(Replaced(theirs[ast.unparse(node.args[0])], None))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in CHANGES:
            first, _, rest = ast.unparse(node.func.value).partition(".")
            if first in theirs:
                found.append(Replaced(f"{theirs[first]}.{rest}".rstrip("."), None))
    return found


def module_put(target: ast.expr, path: Path) -> str:
    """The name in ``sys.modules[name]``, written there or in a constant; else empty."""
    if not isinstance(target, ast.Subscript) or ast.unparse(target.value) != "sys.modules":
        return ""
    made = (node for node in tree_of(path).body if isinstance(node, ast.Assign))
    constants = {getattr(node.targets[0], "id", None): node.value for node in made}
    name = constants.get(getattr(target.slice, "id", None), target.slice)
    return str(getattr(name, "value", ""))


def function_behind(value: ast.AST | None, path: Path) -> Function | None:
    """The function of this file that an expression is: itself, its name, or a call of its maker."""
    defined = {node.name: node for node in nodes_of(path) if isinstance(node, Function)}
    if isinstance(value, ast.Call) and getattr(value.func, "id", None) in WRAPPERS:
        value = value.args[0]
    if isinstance(value, Function):
        return value
    if isinstance(value, ast.Name):
        return defined.get(value.id)
    maker = defined.get(getattr(getattr(value, "func", None), "id", ""))
    returned = (
        [node.value for node in ast.walk(maker) if isinstance(node, ast.Return)] if maker else ()
    )
    names = [node.id for node in returned if isinstance(node, ast.Name)]
    return next((defined[name] for name in names if name in defined), None)


def function_of_vllm(name: str) -> Function | None:
    """vLLM's own function or method of a dotted name, whatever was patched."""
    owner, _, last = name.rpartition(".")
    if (path := file_of(owner)) is not None:
        for node in tree_of(path).body:
            if isinstance(node, Function) and node.name == last:
                return node
        meant = imported(path, owner).get(last)
        return function_of_vllm(meant) if meant else None
    module, _, cls = owner.rpartition(".")
    found = class_named(cls, file_of(module), module)
    line = behind(found) if found else ()
    return next((one.methods[last] for one in line if last in one.methods), None)

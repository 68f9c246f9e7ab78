"""Whether a function of ours takes the calls that one of vLLM's takes; both are syntax trees."""

import ast

from tests.support.vllm_source import Function


def mismatch(ours: Function, theirs: Function) -> str:
    """Why a call that vLLM's function takes would mean something else to ours; empty: it would not.

    What ours passes on as it comes (``*args``, ``**kwargs``) is not compared, nor what `replaces`
    passes first (``theirs``).
    """
    a, b = ours.args, theirs.args
    mine, their = [*a.posonlyargs, *a.args], [*b.posonlyargs, *b.args]
    mine = [each for each in mine if each.arg != "theirs"]
    given, wanted = defaults(a), defaults(b)
    names = [each.arg for each in mine]
    by_name = {*names[len(a.posonlyargs) :], *(each.arg for each in a.kwonlyargs)}
    for place, parameter in enumerate(their):
        name = parameter.arg
        if place < len(names):
            if names[place] != name and place > 0:
                return f"{names[place]} is in the place of {name}"
        elif not (a.vararg and a.kwarg) and not (a.kwarg and name in by_name):
            return f"{name} is not taken"
    lacking = [each.arg for each in b.kwonlyargs if each.arg not in by_name and not a.kwarg]
    lacking += ["*"] * bool(b.vararg and not a.vararg) + ["**"] * bool(b.kwarg and not a.kwarg)
    if lacking:
        return f"{lacking} are not taken"
    known = {*wanted, *(each.arg for each in (*their, *b.kwonlyargs)), names[0] if names else ""}
    asked = [name for name in (*names, *by_name) if name not in known and name not in given]
    if asked and not (b.vararg or b.kwarg):
        return f"{asked} are asked for"
    for name in wanted.keys() & ({*names} | by_name):
        if given.get(name) != wanted[name]:
            return f"the default of {name} is {wanted[name]}"
    return ""


def defaults(arguments: ast.arguments) -> dict[str, str]:
    """The text of each default, by parameter."""
    places = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(reversed(places), reversed(arguments.defaults), strict=False)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {parameter.arg: ast.unparse(value) for parameter, value in pairs if value is not None}

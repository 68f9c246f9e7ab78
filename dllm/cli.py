"""The ``dllm`` command: finds the module of a subcommand and passes it the other arguments.

Every subcommand is a function of its arguments that returns the exit status: ``main`` of a module,
unless another one is named. A module is imported only when its subcommand is asked for, so
``dllm --help`` needs no torch. A subcommand
raises CommandError for a mistake that the user can correct; it is printed as one line.
"""

import importlib
import sys
from collections.abc import Sequence

from dllm import __version__
from dllm.settings.checks import did_you_mean
from dllm.settings.command import FAILED, INTERRUPTED, MISUSED, OK, CommandError

# Name: (module, or module:function; help text).
COMMANDS = {
    "train drafter": ("dllm.train.commands:train_drafter", "train a drafter on what a target says"),
    "train pilot": (
        "dllm.train.commands:train_pilot",
        "train what chooses a draft width by the prompt",
    ),
    "recalibrate": (
        "dllm.train.commands:recalibrate",
        "go on training a server's drafter on its traffic",
    ),
    "check-drafter": (
        "dllm.train.commands:check_drafter",
        "measure whether a drafter fits its target",
    ),
    "eval": (
        "dllm.tools.decisions",
        "score a server's typed decisions on the questions of a file",
    ),
    "plan": ("dllm.tools.plan", "how many drafts pay, and what they take"),
    "doctor": ("dllm.doctor.command", "look at what a server needs of this machine"),
    "watch": ("dllm.tools.watch", "watch a canvas settle, step by step"),
    "draft-worker": ("dllm.remote.command", "serve drafts to targets, from a pool of its own"),
    "draft-keys": ("dllm.remote.keys", "write keys for draft workers on other machines"),
    "quantize": ("dllm.quantize.command", "write an FP8 or NVFP4 checkpoint, with LLM Compressor"),
    "check-quant": ("dllm.quantize.check_command", "look for what is wrong with such a checkpoint"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status.

    0: it succeeded. 1: it failed. 2: the command line is wrong. 130: the user interrupted it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return OK if arguments else MISUSED
    if arguments[0] == "--version":
        print(f"dllm {__version__}")
        return OK
    num_words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    name, rest = " ".join(arguments[:num_words]), arguments[num_words:]
    if name not in COMMANDS:
        below = [each for each in COMMANDS if each.startswith(f"{name} ")]
        hint = "" if below else did_you_mean(name, list(COMMANDS))
        allowed = ", ".join(below or COMMANDS)
        print(f"dllm: no command {name!r}{hint}; allowed: {allowed}.", file=sys.stderr)
        return MISUSED
    try:
        module, _, function = COMMANDS[name][0].partition(":")
        status: int = getattr(importlib.import_module(module), function or "main")(rest)
        return status
    except CommandError as error:
        print(f"dllm {name}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"dllm {name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def usage() -> str:
    """The help text of ``dllm``: one line for each subcommand."""
    lines = [f"  {name:<14}{help_text}" for name, (_, help_text) in COMMANDS.items()]
    return "\n".join(
        ["usage: dllm COMMAND ...", "", *lines, "", "dllm COMMAND --help says what it takes."]
    )


if __name__ == "__main__":
    sys.exit(main())

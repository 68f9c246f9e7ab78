"""``dllm quantize``: checks the request, then starts ``make`` in LLM Compressor's environment."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dllm.quantize.arguments import parser
from dllm.settings.command import OK, CommandError
from dllm.settings.files import ROOT, beside, whole

TERMINATED = 128 + signal.SIGTERM  # exit status


def main(argv: Sequence[str]) -> int:
    """Raises CommandError: it cannot be done. Then, and if stopped, ``--out`` is not there."""
    parser().parse_args(argv)  # --help, or a wrong command line, before torch is imported
    from dllm.quantize.job import prepare

    _, args = prepare(argv)
    # What was begun is cleared away; a running process is ended by ``status_of``.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    with appearing(args.out) as made, tempfile.TemporaryDirectory() as directory:
        python = find_python(args.python)
        print(f"{args.model} -> {args.out} ({args.scheme})", flush=True)
        # The other environment does not have our packages. They come through links, because this
        # environment's site-packages on PYTHONPATH would bring everything else along.
        (Path(directory) / "dllm").symlink_to(ROOT / "dllm")
        environment = os.environ | {"PYTHONPATH": directory, "PYTHONUNBUFFERED": "1"}
        end = argv.index("--") if "--" in argv else len(argv)
        given = [*argv[:end], "--out", str(made), *argv[end:]]
        status = status_of([python, "-m", "dllm.quantize.make", *given], environment)
        if status != OK:
            sys.exit(status)
    print(f"{args.out} is ready: `dllm check-quant {args.out} --against {args.model}`")
    return OK


def status_of(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> int:
    """The exit status of a process, which SIGTERM ends, also while it is being started.

    The handler raises nothing: an exception would leave a process behind that ``Popen`` has begun
    to start. SystemExit is raised when the process has ended.
    """
    running: list[subprocess.Popen[bytes]] = []
    is_terminated = False

    def terminate(*_: object) -> None:
        nonlocal is_terminated
        is_terminated = True
        for process in running:
            process.kill()

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with subprocess.Popen(command, env=environment) as process:
            running.append(process)
            try:
                if is_terminated:
                    process.kill()
                status = process.wait()
            except BaseException:  # Ctrl-C
                process.kill()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if is_terminated:
        sys.exit(TERMINATED)
    return status


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """``whole``. Raises CommandError: there is no folder for ``out``, or ``out`` has appeared."""
    from dllm.quantize.job import refuse_existing

    parent = out.absolute().parent
    if not parent.is_dir():
        raise CommandError(f"--out {out}: there is no directory {parent}.")
    with whole(out) as made:
        yield made
        refuse_existing(out)


def find_python(given: Path | None) -> Path:
    """In a checkout, its environment is made if missing. Raises CommandError: there is none."""
    if given is not None:
        if not given.is_file():
            raise CommandError(f"--python {given}: there is no such file.")
        return given
    if (python := beside("quant")) is not None:
        return python
    if (ROOT / "Makefile").is_file():
        print("Making LLM Compressor's environment (once): make setup-quant", flush=True)
        status = status_of(["make", "-C", str(ROOT), "setup-quant"])
        if status == OK and (python := beside("quant")) is not None:
            return python
        raise CommandError(
            f"`make setup-quant` failed; run it in {ROOT} to see why, or name an interpreter that "
            "has LLM Compressor with --python."
        )
    raise CommandError(
        "LLM Compressor needs an environment of its own. Make one (python3 -m venv quant-env; "
        "quant-env/bin/pip install 'llmcompressor==0.14.*' torch==2.13.0) and name it: --python "
        "quant-env/bin/python."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Our own switches one at a time, each on against off, so that every gain is attributed.

    python -m bench.switches                                  # all of them
    python -m bench.switches --switch eos_stop --rounds 9

    commit          overlapped with the next block's first denoise step | a pass of its own
    eos_stop        what stands behind end-of-sequence need not converge | the reference's rule
    soft_embedding  without tokens of negligible mass | the exact product. A vocabulary as small as
                    tiny-dllm's is always multiplied exactly, so expect no difference from that one;
                    bench.sampling_step has 262 thousand tokens.
    compile         compiled | eager

Two servers (one for eos_stop, which is an argument of a request) take turns on questions of the
task suite; the first setting is the product's default. Everything else is as in bench.serve: what
is measured, what is refused, how the turns are taken. Written: switches.csv. The last table says
for each switch what it saves and whether as many answers are right: the Wilson interval at 95% of
each setting, over all of its runs.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.baselines import write_generation_config
from bench.client import Client
from bench.command import add_serve_flags, canvas_length, reporting_failures
from bench.context import RESULTS, progress, provenance, write_csv
from bench.measure import OVERLAPPED, SEPARATE, Measurement
from bench.race import Contestant, Race, admit, start_all
from bench.report import Measured, Spread, aligned, csv_rows, pair_ratios, tables
from bench.servers import Server, ServerOptions
from bench.workloads import ADAPTIVE, QUESTIONS, Shape, Workload, card_accuracy
from dllm.tools.eval_report import wilson_interval


@dataclass(frozen=True)
class Setting:
    """One side of a switch: what it adds to the server's flags and to each request."""

    label: str
    server_flags: tuple[str, ...] = ()
    extra_body: str = ""
    commits: int = OVERLAPPED

    @property
    def client_flags(self) -> tuple[str, ...]:
        """Of ``vllm bench serve``."""
        return ("--extra-body", self.extra_body) if self.extra_body else ()


def plugin(**options: str) -> tuple[str, ...]:
    """The flags that set options of ours."""
    return ("--additional-config", json.dumps({"dllm": options}))


# By name: the default, and the other setting.
SWITCHES = {
    "commit": (
        Setting("commit overlapped", plugin(commit="overlapped")),
        Setting("commit separate", plugin(commit="separate"), commits=SEPARATE),
    ),
    "eos_stop": (
        Setting("eos_stop on", extra_body=json.dumps({"vllm_xargs": {"diffusion_eos_stop": 1}})),
        Setting("eos_stop off", extra_body=json.dumps({"vllm_xargs": {"diffusion_eos_stop": 0}})),
    ),
    "soft_embedding": (
        Setting("soft_embedding sparse", plugin(soft_embedding="sparse")),
        Setting("soft_embedding exact", plugin(soft_embedding="exact")),
    ),
    "compile": (Setting("compiled"), Setting("eager", ("--enforce-eager",))),
}


@dataclass(frozen=True)
class Options:
    """The command line."""

    model: Path
    switches: tuple[str, ...]
    rounds: int
    workloads: tuple[Workload, ...]
    serve_flags: tuple[str, ...]
    results: Path


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every switch, print the tables, write the CSV."""
    options = parse(arguments)
    rows: list[dict[str, object]] = []
    gains: list[tuple[str, ...]] = [GAIN_COLUMNS]
    about = provenance("bench.switches")
    for name in options.switches:
        measured = measure(options, name)
        print(f"\n{tables(measured)}")
        rows += [{"switch": name} | row for row in csv_rows(measured, "", about)]
        gains += [gain(workload, measured, name) for workload in options.workloads]
    path = options.results / "switches.csv"
    write_csv(path, rows)
    print("\n" + "\n".join(aligned(gains)) + f"\n\n{path}")
    return 1 if any(row["problem"] for row in rows) else 0


def measure(options: Options, name: str) -> list[tuple[Workload, Measurement]]:
    """All rounds of one switch.

    Raises:
        GateError: outputs are wrong.
        RuntimeError: a server or client failed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-bench-")))
        generation = folder / "generation"
        write_generation_config(options.model, generation, None)
        servers: dict[tuple[str, ...], Server] = {}
        contestants = []
        for setting in SWITCHES[name]:
            flags = ("--generation-config", str(generation), *options.serve_flags)
            flags += setting.server_flags
            log = folder / f"{len(servers)}.log"
            served = ServerOptions(setting.label, str(options.model), flags)
            server = servers.setdefault(setting.server_flags, Server(served, log))
            contestants.append(
                Contestant(
                    setting.label,
                    options.model,
                    setting.commits,
                    server,
                    client_flags=setting.client_flags,
                    expected=card_accuracy(options.model),
                )
            )
        progress(f"{name}: starting {len(servers)} server(s)")
        start_all(list(servers.values()), stack)
        for contestant in contestants:
            admit(contestant, options.workloads[0].shape)
        return Race(contestants, options.workloads, options.rounds, Client(folder)).run()


GAIN_COLUMNS = (
    "switch",
    "load",
    "tokens/s, on / off",
    "denoise steps per block, on / off",
    "passes per block, on / off",
    "correct, on",
    "correct, off",
)


def gain(workload: Workload, measured: Measured, name: str) -> tuple[str, ...]:
    """A line of the last table."""
    on, off = (setting.label for setting in SWITCHES[name])
    runs = [one for its, one in measured if its == workload]
    cells = [name, workload.load]
    for metric in ("tokens_per_s", "steps_per_block", "passes_per_block"):
        ratios = pair_ratios(runs, metric, on, off)
        cells.append(Spread.of(ratios).text(3) if ratios else "-")
    for label in (on, off):
        answered = [one for one in runs if one.contestant == label and one.num_correct is not None]
        correct = sum(one.num_correct or 0 for one in answered)
        asked = sum(one.num_requests for one in answered)
        low, high = wilson_interval(correct, asked)
        share = 100 * correct / asked
        cells.append(f"{correct} of {asked}: {share:.1f} % [{100 * low:.1f}, {100 * high:.1f}]")
    return tuple(cells)


def parse(arguments: Sequence[str] | None) -> Options:
    """Read the command line; exits with a message when it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("checkpoints/tiny-dllm"))
    parser.add_argument("--switch", nargs="+", choices=list(SWITCHES), default=list(SWITCHES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--num-requests", type=int, default=60, help="of a run")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    add_serve_flags(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV")
    given = parser.parse_args(arguments)
    canvas = canvas_length(parser, given.model)
    shape = Shape(canvas, input_len=64, output_len=2 * canvas)
    return Options(
        model=given.model,
        switches=tuple(given.switch),
        rounds=given.rounds,
        workloads=tuple(
            Workload(ADAPTIVE, QUESTIONS, given.num_requests, shape, concurrency)
            for concurrency in given.concurrency
        ),
        serve_flags=tuple(given.serve_flags),
        results=given.results,
    )


if __name__ == "__main__":
    sys.exit(main())

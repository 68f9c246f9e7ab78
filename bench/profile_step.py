"""Where the wall time of a denoise step goes, from a trace of a real engine.

    python -m bench.profile_step                                  # ours, eager and compiled, CPU
    python -m bench.profile_step --server ours built-in --concurrency 1 8
    python -m bench.profile_step --profiler torch --traces DIR    # kernels, for Perfetto
    python -m bench.profile_step --read DIR/ours-eager-8-0.json   # the table of a trace

The engine core runs in a process of its own, as behind ``vllm serve``; a client in this one hands
it requests whose blocks all take --steps denoise steps. Only steps in which every request denoises
and nothing else runs are counted, without the fastest and the slowest tenth; a component's time is
its mean over them, so that the components add up to the mean step. `bench.step_ranges` says which
function belongs to which component, `bench.step_trace` how an instant is attributed.

There is no table and no CSV, and the exit code is 1, unless
    every request got all of its tokens,
    the trace holds as many canvas rows as the requests took denoise steps,
    its steps cover --coverage of the time that the client waited (another clock), and
    the components without the gaps cover --coverage of the counted steps (on a CPU; on a GPU gaps
    are what one looks for).

``--profiler clock`` (on a CPU) costs two reads of a clock a component; ``torch`` (on a GPU) is
vLLM's own torch.profiler, which slows every operation down. What either cost is in the table: the
same work without it, alternately.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.context import RESULTS, ROOT, provenance, write_csv
from bench.profile_engine import BUILTIN, OURS, EngineProcess, Job, Taken
from bench.step_ranges import GROUPS, IDLE
from bench.step_trace import Step, Trace

MODES = ("eager", "compiled")


@dataclass(frozen=True)
class Breakdown:
    """The mean step of some, by component."""

    step_ms: float
    num_steps: int
    parts_ms: dict[str, float]
    low_ms: dict[str, float]
    high_ms: dict[str, float]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Breakdown:
        """Of the middle four fifths of the steps, by wall time.

        Raises ValueError if there are too few for that to mean anything.
        """
        if len(steps) < 10:
            raise ValueError(f"{len(steps)} denoise steps; at least 10 make a table.")
        ordered = sorted(steps, key=lambda step: step.wall_ms)
        cut = len(ordered) // 10
        middle = ordered[cut : len(ordered) - cut]
        columns = {part: sorted(step.parts_ms[part] for step in middle) for part in GROUPS}
        tenth = len(middle) // 10
        return cls(
            statistics.fmean(step.wall_ms for step in middle),
            len(middle),
            {part: statistics.fmean(values) for part, values in columns.items()},
            {part: values[tenth] for part, values in columns.items()},
            {part: values[-1 - tenth] for part, values in columns.items()},
        )

    @property
    def named_share(self) -> float:
        """What the components cover without the gaps."""
        return 1 - self.parts_ms[IDLE] / self.step_ms

    def rows(self) -> list[dict[str, object]]:
        """A row of the CSV for each component; their shares add up to 1."""
        return [
            {
                "component": part,
                "group": group,
                "ms_per_step": self.parts_ms[part],
                "low_ms": self.low_ms[part],
                "high_ms": self.high_ms[part],
                "share": self.parts_ms[part] / self.step_ms,
                "step_ms": self.step_ms,
                "steps": self.num_steps,
            }
            for part, group in GROUPS.items()
        ]

    def table(self, title: str) -> str:
        """One line a component that took any time."""
        lines = [f"{title}: {self.step_ms:.3f} ms a step, mean of {self.num_steps}"]
        for part, value in self.parts_ms.items():
            if self.high_ms[part] > 0:
                spread = f"[{self.low_ms[part]:.3f} .. {self.high_ms[part]:.3f}]"
                lines.append(f"  {part:30} {value:9.3f} ms {value / self.step_ms:6.1%}  {spread}")
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Take or read traces, print tables, write the CSV."""
    options = parse(arguments)
    if options.read:
        for path in options.read:
            steps = [step for step in Trace.read(path).steps() if step.is_denoise_only]
            print(Breakdown.of(steps).table(str(path)))
        return 0
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="dllm-profile-") as folder:
        try:
            for mode in options.mode:
                for job, taken in measure(jobs(options, mode, folder), options):
                    rows += report(job, taken, options.coverage)
        except (RuntimeError, ValueError) as error:
            print(f"No table, because:\n{error}", file=sys.stderr)
            return 1
    shared = provenance("bench.profile_step")
    path = options.results / f"profile_{'cuda' if options.cuda else 'cpu'}.csv"
    write_csv(path, [row | shared for row in rows])
    print(path)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "tiny-dllm")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--server", nargs="+", choices=(OURS, BUILTIN), default=[OURS])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--steps", type=int, default=16, help="denoise steps of every block")
    parser.add_argument("--blocks", type=int, default=4, help="of every request")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="with and without the profiler")
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--profiler", choices=("clock", "torch"), help="default: by device")
    parser.add_argument("--traces", type=Path, help="keep the traces in this folder")
    parser.add_argument("--read", nargs="+", type=Path, help="only print the tables of traces")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV")
    options = parser.parse_args(arguments)
    options.cuda = shutil.which("nvidia-smi") is not None
    return options


def jobs(options: argparse.Namespace, mode: str, folder: str) -> list[Job]:
    """One engine for each server."""
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
    return [
        Job(
            model=str(options.model),
            folder=str(options.traces.resolve() if options.traces else folder),
            server=server,
            mode=mode,
            max_num_seqs=max(options.concurrency),
            steps=options.steps,
            blocks=options.blocks,
            input_len=options.input_len,
            profiler=options.profiler or ("torch" if options.cuda else "clock"),
        )
        for server in options.server
    ]


def measure(some: Sequence[Job], options: argparse.Namespace) -> list[tuple[Job, list[Taken]]]:
    """Every task of every job, the servers in turn.

    Raises:
        RuntimeError: an engine failed.
    """
    taken: list[list[Taken]] = [[] for _ in some]
    with ExitStack() as stack:
        engines = [stack.enter_context(EngineProcess(job)) for job in some]
        for engine in engines:
            seconds = engine.wait_until_ready()
            print(f"{engine.job.name}: ready in {seconds:.0f} s", file=sys.stderr, flush=True)
        for concurrency in options.concurrency:
            for index in range(options.rounds):
                order = range(len(engines)) if index % 2 == 0 else reversed(range(len(engines)))
                for number in order:
                    taken[number].append(engines[number].do(concurrency, index))
    return list(zip(some, taken, strict=True))


# --- gates, table, rows --------------------------------------------------------------------------


def report(job: Job, taken: Sequence[Taken], coverage: float) -> list[dict[str, object]]:
    """Print a table for each concurrency and return its rows.

    Raises:
        ValueError: a trace does not account for what the client saw; the message says which.
    """
    rows: list[dict[str, object]] = []
    for concurrency in dict.fromkeys(one.concurrency for one in taken):
        some = [one for one in taken if one.concurrency == concurrency]
        steps = [step for one in some for step in steps_of(one, concurrency, coverage)]
        breakdown = Breakdown.of(steps)
        if breakdown.named_share < coverage and job.profiler == "clock":
            raise ValueError(
                f"{job.name}: the named parts cover {breakdown.named_share:.0%} of a step; "
                f"--coverage asks for {coverage:.0%}."
            )
        slower = statistics.median(one.wall_ms / one.plain_wall_ms for one in some)
        title = f"{job.server}, {job.mode}, {concurrency} at a time"
        print(f"{breakdown.table(title)}\n  with the profiler / without: {slower:.3f}", flush=True)
        shared = {"mode": job.mode, "server": job.server, "concurrency": concurrency}
        of_all = {"profiler": job.profiler, "slowed_by": slower}
        rows += [shared | row | of_all for row in breakdown.rows()]
    return rows


def steps_of(taken: Taken, num_reqs: int, coverage: float) -> list[Step]:
    """The denoise-only steps of a trace in which so many requests ran.

    Raises:
        ValueError: the trace and its client disagree.
    """
    trace = Trace.read(Path(taken.path))
    problems = trace_problems(trace, taken, coverage)
    if problems:
        raise ValueError("\n".join(problems))
    steps = trace.steps()
    return [step for step in steps if step.is_denoise_only and step.num_reqs == num_reqs]


def trace_problems(trace: Trace, taken: Taken, coverage: float) -> list[str]:
    """Where a trace and its client disagree."""
    problems = []
    rows = trace.num_canvas_rows()
    if rows != taken.canvas_rows:
        problems.append(f"{taken.path}: {rows} canvas rows instead of {taken.canvas_rows}.")
    share = trace.span_ms() / taken.wall_ms
    if not coverage <= share <= 1:
        problems.append(
            f"{taken.path}: its steps cover {share:.0%} of the {taken.wall_ms:.1f} ms that the "
            f"client waited; allowed: {coverage:.0%} to 100%."
        )
    return problems


if __name__ == "__main__":
    sys.exit(main())

"""Reinforcement learning with a server as the rollout engine: the loop closed, and what it costs.

    python -m bench.rollout                  # checkpoints/tiny-sdar on `sort`, where it is weakest
    python -m bench.rollout --max-steps 1    # in one denoise step a block

Each step asks the server for --group answers to each of --questions training questions, and rewards
an answer that is right with 1. The gradient is that of GRPO with one update for each sample (Z.
Shao et al., 2024, https://arxiv.org/abs/2402.03300): an answer's advantage is its reward less the
mean of its group, over the group's standard deviation. The log-probability of a token is that of
the step in which it was decided. The server's trace says which step that was, so the trainer shows
its own model the same canvases again, all blocks of all answers in one pass for each step (Y. Wang
et al., 2025, https://arxiv.org/abs/2509.06949). Then the server reads the new weights.

Printed, and written to --results: rewards, right answers to held-out questions (greedy),
rollouts/s, the share of the time that passes in the server, and the largest difference between the
server's log-probabilities and the trainer's, which shows that both compute the same thing.
"""

import argparse
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from bench.context import (
    ROOT,
    GateError,
    Row,
    Rows,
    command_line,
    progress,
    publish,
    reporting_failures,
)
from bench.servers import SERVE_FLAGS, Server
from bench.tables import Section, markdown
from dllm.models.unmasking.reference import additive, load_model
from dllm.tasks.suite import Question, question, questions
from dllm.train.lm.objective import Encoded
from dllm.train.lm.two_copies import TwoCopies

ANSWER_TOKENS = 64
FLAGS = ("--dtype", "float32", "--max-num-seqs", "64", *SERVE_FLAGS)
LARGEST_DIFFERENCE = 1e-2  # nats: kernels differ in rounding; another canvas differs by whole nats
# Columns of the file, and of the table.
COLUMNS = {
    "step": ("step", "{:.0f}"),
    "reward": ("reward", "{:.3f}"),
    "heldout": ("held-out questions right", "{:.1%}"),
    "rollouts_per_s": ("rollouts/s", "{:.0f}"),
    "server_share": ("in the server", "{:.0%}"),
    "nats_apart": ("nats apart", "{:.0e}"),
}


class Rollouts(NamedTuple):
    """Answers of one step, by group: G answers to each question, one after another.

    Attributes:
        prompts: token ids.
        tokens: those of the answer and what stood behind its end in the last block.
        steps: by token, the denoise step of its block that decided it; 0: it was given.
        logprobs: by token, the server's.
        lengths: tokens of each answer itself.
        rewards: 1 for a right answer, else 0.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    steps: list[list[int]]
    logprobs: list[list[float]]
    lengths: list[int]
    rewards: Tensor

    def undecided(self, group: int) -> "Rollouts":
        """Those of groups with right and wrong answers: from the others nothing is learned."""
        means = self.rewards.view(-1, group).mean(1)
        kept = ((means > 0) & (means < 1)).repeat_interleave(group)

        lists = ([*itertools.compress(line, kept)] for line in self[:-1])
        return Rollouts._make([*lists, self.rewards[kept]])


class Actor:
    """The server: answers with the weights that it was given last."""

    def __init__(self, server: Server, tokenizer: Any, max_steps: int | None) -> None:
        self.server, self._encode = server, tokenizer
        self._limits = {} if max_steps is None else {"diffusion_max_steps": max_steps}
        self.seconds = 0.0  # in which somebody waited for it

    def ask(
        self, asked: Sequence[Question], count: int, trace: Mapping[str, Any] = {}, **options: Any
    ) -> tuple[Any, list[Any]]:
        """The prompts' ids, and ``count`` choices for each of them, in order."""
        prompts = Encoded.of(self._encode, asked).prompts
        begin = time.perf_counter()
        answer = self.server.post(
            "/v1/completions",
            prompt=prompts,
            n=count,
            max_tokens=ANSWER_TOKENS,
            vllm_xargs={**self._limits, **trace},
            **options,
        )
        self.seconds += time.perf_counter() - begin
        return prompts, sorted(answer["choices"], key=lambda choice: choice["index"])

    def sample(self, asked: Sequence[Question], count: int, seed: int) -> Rollouts:
        """Answers at temperature 1, with their traces."""
        trace = {"diffusion_trace": ["behind_stop"]}
        prompts, choices = self.ask(asked, count, trace, temperature=1, seed=seed)
        traces = [choice["diffusion_trace"] for choice in choices]

        def whole(name: str) -> list[Any]:
            return [trace[name] + trace.get("behind_stop", {}).get(name, []) for trace in traces]

        repeated = [one for one in asked for _ in range(count)]
        pairs = zip(repeated, choices, strict=True)
        rewards = [float(one.is_correct(choice["text"])) for one, choice in pairs]
        return Rollouts(
            [prompt for prompt in prompts for _ in range(count)],
            whole("token_ids"),
            whole("reveal_steps"),
            whole("logprobs"),
            [len(trace["token_ids"]) for trace in traces],
            torch.tensor(rewards),
        )

    def accuracy(self, asked: Sequence[Question]) -> float:
        """The share of questions that get a right answer, greedily."""
        _, choices = self.ask(asked, 1, temperature=0)
        pairs = zip(asked, choices, strict=True)
        return sum(one.is_correct(choice["text"]) for one, choice in pairs) / len(asked)

    def load(self, folder: Path) -> None:
        """Answer with these weights from now on."""
        begin = time.perf_counter()
        path = {"weights_path": str(folder)}
        self.server.post("/collective_rpc", method="reload_weights", kwargs=path)
        self.server.post("/reset_prefix_cache")
        self.seconds += time.perf_counter() - begin


def replay(model: PreTrainedModel, rollouts: Rollouts, block_length: int, mask: int) -> Tensor:
    """The log-probability of each token, ``[N, T]``, when it was decided; 0 where none was.

    Pass k shows every block as it stood before its step k: what was decided before, and masks.
    """
    encoded = Encoded(rollouts.prompts, rollouts.tokens)
    copies = TwoCopies.of(encoded, torch.full((len(encoded.prompts),), block_length))
    steps = torch.zeros_like(copies.clean)
    rows, columns = copies.is_target.nonzero(as_tuple=True)
    places = copies.positions[:, copies.is_noised][rows, columns]
    places -= torch.tensor([len(prompt) for prompt in encoded.prompts])[rows]
    longest = max(map(len, rollouts.tokens))
    decided = torch.tensor([line + [0] * (longest - len(line)) for line in rollouts.steps])
    steps[rows, columns] = decided[rows, places]
    found = torch.zeros(len(encoded.prompts), longest)
    for step in range(1, int(steps.max()) + 1):
        noised = torch.where((steps >= step) & copies.is_target, mask, copies.clean)
        chosen = steps == step
        hidden = model.model(
            input_ids=torch.cat((copies.ids, noised), dim=1),
            attention_mask=additive(copies.visible()),
            position_ids=copies.positions,
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden[:, copies.is_noised][chosen]).float()
        logits[:, mask] = -torch.inf
        logprobs = logits.log_softmax(-1).gather(1, copies.clean[chosen][:, None])[:, 0]
        of_chosen = chosen[rows, columns]
        found = found.index_put((rows[of_chosen], places[of_chosen]), logprobs)
    return found


def loss_of(logprobs: Tensor, rollouts: Rollouts, group: int) -> Tensor:
    """GRPO's, for rollouts of the weights that are trained: each answer's mean over its tokens."""
    rewards = rollouts.rewards.view(-1, group)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    columns = torch.arange(logprobs.shape[1])
    counts = columns < torch.tensor(rollouts.lengths)[:, None]
    means = (logprobs * counts).sum(1) / counts.sum(1)
    return -(advantages.view(-1) * means).mean()


def difference(logprobs: Tensor, rollouts: Rollouts) -> float:
    """The largest one between the server's log-probabilities and these, in nats."""
    return max(
        abs(theirs - ours)
        for line, row in zip(rollouts.logprobs, logprobs.tolist(), strict=True)
        for theirs, ours in zip(line, row, strict=False)
        if theirs is not None
    )


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the table, write rollout.csv."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="dllm-rollout-") as folder:
        weights = Path(folder) / "model"
        shutil.copytree(options.model, weights)
        server = Server(
            "the server", str(weights), Path(folder) / "log", FLAGS, {"VLLM_SERVER_DEV_MODE": "1"}
        )
        with server:
            server.wait_until_ready()
            rows = train(options, server, weights)
    publish(options.results / SECTION.file, rows)
    print(SECTION(options.results))
    return 0


def train(options: argparse.Namespace, server: Server, folder: Path) -> list[Row]:
    """The rows of the table: one before the first step, one each --every steps.

    Raises:
        GateError: the server's log-probabilities are not those of the trainer.
    """
    tokenizer = AutoTokenizer.from_pretrained(options.model).backend_tokenizer
    model, actor = load_model(options.model), Actor(server, tokenizer, options.max_steps)
    block_length, mask = int(model.config.block_size), int(model.config.mask_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, (0.9, 0.99), weight_decay=0.0)
    heldout = questions([options.family], "heldout", options.heldout)
    dice = random.Random(options.seed)
    rewards, apart = [], 0.0
    rows = [{"step": 0, "heldout": actor.accuracy(heldout)}]
    seconds, in_server = 0.0, 0.0
    for step in range(1, options.steps + 1):
        begin, waited = time.perf_counter(), actor.seconds
        asked = [
            question(options.family, "train", dice.getrandbits(48))
            for _ in range(options.questions)
        ]
        rollouts = actor.sample(asked, options.group, seed=dice.getrandbits(31))
        rewards.append(float(rollouts.rewards.mean()))
        rollouts = rollouts.undecided(options.group)
        if rollouts.tokens:
            logprobs = replay(model, rollouts, block_length, mask)
            apart = max(apart, difference(logprobs, rollouts))
            if apart > LARGEST_DIFFERENCE:
                raise GateError(f"log-probabilities differ by {apart:.3g} nats in step {step}.")
            optimizer.zero_grad()
            loss_of(logprobs, rollouts, options.group).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            save_file(dict(model.named_parameters()), folder / "model.safetensors")
            actor.load(folder)
        seconds += time.perf_counter() - begin
        in_server += actor.seconds - waited
        if step % options.every == 0:
            rows.append(
                {
                    "step": step,
                    "heldout": actor.accuracy(heldout),
                    "reward": sum(rewards) / len(rewards),
                    "rollouts_per_s": len(rewards) * options.group * options.questions / seconds,
                    "server_share": in_server / seconds,
                    "nats_apart": apart,
                }
            )
            progress("  " + ", ".join(cells(rows[-1])))
            rewards, seconds, in_server = [], 0.0, 0.0
    return [dict.fromkeys(COLUMNS) | row for row in rows]


def cells(row: Mapping[str, object]) -> list[str]:
    """A line of the table; numbers, or texts of a file."""
    found = [(form, row[name]) for name, (_, form) in COLUMNS.items()]
    return ["-" if value in (None, "") else form.format(float(str(value))) for form, value in found]


def table(rows: Rows) -> str:
    """One line each --every steps."""
    return markdown([title for title, _ in COLUMNS.values()], [*map(cells, rows)])


SECTION = Section("rollout.csv", "python -m bench.rollout", table)  # of docs/rollouts.md


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints/tiny-sdar")
    parser.add_argument("--family", default="sort", help="of training and held-out questions")
    parser.add_argument("--max-steps", type=int, help="denoise steps of a block at most")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="steps between two evaluations")
    parser.add_argument("--questions", type=int, default=64, help="in each step")
    parser.add_argument("--group", type=int, default=8, help="answers to each question")
    parser.add_argument("--heldout", type=int, default=500, help="questions of an evaluation")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""dllm calibrate: the network, the loop, acceptance, files and refusals, without an engine."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3ForCausalLM

from dllm import cli
from dllm.cli import CommandError
from dllm.drafter.samples import Sample, read_shard, read_shards, write_shard
from dllm.train.drafter import command
from dllm.train.drafter import network as training_network
from dllm.train.drafter.acceptance import Acceptance, measure, possible, total
from dllm.train.drafter.export import read_checkpoint
from dllm.train.drafter.network import DraftNetwork, count_params, cross_entropy, draft_inputs
from dllm.train.drafter.responses import DiskEstimate
from dllm.train.drafter.settings import CalibrateSettings, block_of
from dllm.train.run_files import LOG, read_log
from tests.support.calibrate_cases import (
    PROMPTS,
    TOML,
    calibration,
    random_samples,
    read_config,
    small_settings,
    target,
    target_path,
    weights_of,
)
from tests.support.drafter_pairs import (
    MASK,
    drafter_config,
    random_drafter,
    write_drafter,
    write_target,
)
from tests.support.drafter_reference import ReferenceDrafter

__all__ = ["target", "target_path"]  # fixtures

BLOCK = 5
# Sums of 64 to 128 products in another order; 2e-6 was measured.
TOLERANCE = 2e-5


# --- the network ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
        {"is_causal": True},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "is_causal": False},
    ],
    ids=["full", "mixed", "causal", "symmetric window"],
)
def test_every_block_of_a_pass_is_the_reference(target_path, target, overrides):
    config = read_config(**overrides)
    weights = random_drafter()
    network = DraftNetwork(config)
    network.load_state_dict(weights)
    reference = ReferenceDrafter(
        Qwen3ForCausalLM.from_pretrained(target_path, dtype=torch.float32), config, weights
    )
    tokens = torch.randint(10, 450, (2, 17), generator=torch.Generator().manual_seed(1))
    anchors = torch.tensor([[1, 6, 11], [12, 4, 4]])
    ids = draft_inputs(tokens, anchors, BLOCK, config.mask_token_id)
    with torch.no_grad():
        features = target.hidden_states(tokens, config.target_layer_ids)
        hidden = network(features, target.embedding[ids], anchors)
        logits = hidden @ target.head.T
        for row in range(2):
            for at, anchor in enumerate(anchors[row].tolist()):
                block = [int(tokens[row, anchor]), *[MASK] * (BLOCK - 1)]
                expected = reference.logits(tokens[row, :anchor].tolist(), block)
                error = (logits[row, at] - expected).abs().max() / expected.abs().max()
                assert error < TOLERANCE


def test_hidden_states_are_the_outputs_of_the_named_layers(target):
    tokens = torch.arange(30, 42)[None]
    outputs = target.model(tokens, output_hidden_states=True).hidden_states
    assert torch.equal(
        target.hidden_states(tokens, (0, 2)), torch.cat([outputs[1], outputs[3]], -1)
    )


def test_cross_entropy_in_parts_is_cross_entropy():
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=draw, requires_grad=True)
    head, labels = torch.randn(20, 8, generator=draw), torch.arange(11)
    whole = torch.nn.functional.cross_entropy(hidden @ head.T, labels, reduction="none")
    (expected,) = torch.autograd.grad(whole.sum(), hidden)
    parts = cross_entropy(hidden, head, labels, rows_at_once=4)
    (gradient,) = torch.autograd.grad(parts.sum(), hidden)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(gradient, expected)


class Largest(TorchDispatchMode):
    """The most numbers in a tensor that was made inside the ``with`` block."""

    numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_attention_of_few_blocks_at_a_time_is_attention(monkeypatch):
    """The same outputs and gradients, and never more scores in memory than allowed."""
    network, draw = DraftNetwork(read_config()), torch.Generator().manual_seed(0)
    network.load_state_dict(random_drafter())
    length, blocks = 400, 24
    features = torch.randn(2, length, network.fc.in_features, generator=draw)
    embeds = torch.randn(2, blocks, BLOCK, network.config.hidden_size, generator=draw)
    anchors = torch.randint(1, length, (2, blocks), generator=draw)

    def run() -> tuple[torch.Tensor, ...]:
        hidden = network(features, embeds, anchors)
        return hidden, *torch.autograd.grad(hidden.square().sum(), [*network.parameters()])

    heads = network.config.num_heads
    with Largest() as whole:
        expected = run()
    assert whole.numel == 2 * blocks * BLOCK * heads * (length + BLOCK)  # the scores
    monkeypatch.setattr(training_network, "SCORES_AT_ONCE", whole.numel // 3)
    with Largest() as parts:
        found = run()
    assert parts.numel <= whole.numel // 3
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= TOLERANCE * other.abs().max()


def test_parameters_are_counted_without_building_the_network():
    built = sum(param.numel() for param in DraftNetwork(read_config()).parameters())
    assert count_params(read_config()) == built
    # Of 8 TB in fp32, which is more than there is.
    assert count_params(read_config(hidden_size=1 << 20, intermediate_size=1 << 20)) > 2e12


# --- acceptance -----------------------------------------------------------------------------------


def test_acceptance_walks_the_steps_of_a_server():
    found = Acceptance()
    # Tokens 0..5 of a response; behind each, this many of 3 drafts agree.
    found.add([2, 9, 9, 0, 1], width=3)
    # Step at 0 keeps 2 and emits 3; step at 3 keeps none and emits 1; step at 4 keeps the last one.
    assert (found.steps, found.tokens) == (3, 5)
    assert found.offered == [3, 2, 1]
    assert found.accepted == [2, 1, 0]
    assert found.length == 5 / 3


def test_a_drafter_that_is_always_right_reaches_what_is_possible():
    sample = Sample(tuple(range(12)), 4, "all")  # 8 tokens of response, 7 behind the first
    best = total(possible([sample], width=3))
    assert (best.steps, best.tokens) == (2, 7)
    assert best.by_position == [1.0, 1.0, 1.0]


def test_measured_acceptance_is_that_of_the_reference(target_path, target):
    """Drafts of the reference, verified step by step, of a target and a drafter by chance."""
    config, weights = read_config(), random_drafter()
    # Towards what the target says: the drafter's residual stream is nearly the last hidden state.
    reference = ReferenceDrafter(
        Qwen3ForCausalLM.from_pretrained(target_path, dtype=torch.float32), config, weights
    )
    network = DraftNetwork(config)
    network.load_state_dict(weights)
    samples = random_samples(target, 2, length=8)
    # Every draft is wrong by chance, so let one response be what the drafter drafts.
    tokens = samples[0].tokens[: samples[0].response_start + 1]
    with torch.no_grad():
        for _ in range(3):
            block = [tokens[-1], *[MASK] * (BLOCK - 1)]
            drafts = reference.logits(tokens[:-1], block)[1:].argmax(-1).tolist()
            tokens = (*tokens, *drafts[:2], (drafts[2] + 1) % 400)
    said = Sample(tokens, samples[0].response_start, "drafted")
    groups = measure(network, target, [*samples, said], BLOCK)
    # Two drafts and the token that the third one was not: three steps of three tokens.
    assert groups["drafted"].length == 3.0
    assert groups["drafted"].by_position[:3] == [1.0, 1.0, 0.0]
    assert groups["all"].length < 1.2


# --- the loop -------------------------------------------------------------------------------------


def test_it_learns_ten_responses_by_heart(target, tmp_path):
    samples = random_samples(target, 10)
    settings = small_settings(
        steps=150, batch_size=10, anchors=8, evaluate_every=150, checkpoint_every=150
    )
    run = calibration(target, samples, tmp_path / "run", settings)
    losses = [now.loss for now in run.run()]
    assert losses[-1] < losses[0] / 4
    before, after = (tmp_path / "run" / LOG).read_text().splitlines()[1:3]
    assert float(before.split(",")[3]) < 1.2
    assert float(after.split(",")[3]) > 2.5  # of 4 possible


def test_a_resumed_run_is_an_uninterrupted_one(target, tmp_path):
    samples = random_samples(target, 5)
    whole = calibration(target, samples, tmp_path / "whole", small_settings())
    list(whole.run())
    first = calibration(target, samples, tmp_path / "parts", small_settings())
    list(first.run(stop_at=3))
    second = calibration(target, samples, tmp_path / "parts", small_settings())
    second.resume()
    assert second.step == 3
    list(second.run())
    expected, found = weights_of(whole), weights_of(second)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any((found[name] != weights_of(first)[name]).any() for name in expected)
    assert _log(tmp_path / "parts") == _log(tmp_path / "whole")


def _log(out: Path) -> list[list[str]]:
    """Without the seconds."""
    rows = [row.split(",") for row in (out / LOG).read_text().splitlines()]
    return [[*row[:1], *row[2:]] for row in rows]


def test_stored_hidden_states_train_like_recomputed_ones(target, tmp_path):
    samples = random_samples(target, 4)
    hidden = [target.hidden_states(torch.tensor([sample.tokens]), (1, 3))[0] for sample in samples]
    write_shard(tmp_path / "0.safetensors", samples, hidden)
    stored = read_shard(tmp_path / "0.safetensors")
    assert [one.tokens for one in stored] == [one.tokens for one in samples]
    losses = []
    for name, some in (("recomputed", samples), ("stored", stored)):
        run = calibration(target, some, tmp_path / name, small_settings(steps=2))
        losses.append([now.loss for now in run.run()])
    # Padding changes the order of the target's sums, and products are in bf16.
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """A config and a file of prompts."""
    (tmp_path / "config.toml").write_text(TOML)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    return tmp_path


def calibrate(target_path: Path, files: Path, *more: str, out: str = "run") -> int:
    arguments = ["--target", str(target_path), "--out", str(files / out), "--device", "cpu"]
    if "--from-buffer" not in more:
        arguments += ["--prompts", str(files / "prompts.txt")]
    return cli.main(["calibrate", *arguments, "--config", str(files / "config.toml"), *more])


def test_the_command_writes_a_checkpoint_and_resumes(target_path, files, capsys):
    assert calibrate(target_path, files) == 0
    assert "disk: at most" in capsys.readouterr().out
    model = files / "run/model"
    config, weights = read_checkpoint(model)
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [1, 3]}
    assert set(weights) == set(random_drafter(layers=1))
    card = (model / "README.md").read_text()
    assert "dllm calibrate --target" in card and "| all | 1." in card
    assert (model / "curve.svg").exists() and len((model / LOG).read_text().splitlines()) == 4

    assert calibrate(target_path, files) == 1  # holds a run
    assert "--resume" in capsys.readouterr().err
    bits = (model / "model.safetensors").read_bytes()
    lost = sorted((files / "run/responses/train").iterdir())[1]
    samples = read_shard(lost)
    lost.unlink()
    (files / "run/state.pt").unlink()
    shutil.rmtree(model)
    assert calibrate(target_path, files, "--resume") == 0
    assert read_shard(lost) == samples
    assert (model / "model.safetensors").read_bytes() == bits

    (files / "config.toml").write_text(TOML.replace("anchors = 4", "anchors = 5"))
    assert calibrate(target_path, files, "--resume") == 1
    assert "settings" in capsys.readouterr().err


def test_domains_may_have_any_name(target_path, files):
    """Those of columns, of a part of a column, of two lines."""
    domains = ["step", "loss", "length", "position_1", "two\nlines, and a comma"]
    lines = [
        {"prompt": prompt, "domain": domains[at % len(domains)]}
        for at, prompt in enumerate(PROMPTS)
    ]
    (files / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (files / "config.toml").write_text(TOML.replace("heldout = 4", "heldout = 5"))
    more = ("--prompts", str(files / "prompts.jsonl"))
    assert calibrate(target_path, files, *more) == 0
    before = read_log(files / "run" / LOG)
    assert [row["step"] for row in before] == ["0", "2", "4"]
    assert set(before[0]) >= {f"length_{domain}" for domain in domains}
    assert calibrate(target_path, files, "--resume", *more) == 0
    assert read_log(files / "run" / LOG) == before


def test_a_run_goes_on_from_a_drafter_and_from_a_buffer(target_path, target, files, capsys):
    drafter = write_drafter(files / "drafter")
    buffer = files / "buffer"
    buffer.mkdir()
    samples = random_samples(target, 22)
    hidden = [target.hidden_states(torch.tensor([s.tokens]), (1, 3))[0] for s in samples]
    write_shard(buffer / "0.safetensors", samples[:20], hidden[:20])
    more = ("--drafter", str(drafter), "--from-buffer", str(buffer))
    assert calibrate(target_path, files, *more) == 1
    assert "more than 20" in capsys.readouterr().err
    write_shard(buffer / "1.safetensors", samples[20:], hidden[20:])
    assert calibrate(target_path, files, *more) == 0
    _, before = read_checkpoint(drafter)
    _, after = read_checkpoint(files / "run/model")
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < moved < 0.2  # four steps from where it was
    assert "live traffic" in (files / "run/model/README.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("steps = 0", "steps = 0; allowed: an integer of at least 1"),
        ("stepz = 4", "did you mean 'steps'?"),
        ("gamma = -1.0", "gamma = -1.0; allowed: a number above 0"),
        ('hidden_states = "kept"', "allowed: stored or recomputed"),
        ("temperature = 99", "temperature = 99; allowed: a number of at least 0"),
        ("heldout = 14", "14 prompts, of which heldout = 14"),
    ],
)
def test_bad_settings_are_refused_before_any_work(target_path, files, capsys, change, message):
    key = change.split(" ")[0]
    kept = [line for line in TOML.splitlines() if not line.startswith(key)]
    (files / "config.toml").write_text("\n".join([change, *kept]))
    assert calibrate(target_path, files) == 1
    assert message in capsys.readouterr().err
    assert not (files / "run").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[1, 3]", "[3, 1]", "drafter.target_layer_ids = [3, 1]; allowed: ascending"),
        ("[1, 3]", "[1, 4]", "which has 4 layers; allowed: 0 to 3"),
        (f"mask_token_id = {MASK}", "mask_token_id = 512", "allowed: 0 to 511"),
        ("block_size = 4", "block_size = 1", "block_size = 1; allowed"),
        ("num_layers = 1", "num_layer = 1", "did you mean 'num_layers'?"),
    ],
)
def test_bad_shapes_are_refused_before_any_work(target_path, files, capsys, old, new, message):
    (files / "config.toml").write_text(TOML.replace(old, new))
    assert calibrate(target_path, files) == 1
    assert message in capsys.readouterr().err
    assert not (files / "run").exists()


def test_a_drafter_without_block_size_has_the_block_of_a_new_one():
    assert block_of({}) == CalibrateSettings().drafter.block_size
    for size in (1, "8", None):
        with pytest.raises(CommandError, match="block_size"):
            block_of({"block_size": size})


def test_a_disk_that_is_too_small_is_refused(target_path, files, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    assert calibrate(target_path, files) == 1
    message = capsys.readouterr().err
    assert "100 KB free" in message and "hidden states" in message and "recomputed" in message
    assert not (files / "run").exists()


def test_other_mistakes_are_refused(target_path, files, capsys, tmp_path):
    (files / "prompts.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n' * 20)
    bad = ["--target", str(target_path), "--out", str(files / "run"), "--prompts"]
    config = ["--config", str(files / "config.toml")]
    assert cli.main(["calibrate", *bad, str(files / "prompts.jsonl"), *config]) == 1
    assert 'line 2: \'{"promt": "b"}\'; allowed' in capsys.readouterr().err
    assert cli.main(["calibrate", *bad, str(files / "none.txt"), *config]) == 1
    assert "No such file" in capsys.readouterr().err
    strange = shutil.copytree(target_path, tmp_path / "strange")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (strange / name).unlink()
    assert cli.main(["calibrate", "--target", str(strange), *bad[2:-1], *config]) == 1
    assert "makes no tokens of prompt 1" in capsys.readouterr().err
    other = write_drafter(tmp_path / "other", drafter_config(num_target_layers=9))
    assert calibrate(target_path, files, "--drafter", str(other)) == 1
    assert "9" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        calibrate(target_path, files, "--from-buffer", str(files), "--from-server", "http://x")
    assert "--from-server" in capsys.readouterr().err


def test_shipped_settings_are_right():
    for path in sorted(command.CONFIGS.glob("*.toml")):
        assert CalibrateSettings.from_mapping(CalibrateSettings.load(path).to_mapping())


# --- responses of a server ------------------------------------------------------------------------


class _Server(BaseHTTPRequestHandler):
    """Answers every prompt with its first three tokens; with or without their ids."""

    returns_ids = True

    def do_GET(self):
        assert self.headers["Authorization"] == "Bearer s3cret"
        self._send({"object": "list", "data": [{"id": "target", "object": "model"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == "Bearer s3cret"
        assert asked["return_token_ids"] and asked["max_tokens"] == 12, asked
        choice = {"index": 0, "text": "number", "finish_reason": "stop", "logprobs": None}
        if self.returns_ids:
            choice["token_ids"] = asked["prompt"][:3]
        self._send({"id": "x", "object": "text_completion", "model": "target", "choices": [choice]})

    def _send(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("returns_ids", [True, False])
def test_a_server_writes_the_responses(target_path, files, returns_ids):
    handler = type("Handler", (_Server,), {"returns_ids": returns_ids})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert calibrate(target_path, files, f"--from-server={url}", "--api-key=s3cret") == 0
    finally:
        server.shutdown()
        server.server_close()
    for file in (files / "run").rglob("*"):
        assert file.is_dir() or b"s3cret" not in file.read_bytes(), file
    for sample in read_shards(files / "run/responses/train"):
        said = sample.tokens[sample.response_start :]
        if returns_ids:
            assert said == sample.tokens[:3]
        else:
            assert said[-1] == 1 and len(said) >= 2  # the text's tokens, and end-of-sequence


def test_a_target_of_another_shape_has_no_tied_sizes(tmp_path):
    """Sizes that the config leaves out are the target's."""
    path = write_target(tmp_path / "target", layers=6)
    (tmp_path / "config.toml").write_text("[drafter]\nnum_layers = 2\nmask_token_id = 3\n")
    given = command.parse(
        ["--target", str(path), "--out", str(tmp_path), "--config", str(tmp_path / "config.toml")]
    )
    network = command.load_network(given, command.load_settings(given))
    assert network.read.target_layer_ids == (1, 3)
    assert (network.read.num_heads, network.read.head_dim) == (4, 32)
    assert network.read.rope_parameters["rope_theta"] == 10000.0


def test_a_resumed_run_has_the_room_of_its_own_files(tmp_path, monkeypatch):
    """What it wrote before the interruption counts as free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=40))
    (tmp_path / "responses").mkdir()
    (tmp_path / "responses/0.safetensors").write_bytes(bytes(30))
    DiskEstimate(10, 50, 5).check(tmp_path, is_resumed=True)
    with pytest.raises(CommandError, match="40 B free"):
        DiskEstimate(10, 50, 5).check(tmp_path, is_resumed=False)
    with pytest.raises(CommandError, match="70 B free"):
        DiskEstimate(10, 61, 0).check(tmp_path, is_resumed=True)

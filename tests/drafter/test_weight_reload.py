"""A running server takes a newer drafter; the text stays the target's."""

import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import save_file
from vllm.transformers_utils.config import get_config

from dllm.drafter import weight_reload
from dllm.drafter.pair import refuse_other_config, refuse_reload_of
from dllm.drafter.weight_reload import (
    REJECTED,
    STEPS_BETWEEN_LOOKS,
    WeightReload,
    Weights,
    checkpoint,
    open_weights,
    read_weights,
)
from tests.support.drafter_harness import (
    assert_greedy,
    drafting_engine,
    greedy,
    plain_engine,
    prompt,
    watch_drafts,
)
from tests.support.drafter_pairs import HEADS, MASK, drafter_config, random_drafter, write_drafter

NUM_DRAFTS = 5


def weights_of(path: Path) -> Weights:
    return read_weights(open_weights(path))


def publish(folder: Path, number: int, seed: int) -> Path:
    path = checkpoint(folder, number)
    path.mkdir(parents=True)
    return write_drafter(path, drafter_config(), random_drafter(seed))


# --- when a drafter is taken ----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(weight_reload, "answer_of_first_rank", lambda answer: answer)
    monkeypatch.setattr(weight_reload, "all_ranks_say_yes", lambda answer: answer)


class Server:
    """Steps of a weight reload."""

    def __init__(self, folder: Path, initial: Path) -> None:
        self.loaded: list[dict[str, torch.Tensor]] = []
        self.refused_by: list[threading.Thread] = []  # threads that checked weights
        checks = (self.refuse, self.refuse_config)
        self.reload = WeightReload(folder, initial, self.loaded.append, *checks)

    def refuse(self, weights: dict[str, torch.Tensor]) -> None:
        self.refused_by.append(threading.current_thread())
        if "fc.weight" not in weights or weights["fc.weight"].shape != (64, 128):
            raise ValueError("another shape")

    def refuse_config(self, path: Path) -> None:
        if "block_size" not in (path / "config.json").read_text():
            raise ValueError("another drafter")

    def serve(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.reload.after_step()
            reading = self.reload._reading
            if reading is not None:
                reading.result()  # so that the next look finds it read


def test_the_newest_drafter_is_taken_two_looks_later(tmp_path):
    """The first look begins to read it."""
    folder = tmp_path / "newer"
    server = Server(folder, publish(tmp_path / "initial", 1, seed=1))
    server.serve(4 * STEPS_BETWEEN_LOOKS)  # nothing is published
    assert server.loaded == [] and server.reload.current == 0
    for numbers in ([1], [2, 3]):
        for number in numbers:
            publish(folder, number, seed=1 + number)
        before = server.reload.current
        server.serve(2 * STEPS_BETWEEN_LOOKS - 1)
        assert server.reload.current == before
        server.serve(1)
        assert server.reload.current == numbers[-1]
        expected = weights_of(checkpoint(folder, numbers[-1]))
        assert all((server.loaded[-1][name] == tensor).all() for name, tensor in expected.items())
    server.serve(4 * STEPS_BETWEEN_LOOKS)
    assert len(server.loaded) == 2 and not (folder / REJECTED).exists()


DAMAGES = ["cut short", "no weights", "incomplete", "another shape", "another config"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_used_is_not_loaded_and_no_step_waits_for_it(tmp_path, damage, monkeypatch):
    reads = []

    def read(files: list[BinaryIO]) -> dict[str, torch.Tensor]:
        reads.append(threading.current_thread())
        return read_weights(files)

    monkeypatch.setattr(weight_reload, "read_weights", read)
    initial = publish(tmp_path / "initial", 1, seed=1)
    path = publish(tmp_path / "newer", 1, seed=2)
    (weights,) = path.glob("*.safetensors")
    if damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "another shape":
        write_drafter(path, drafter_config(), random_drafter(features=3))
    elif damage == "another config":
        (path / "config.json").write_text("{}")
    else:
        (path / "config.json").unlink()  # still being written
    server = Server(tmp_path / "newer", initial)
    server.serve(400)
    assert server.reload.current == 0 and server.loaded == []
    assert threading.current_thread() not in reads + server.refused_by
    assert (tmp_path / "newer" / REJECTED).exists() is (damage != "incomplete")


def test_a_folder_that_cannot_be_written_to_stops_nothing(tmp_path, monkeypatch):
    """The damaged checkpoint is read once, and never again."""
    initial = publish(tmp_path / "initial", 1, seed=1)
    publish(tmp_path / "newer", 1, seed=2)
    reads, open_file = [], Path.open

    def read(files: list[BinaryIO]) -> None:
        reads.extend(Path(file.name).parent for file in files)
        raise ValueError("damaged")

    def open_to_read(path: Path, mode: str = "r", *rest, **options):
        if mode == "a":
            raise OSError("read-only file system")
        return open_file(path, mode, *rest, **options)

    monkeypatch.setattr(weight_reload, "read_weights", read)
    monkeypatch.setattr(Path, "open", open_to_read)
    server = Server(tmp_path / "newer", initial)
    server.serve(10 * STEPS_BETWEEN_LOOKS)
    assert reads == [checkpoint(tmp_path / "newer", 1)] and server.loaded == []
    (tmp_path / "newer" / REJECTED).mkdir()  # nor can it be read
    server.serve(2 * STEPS_BETWEEN_LOOKS)
    assert server.reload.current == 0


@pytest.mark.parametrize("in_use", [0, 1])
def test_a_server_goes_back_to_a_drafter_that_was_deleted_meanwhile(tmp_path, in_use):
    """The trainer has published so many newer ones, of which the last fails halfway."""
    folder, initial = tmp_path / "newer", publish(tmp_path / "initial", 1, seed=1)
    server = Server(folder, initial)
    if in_use:
        publish(folder, in_use, seed=2)
        server.serve(2 * STEPS_BETWEEN_LOOKS)
    assert server.reload.current == in_use
    expected = weights_of(server.reload._path(in_use))
    publish(folder, 7, seed=3)
    shutil.rmtree(server.reload._path(in_use))
    loads = []

    def load(weights: Weights) -> None:
        loads.append(weights)
        if len(loads) == 1:
            raise RuntimeError("halfway")

    server.reload.load = load
    server.serve(2 * STEPS_BETWEEN_LOOKS)
    assert server.reload.current == in_use and server.reload._refused == {7}
    assert len(loads) == 2
    assert all((loads[1][name] == tensor).all() for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({}, None),
        ({"transformers_version": "5", "num_attention_heads": HEADS}, None),
        ({"dflash_config": {"mask_token_id": MASK - 1, "target_layer_ids": [1, 3]}}, "mask_token"),
        (
            {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 2]}},
            "target_layer_ids",
        ),
        ({"rope_theta": 10000}, "rope_parameters"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"is_causal": True}, "layers"),
    ],
)
def test_a_drafter_with_another_config_is_refused_by_field(tmp_path, change, field):
    served = get_config(write_drafter(tmp_path / "served"), False)
    draft = SimpleNamespace(hf_config=served, trust_remote_code=False)
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(tokenizer="none", tokenizer_revision=None),
        speculative_config=SimpleNamespace(draft_model_config=draft),
        additional_config={},
    )
    new = write_drafter(tmp_path / "new", drafter_config(**change))
    with nullcontext() if field is None else pytest.raises(ValueError, match=field):
        refuse_other_config(vllm_config, new)


# --- in an engine ---------------------------------------------------------------------------------


PROMPTS = [prompt(30, salt) for salt in range(3)]


def test_renewed_weights_draft_as_those_of_a_server_that_started_with_them(random_target, tmp_path):
    first = write_drafter(tmp_path / "first", drafter_config(), random_drafter(1))
    second = write_drafter(tmp_path / "second", drafter_config(), random_drafter(9))
    renewed = drafting_engine(random_target, first, NUM_DRAFTS, {"renew": str(tmp_path / "none")})
    started = drafting_engine(random_target, second, NUM_DRAFTS)
    drafts = []
    for engine in (renewed, started):
        if engine is renewed:
            speculator = engine.runner.speculator
            addresses = [param.data_ptr() for param in speculator.model.parameters()]
            context = speculator.model.model._fused_kv_weight.data_ptr()
            with torch.inference_mode():
                speculator._reload(weights_of(second))
            assert [param.data_ptr() for param in speculator.model.parameters()] == addresses
            assert speculator.model.model._fused_kv_weight.data_ptr() == context
        engine.reset_prefix_cache()
        with watch_drafts(engine) as seen:
            engine.generate(PROMPTS, greedy(12))
        drafts.append([(draft.drafts, draft.logits) for draft in seen])
    assert len(drafts[0]) == len(drafts[1]) > 10
    for (tokens, logits), (same_tokens, same_logits) in zip(*drafts, strict=True):
        assert tokens == same_tokens
        torch.testing.assert_close(logits, same_logits, rtol=0, atol=0)


def test_weights_of_another_shape_are_refused_and_those_in_use_stay(random_target, tmp_path):
    first = write_drafter(tmp_path / "first", drafter_config(), random_drafter(1))
    engine = drafting_engine(random_target, first, NUM_DRAFTS, {"renew": str(tmp_path / "none")})
    model = engine.runner.speculator.model
    before = [param.clone() for param in model.parameters()]
    weights, broken = weights_of(first), weights_of(first)
    broken["norm.weight"] = broken["norm.weight"] * torch.nan
    weights["norm.weight"] = weights["norm.weight"][:-1]
    for wrong, why in ((broken, "finite"), (weights, "differ")):
        with pytest.raises(ValueError, match=rf"{why}.*norm\.weight"):
            model.refuse_weights(wrong)
    publish(tmp_path / "none", 1, seed=2)
    save_file(weights, next((tmp_path / "none/000001").glob("*.safetensors")))
    watch = engine.runner.speculator._weight_reload
    watch._look()
    watch._reading.result()
    watch._look()
    assert watch.current == 0 and watch._refused == {1}
    assert all((old == new).all() for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("options", [{}, {"policy": "adaptive", "prompt_lookup": True}])
def test_the_text_is_the_targets_while_drafters_change(random_target, tmp_path, options):
    """A new drafter every few steps, some of them unusable; greedy and sampled requests."""
    first = write_drafter(tmp_path / "first", drafter_config(), random_drafter(1))
    folder = tmp_path / "newer"
    engine = drafting_engine(random_target, first, NUM_DRAFTS, {"renew": str(folder), **options})
    params = [greedy(80), greedy(80, temperature=1.0, seed=4), greedy(80)]
    expected = plain_engine(random_target).generate(PROMPTS, params)
    renewal = engine.runner.speculator._weight_reload
    ids = [engine.add(given, param) for given, param in zip(PROMPTS, params, strict=True)]
    for number in range(1, 7):
        path = publish(folder, number, seed=number)
        if number % 3 == 0:
            shutil.copy(path / "config.json", next(path.glob("*.safetensors")))
        for _ in range(2):  # the first look begins to read, the second uses what was read
            renewal._look()
            if renewal._reading is not None:
                renewal._reading.result()
        for _ in range(6):
            engine.step()
    finished = engine.run()
    assert [list(finished[req_id].outputs[0].token_ids) for req_id in ids] == expected
    assert renewal.current == 5
    assert sorted((folder / REJECTED).read_text().split()) == ["000003", "000006"]
    assert_greedy(random_target, PROMPTS[0], expected[0])


def test_only_a_drafter_in_a_folder_can_be_renewed(tmp_path):
    refuse_reload_of(str(tmp_path))
    with pytest.raises(ValueError, match="renew with the drafter somebody/drafter"):
        refuse_reload_of("somebody/drafter")

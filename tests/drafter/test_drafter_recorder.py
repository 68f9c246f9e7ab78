"""The recorder of live traffic: what it writes, and that it stays within its bounds."""

import itertools
import multiprocessing
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dllm.drafter import recorder
from dllm.drafter import samples as shards
from dllm.drafter.recorder import Recorder
from dllm.drafter.samples import read_shards
from dllm.drafter.step import TargetStep

FEATURES = 6


def step(rows: list[dict], kind: type[torch.Tensor] = torch.Tensor) -> TargetStep:
    """Rows of {request, start, tokens, rejected, prompt, sampled}; features are the positions.

    kind: class of the tensors on the device.
    """
    lengths = np.array([len(row["tokens"]) for row in rows])
    starts, prompts = (np.array([row[key] for row in rows]) for key in ("start", "prompt"))
    sampled = torch.tensor([row.get("sampled", -1) for row in rows])
    places = [row["start"] + at for row in rows for at in range(len(row["tokens"]))]
    batch: Any = SimpleNamespace(
        req_ids=[row["request"] for row in rows],
        num_reqs=len(rows),
        num_tokens=len(places),
        num_scheduled_tokens=lengths,
        query_start_loc_np=np.append(0, np.cumsum(lengths)),
        idx_mapping=torch.arange(len(rows)),
        input_ids=torch.tensor([token for row in rows for token in row["tokens"]]),
        positions=torch.tensor(places),
        prefill_len_np=prompts,
        is_prefilling_np=starts < prompts,
        num_draft_tokens_per_req=lengths - 1,
    )
    hidden = torch.tensor(places, dtype=torch.float32)[:, None].expand(-1, FEATURES)
    return TargetStep(
        batch,
        [hidden.contiguous().as_subclass(kind)],
        (sampled >= 0).long(),
        torch.tensor([row.get("rejected", 0) for row in rows]),
        sampled[:, None],
    )


def request(name: str, num_steps: int, prompt: int = 4):
    """The steps of one request: a prompt, then steps of three tokens of which one is rejected."""
    yield [dict(request=name, start=0, tokens=range(prompt), prompt=prompt, sampled=100)]
    for at in range(num_steps):
        start = prompt + 2 * at
        new = [100 + 2 * at, 101 + 2 * at, 999]
        yield [
            dict(request=name, start=start, tokens=new, rejected=1, prompt=prompt,
                 sampled=102 + 2 * at)
        ]  # fmt: skip


def observe(recording: Recorder, *steps: Iterable[list[dict]]) -> None:
    for rows in itertools.chain(*steps):
        recording.observe(step(rows))


def recorded(folder: Path, steps: Iterable[list[dict]]) -> list[shards.Sample]:
    recording = Recorder(folder, 1 << 24)
    observe(recording, steps)
    recording.close()
    return read_shards(folder)


def hand_over(recording: Recorder, name: str, num_steps: int, prompt: int = 4) -> None:
    """A request that ends, up to where the writer has taken its shard."""
    observe(recording, request(name, num_steps, prompt), request("next", 0))
    recording._hand_over()
    recording._queue.put([])  # returns when the writer has taken the shard before it
    recording._queue.put([])


def test_samples_are_what_the_target_kept(tmp_path):
    both = request("one", 3), request("two", 1, prompt=7)
    steps = [one + two for one, two in itertools.zip_longest(*both, fillvalue=[])]
    found = {len(sample.tokens): sample for sample in recorded(tmp_path, steps)}
    assert sorted(found) == [10, 11]
    sample = found[11]
    assert sample.tokens == (0, 1, 2, 3, *range(100, 107))  # 106 was sampled and never computed
    assert sample.response_start == 4
    assert sample.hidden()[:, 0].tolist() == [*map(float, range(10)), 0.0]
    (path,) = tmp_path.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        verified, accepted = file.get_tensor("verified"), file.get_tensor("accepted")
    assert (verified == 2).sum() == 4 and (verified == -1).sum() == len(verified) - 4
    assert accepted[verified == 2].tolist() == [1] * 4


def test_a_preempted_or_cut_request_is_not_glued_together(tmp_path):
    steps = list(request("one", 2))
    # One is missing, and it begins again.
    (sample,) = recorded(tmp_path, [steps[0], steps[2], steps[0], steps[1]])
    assert sample.tokens == (0, 1, 2, 3, 100, 101, 102)


def test_of_a_long_prompt_in_one_step_the_end_is_recorded(tmp_path):
    """There is room for the answer, of which a whole prompt of that length would leave none."""
    (sample,) = recorded(tmp_path, request("long", 3, prompt=4000))
    assert sample.tokens == (*range(4000 - recorder.BEGIN_TOKENS, 4000), *range(100, 107))
    assert sample.response_start == recorder.BEGIN_TOKENS
    assert sample.hidden()[:2, 0].tolist() == [2976.0, 2977.0]


def test_a_prompt_of_two_long_steps_leaves_room_for_its_answer(tmp_path):
    prompt = range(3072)
    rows = [
        dict(request="a", start=0, tokens=prompt[:2048], prompt=3072),
        dict(request="a", start=2048, tokens=prompt[2048:], prompt=3072, sampled=5),
        dict(request="a", start=3072, tokens=[5, 6], prompt=3072, sampled=7),
    ]
    (sample,) = recorded(tmp_path, [[row] for row in rows])
    assert sample.tokens == (*prompt[2048:], 5, 6, 7)


def test_a_prompt_in_chunks_is_one_sample_and_an_aborted_one_is_forgotten(tmp_path):
    recording = Recorder(tmp_path, 1 << 20)
    chunks = [
        dict(request="a", start=0, tokens=[1, 2], prompt=4),
        dict(request="a", start=2, tokens=[3, 4], prompt=4, sampled=5),
        dict(request="a", start=4, tokens=[5, 6], prompt=4, sampled=7),
    ]
    other = dict(request="b", start=0, tokens=[8, 9], prompt=99)
    waits = [dict(request="c", start=0, tokens=[1], prompt=9)]  # of a there is nothing in it
    observe(recording, [[chunks[0], other], waits, [chunks[1]], [chunks[2]]])
    others = range(recorder.MAX_GAP + 1)
    observe(recording, ([dict(request=f"x{n}", start=0, tokens=[1], prompt=9)] for n in others))
    assert "b" not in recording._open
    recording.close()
    assert [sample.tokens for sample in read_shards(tmp_path)] == [(1, 2, 3, 4, 5, 6, 7)]


def test_the_ring_stays_within_its_bytes_and_keeps_the_newest(tmp_path):
    bound = 200_000
    for turn in range(2):  # a second server goes on where the first one ended
        recording = Recorder(tmp_path, bound)
        for number in range(150):
            observe(recording, request(f"{turn} {number}", 40, prompt=4 + number % 3))
            assert size(tmp_path) <= bound
        recording.close()
        assert bound / 2 < size(tmp_path) <= bound
    numbers = [int(path.name[:12]) for path in recording.ring.shards()]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)) and numbers[-1] > 20
    assert all(sample.num_anchors == 80 for sample in read_shards(tmp_path))


def test_open_samples_hold_no_more_memory_than_is_allowed(tmp_path):
    """A small row of large steps, whose other row has no room."""
    recording = Recorder(tmp_path, 4 * 10 * FEATURES * 4)
    for at in range(8):
        small = dict(request="small", start=at, tokens=[at], prompt=99)
        recording.observe(
            step([small, dict(request="large", start=0, tokens=range(50), prompt=99)])
        )
    (sample,) = recording._open.values()
    held = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in sample.hidden}
    assert sum(storage.nbytes() for storage in held.values()) == sample.num_bytes
    assert sample.num_bytes == 8 * FEATURES * 4
    recording.close()


class Device(torch.Tensor):
    """A tensor on a device: counts what has to wait for it."""

    waits = 0

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        cls.waits += function.__name__ in {"cpu", "to", "tolist", "numpy", "item"}
        result = super().__torch_function__(function, types, arguments, options or {})
        is_moved = function.__name__ in {"cpu", "to"}
        return result.as_subclass(torch.Tensor) if is_moved else result


def test_all_rows_of_a_step_are_copied_at_once(tmp_path):
    recording = Recorder(tmp_path, 1 << 20)
    rows = [dict(request=f"{at}", start=0, tokens=range(at), prompt=99) for at in range(1, 9)]
    recording.observe(step(rows, Device))
    assert len(recording._open) == 8 and Device.waits == 1
    recording.close()


class Untouched(list):
    """Takes new entries and refuses to be read."""

    def __iter__(self):
        raise AssertionError("a step looked at what was recorded before it")


def test_a_step_does_not_look_at_what_was_recorded_before_it(tmp_path):
    recording = Recorder(tmp_path, 1 << 20)
    for at in range(4):
        recording.observe(step([dict(request="a", start=at, tokens=[at], prompt=99)]))
        sample = recording._open["a"]
        sample.hidden = Untouched(list.__iter__(sample.hidden))
    assert sample.num_bytes == recording._open_bytes == 4 * FEATURES * 4
    sample.hidden = list(list.__iter__(sample.hidden))
    recording.close()
    assert recording._open_bytes == 0


def test_servers_that_share_a_folder_share_its_bytes_and_keep_each_others_shards(tmp_path):
    """Two recorders of one process have the same host and process in their shards' names, too."""
    bound = 60_000
    both = [Recorder(tmp_path, bound), Recorder(tmp_path, bound)]
    written = 0
    for turn in range(12):
        for name, recording in zip("ab", both, strict=True):
            hand_over(recording, f"{name}{turn}", 40, prompt=4 + "ab".index(name))
            assert size(tmp_path) <= bound
        written += 2
        if turn == 0:
            assert len(read_shards(tmp_path)) == written
    for recording in both:
        recording.close()
    starts = {sample.response_start for sample in read_shards(tmp_path)}
    assert starts == {4, 5} and len(read_shards(tmp_path)) < written


def test_what_a_killed_server_left_half_written_is_removed(tmp_path):
    leftover = tmp_path / "000000000003-host-17.safetensors.part"
    leftover.write_bytes(b"half")
    Recorder(tmp_path, 40_000).close()
    assert not leftover.exists()


def size(folder: Path) -> int:
    """Bytes of all files; those that the writer takes away meanwhile count nothing."""
    total = 0
    for path in folder.iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_a_full_disk_costs_samples_and_nothing_else(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(recorder.logger, "warning", lambda text, *args: said.append(text % args))
    recording = Recorder(tmp_path, 1 << 20)

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shards, "save_file", full)
        hand_over(recording, "one", 3)
    assert recording.num_dropped == 1
    assert [path.name for path in tmp_path.iterdir()] == [recorder.LOCK]
    (line,) = said
    assert "No space left" in line
    observe(recording, request("three", 3))
    recording.close()
    assert len(read_shards(tmp_path)) == 1


def test_a_writer_that_is_behind_costs_samples_and_no_time(tmp_path, monkeypatch):
    recording = Recorder(tmp_path, 1 << 20)
    held = threading.Event()
    write = recording.ring.write
    monkeypatch.setattr(recording.ring, "write", lambda some: (held.wait(), write(some)))
    for number in range(5):
        observe(recording, request(f"{number}", 3), request("next", 0))
        recording._hand_over()  # would wait for the writer here
    held.set()
    recording.close()
    kept = len(read_shards(tmp_path))
    assert kept + recording.num_dropped == 5
    assert recording.num_dropped >= 2


def record_and_end(folder: Path) -> None:
    """Without ``close``; another sample is still open."""
    observe(Recorder(folder, 1 << 20), request("one", 3), request("two", 0))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_ends_writes_what_it_recorded(tmp_path, method):
    process = multiprocessing.get_context(method).Process(target=record_and_end, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [len(sample.tokens) for sample in read_shards(tmp_path)] == [11]


def test_memory_is_bounded_whether_requests_are_many_or_long(tmp_path):
    """Of many, some are not recorded; samples that have no room to grow end, and are written."""
    recording = Recorder(tmp_path, 40_000)

    def held() -> int:
        return sum(sample.num_bytes for sample in recording._open.values())

    for number in range(200):
        recording.observe(step([dict(request=f"{number}", start=0, tokens=range(50), prompt=500)]))
        assert 0 < held() <= 40_000 // 4
    for start in range(400):
        row = dict(start=start, tokens=[5], prompt=1, sampled=5)
        recording.observe(step([row | {"request": f"long{number}"} for number in range(8)]))
        assert held() <= 40_000 // 4
    recording.close()
    assert recording.ring.shards()


def test_a_new_folder_is_the_owners_alone(tmp_path):
    Recorder(tmp_path / "buffer", 40_000).close()
    assert (tmp_path / "buffer").stat().st_mode & 0o077 == 0

"""bench/moe_tuning.py: the search keeps what is fastest and right, and vLLM reads its tables."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import envs

from bench import moe_tuning
from bench.context import read_csv
from bench.moe_tuning import SHARED_BYTES, SMOKE, Experts, Search, Tiles, fits, grid, table_name
from bench.roofline import released_config

RELEASED = Experts.of(released_config()["text_config"])


def tiles(rows: int) -> Tiles:
    return {"BLOCK_SIZE_M": rows}


def test_the_fastest_right_tiles_of_each_batch_are_kept() -> None:
    """Tiles of 16 are fastest but wrong, those of 64 do not compile; 32 suits one batch only."""
    speed = {None: 4.0, 16: 1.0, 32: 3.0, 128: 5.0}
    chosen: list[float] = []

    def kernel(batch: int) -> Callable[[Tiles | None], Tensor]:
        def run(given: Tiles | None) -> Tensor:
            rows = given and given["BLOCK_SIZE_M"]
            if rows == 64:
                raise RuntimeError("out of resource: shared memory")
            chosen.append(speed[rows] * (2 if rows == 32 and batch == 512 else 1))
            return torch.full((4,), 7.0 if rows == 16 else 1.0)

        return run

    def measure(call: Callable[[], object]) -> float:
        call()
        return chosen[-1]

    search = Search({256: kernel(256), 512: kernel(512)}, measure)
    tried = [tiles(16), tiles(64), tiles(32), tiles(128)]
    assert len(list(search.go(tried, time.monotonic() + 600))) == 5
    small, large = search.found[256], search.found[512]
    assert (small.default_ms, small.ms, small.tiles) == (4.0, 3.0, tiles(32))
    assert (large.ms, large.tiles) == (4.0, None)
    assert (small.tried, small.refused) == (4, 2)


def test_it_ends_with_its_time() -> None:
    search = Search({256: lambda given: torch.ones(1)}, lambda call: 1.0)
    assert len(list(search.go([tiles(16)] * 9, time.monotonic() - 1))) == 1
    assert search.found[256].tried == 0


def test_an_error_of_the_device_is_not_a_refusal() -> None:
    def run(given: Tiles | None) -> Tensor:
        if given:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return torch.ones(1)

    search = Search({256: run}, lambda call: 1.0)
    with pytest.raises(RuntimeError, match="illegal"):
        list(search.go([tiles(16)], time.monotonic() + 600))


@pytest.mark.parametrize("element_size", [1, 2])
def test_the_grid_fits(element_size: int) -> None:
    found = grid(element_size)
    assert len(found) > 100 and len({json.dumps(one) for one in found}) == len(found)
    assert found == grid(element_size) != sorted(found, key=json.dumps)
    large = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 256, "num_warps": 8}
    assert SHARED_BYTES < 5 * 384 * 256 and not fits(large | {"num_stages": 5}, 1)
    assert fits(large | {"num_stages": 2}, 1)


def test_the_smoke_run_writes_tables_that_vllm_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.fused_moe import fused_moe

    assert moe_tuning.main(["--smoke", "--seconds", "0.2", "--results", str(tmp_path)]) == 0
    rows = read_csv(tmp_path / "moe.csv")
    assert [(row["weights"], row["tokens"]) for row in rows] == [
        (weights, str(batch)) for weights in ("bf16", "fp8") for batch in moe_tuning.SMOKE_BATCHES
    ]
    envs.disable_envs_cache()  # an engine of another test in this process has turned it on
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    for weights, dtype in moe_tuning.WEIGHTS.items():
        fused_moe.get_moe_configs.cache_clear()
        read: Any = fused_moe.get_moe_configs(SMOKE.count, SMOKE.width, dtype)
        best = {int(r["tokens"]): json.loads(r["tiles"]) for r in rows if r["weights"] == weights}
        assert read == best
    fused_moe.get_moe_configs.cache_clear()
    again = tmp_path / "again"
    assert moe_tuning.main(["--tables-of", str(tmp_path / "moe.csv"), "--results", str(again)]) == 0
    for path in again.iterdir():
        assert path.read_text() == (tmp_path / path.name).read_text()
    assert len(list(again.iterdir())) == 2


def test_tables_of_the_released_experts_are_known() -> None:
    assert table_name(RELEASED, "fp8_w8a8").startswith("E=128,N=704,device_name=")
    others = moe_tuning.tables_of_other_gpus(RELEASED, "fp8_w8a8")
    assert len(others) > 5 and all("BLOCK_SIZE_M" in one for one in others)


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_the_kernel_is_asked_for_with_these_tiles(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM's operator is given, as far as a CPU can say; None leaves the choice to vLLM."""
    from vllm.model_executor.layers.fused_moe import fused_moe

    seen: list[tuple[Tiles, bool]] = []

    def record(x: Tensor, up: Tensor, down: Tensor, share: Tensor, ids: Tensor, *rest: Any) -> Any:
        activation, _, is_fp8, *_ = rest
        assert activation == "gelu_tanh" and share.shape == ids.shape == (8, SMOKE.chosen)
        assert up.shape == (SMOKE.count, 2 * SMOKE.width, x.shape[1])
        assert down.shape == (SMOKE.count, x.shape[1], SMOKE.width)
        assert (up.dtype == torch.float8_e4m3fn) is is_fp8
        dtype = moe_tuning.WEIGHTS[weights]
        chosen = fused_moe.try_get_optimal_moe_config(up.size(), down.size(), 2, dtype, len(x))
        seen.append((chosen, is_fp8))
        return torch.ones_like(x)

    monkeypatch.setattr(fused_moe, "fused_experts_impl", record)
    run = moe_tuning.kernel(SMOKE, weights, 8, "cpu")
    assert run(tiles(16)).shape == (8, SMOKE.hidden)
    run(None)
    (mine, is_fp8), (own, _) = seen
    assert mine == tiles(16) and is_fp8 is (weights == "fp8")
    assert own.items() >= moe_tuning.default_tiles(SMOKE, 8, moe_tuning.WEIGHTS[weights]).items()

"""Tile sizes of the attention kernel, from one table. Nothing is searched when a server starts.

What limits them, for 2-byte elements, per program:

    shared memory   block_m * head_size (Q) + tiles * block_n * (head_size + block_v) (K, V), times
                    2 bytes, where tiles is num_stages, or one less on GPUs without wgmma and
                    tcgen05; Hopper has 227 KiB
    registers       a thread has 255; the fp32 accumulator takes block_m * block_v / (32 *
                    num_warps) of them. Above 128 the compiler moves some to memory (a spill)

Hopper's matrix instruction (wgmma) works on 64 rows per group of four warps. So eight warps need
block_m 128: with 64 rows both groups compute the same logits (seen in the PTX). At head size 512 an
accumulator of 128 rows does not fit into registers, so two programs share the columns of V and both
compute the logits. That is half as much arithmetic again, but every byte of K and V that is read
serves twice the rows.

With three stages the keys of the next tile are loaded while this one is computed, with four those
of the next two; with two, computing waits for all loads.

Head sizes 256 and 512 of 2-byte elements, and a drafter's few rows of head size 128, were timed on
an H200, with 1, 8 and 32 requests behind 1,024 and 8,192 tokens (bench/results/h200.txt). Tiles of
64 rows, or smaller parts, are up to 1.5 times as fast for one request behind 1,024 tokens, with
twice as many programs, and slower with 8 requests. At head size 512, tiles of 32 keys without loads
ahead are faster everywhere than 16 keys with two tiles of loads ahead. A drafter would be up to 1.4
times as fast with four warps and three stages, which spill with Triton 3.9.

What was not timed is chosen from what the compiler makes of candidates, in this order: no spilled
registers; loads that overlap with computing; many rows on a multiprocessor, in few programs; few
programs that share a head's columns, because each computes the logits again.

All other GPUs have one table, whose tiles fit the 99 KiB of shared memory of the smallest cards; on
a B200 larger ones of head size 512 spill. Hopper has it for fp8 caches, whose keys become 16-bit
numbers in registers: its own tiles would spill.

A window of 1,024 keys and a canvas of 256 make 1,279 keys: min_keys_in_window cuts them into two
parts, with which one request has 64 programs for the 132 SMs of an H200, and not 32. Where many
requests fill the GPU, splitting only writes and reads 4 MiB for each part, request and layer.
"""

from __future__ import annotations

from dataclasses import dataclass

# A sequence is split until it has this many programs: about two for each of H200's 132 SMs. It is a
# constant, not the number of SMs of the card, so that keys are cut at the same places, and a
# sequence gives the same bits, on every card.
TARGET_PROGRAMS = 256


def next_power_of_2(value: int) -> int:
    """1 for 0 and 1."""
    return 1 << max(value - 1, 0).bit_length()


@dataclass(frozen=True)
class TileConfig:
    """One row of the table. Blocks are powers of two from 16 on; a part has a block or more."""

    block_m: int  # (row, query head) pairs that a program works on
    block_n: int  # keys that are loaded at a time
    num_warps: int  # a power of two
    num_stages: int  # key tiles that are loaded ahead
    min_keys_per_split: int = 2048  # no part of a split sequence has fewer keys
    max_splits: int = 8  # 1 turns splitting off
    block_v: int = 256  # the most columns of a program; several share a larger head size
    min_keys_in_window: int = 640  # in layers with a window, whose sequences see few keys

    def keys_per_split(self, window: int | None) -> int:
        return self.min_keys_per_split if window is None else self.min_keys_in_window

    def columns(self, head_size: int) -> int:
        return min(self.block_v, max(16, next_power_of_2(head_size)))


# (head size rounded up to a power of two, at least 64; bytes of a query element) -> tiles.
HOPPER: dict[tuple[int, int], TileConfig] = {
    (64, 2): TileConfig(128, 64, 4, 3),
    (128, 2): TileConfig(128, 64, 8, 4, min_keys_per_split=1024, max_splits=16),
    (256, 2): TileConfig(128, 32, 8, 4),
    (512, 2): TileConfig(128, 32, 8, 2),
    (64, 4): TileConfig(64, 32, 4, 2),
    (128, 4): TileConfig(32, 32, 4, 2),
    (256, 4): TileConfig(32, 32, 8, 1),
    (512, 4): TileConfig(16, 16, 8, 1),
}

OTHERS: dict[tuple[int, int], TileConfig] = {
    **HOPPER,
    (128, 2): TileConfig(64, 32, 4, 3, min_keys_per_split=1024, max_splits=16),
    (256, 2): TileConfig(64, 16, 8, 3),
    (512, 2): TileConfig(32, 16, 8, 3),
}


def tile_config(
    head_size: int, element_size: int, arch: int = 90, is_fp8_cache: bool = False
) -> TileConfig:
    """arch: compute capability, 90 for 9.0. Raises KeyError when the table has no such row."""
    table = HOPPER if arch == 90 and not is_fp8_cache else OTHERS
    return table[max(next_power_of_2(head_size), 64), element_size]

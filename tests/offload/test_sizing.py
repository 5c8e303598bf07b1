from __future__ import annotations

import dataclasses

import pytest
import torch
from sparse_kernels.slot_maps import MAX_POOL_BLOCKS

from sglang_sparse.geometry import Geometry
from sglang_sparse.offload.errors import OffloadError
from sglang_sparse.offload.limits import MemoryLimit
from sglang_sparse.offload.sizing import (
    GIB,
    MIN_HOT_SHARE,
    OffloadShape,
    check_host_bytes,
    plan_sizes,
    share_slots,
)
from sglang_sparse.option_values import OptionsError, parse_memory

LLAMA = OffloadShape(
    Geometry(kv_heads=8, group_size=4, head_dim=128, dtype=torch.bfloat16, page_size=64, block_size=16),
    layers=32,
    # 4-bit keys, low and step of a page; a mean value of a page.
    summary_bytes=64 + 4 * 128 / 64 + 2 * 128 / 64,
    open_rows=17,
)

TINY = dataclasses.replace(
    LLAMA,
    geometry=Geometry(kv_heads=3, group_size=3, head_dim=64, dtype=torch.bfloat16, page_size=16, block_size=8),
    layers=1,
)


def test_a_sequence_of_128k_is_16_gib() -> None:
    assert LLAMA.host_page_bytes * 2048 == 16 * GIB
    assert LLAMA.block_bytes == 8192
    sizes = plan_sizes(LLAMA, host_bytes=96 * GIB, gpu_bytes=100 * GIB, staging_tokens=140_000)
    assert sizes.host_pages == 6 * 2048
    assert sizes.tokens == 6 * 131072 - 64
    assert 5.99 < sizes.long_sequences < 6
    assert sizes.staging_bytes == 3 * 140_000 * 4096
    assert sizes.open_bytes == 17 * 64 * 131072
    # Everything on the GPU is within what SGLang would have given to KV, and next to nothing is left over.
    taken = sizes.summary_bytes + sizes.hot_bytes + sizes.staging_bytes + sizes.open_bytes
    assert 99.9 * GIB < taken <= 100 * GIB
    assert len(sizes.slots) == 32
    assert sizes.describe().startswith("offload: 12288 host pages (96.0 GiB) hold 786368 tokens, or 6.0 sequences of")


def test_float8_in_the_host_holds_twice_the_tokens() -> None:
    """A byte a number, and one a key or value; what is on the GPU stays as it is."""
    half = dataclasses.replace(LLAMA, float8_host=True)
    assert half.host_block_bytes == 2 * 16 * 129
    assert half.host_page_bytes * 2048 == 16 * GIB * 129 / 256
    assert (half.block_bytes, half.open_bytes, half.slot_bytes) == (
        LLAMA.block_bytes,
        LLAMA.open_bytes,
        LLAMA.slot_bytes,
    )
    sizes = plan_sizes(half, host_bytes=96 * GIB, gpu_bytes=100 * GIB, staging_tokens=140_000)
    assert sizes.host_pages == 96 * GIB // half.host_page_bytes
    assert 11.9 < sizes.long_sequences < 12
    assert sizes.host_block_bytes == half.host_block_bytes


def test_the_pool_shrinks_to_what_the_gpu_can_summarise() -> None:
    sizes = plan_sizes(LLAMA, host_bytes=96 * GIB, gpu_bytes=10 * GIB, staging_tokens=1000, hot_bytes=2 * GIB)
    assert sizes.host_pages < 6 * 2048
    taken = sizes.summary_bytes + sizes.hot_bytes + sizes.staging_bytes + sizes.open_bytes
    assert 9.9 * GIB < taken <= 10 * GIB


def test_slots_have_a_share_even_if_the_host_could_hold_more() -> None:
    sizes = plan_sizes(LLAMA, host_bytes=190 * GIB, gpu_bytes=20 * GIB, staging_tokens=1000)
    assert sizes.host_bytes < 190 * GIB
    left = 20 * GIB - sizes.staging_bytes - sizes.open_bytes
    assert sizes.hot_bytes == pytest.approx(MIN_HOT_SHARE * left, rel=1e-3)


def test_no_more_slots_than_blocks() -> None:
    sizes = plan_sizes(LLAMA, host_bytes=GIB, gpu_bytes=90 * GIB, staging_tokens=1000)
    assert sizes.slots == (sizes.host_pages * 4,) * 32


def test_slots_by_layer() -> None:
    sizes = plan_sizes(
        LLAMA, host_bytes=96 * GIB, gpu_bytes=40 * GIB, staging_tokens=1000, shares=[3.0, *[1.0] * 30, 0.0]
    )
    assert sizes.slots[0] // 3 == pytest.approx(sizes.slots[1], abs=1)
    assert sizes.slots[-1] == 0
    assert share_slots(10, 4, None, 100) == (2, 2, 2, 2)
    with pytest.raises(OffloadError, match="3 shares do not fit 4 layers"):
        share_slots(10, 4, [1, 1, 1], 100)


def test_what_a_layer_cannot_use_goes_to_the_others() -> None:
    assert share_slots(100, 4, [8, 1, 1, 0], 40) == (40, 30, 30, 0)
    assert share_slots(100, 4, [8, 4, 1, 0], 40) == (40, 40, 20, 0)
    assert share_slots(1000, 3, [8, 4, 1], 40) == (40, 40, 40)
    assert share_slots(100, 2, [1, 0], 40) == (40, 0)


@pytest.mark.parametrize("gib", [96, 190, 2000, 500_000])
@pytest.mark.parametrize("shape", [LLAMA, TINY])
def test_what_kernels_count_in_int32_stays_below_2_to_the_31(gib: int, shape: OffloadShape) -> None:
    """Token numbers of SGLang's table, blocks of a layer over KV heads, places in slots."""
    sizes = plan_sizes(shape, host_bytes=gib * GIB, gpu_bytes=gib * GIB, staging_tokens=140_000)
    g = shape.geometry
    units = sizes.host_pages * g.kv_heads * g.blocks_per_page
    assert sizes.host_pages * g.page_size < 2**31
    assert units < 2**31
    assert sizes.host_pages * g.blocks_per_page <= MAX_POOL_BLOCKS
    assert max(sizes.slots) * g.kv_heads < 2**31
    # What is to be multiplied on the device does not fit: addresses are made of int64.
    assert units * shape.block_bytes > 2**31


def test_no_slots_at_all() -> None:
    sizes = plan_sizes(LLAMA, host_bytes=GIB, gpu_bytes=10 * GIB, staging_tokens=10, hot_bytes=0)
    assert set(sizes.slots) == {0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host_bytes": 1000}, r"--sparse-decode-host-memory of 0.000 GiB leaves no room.*give at least 0.016 GiB"),
        ({"hot_bytes": 9 * GIB}, r"--sparse-decode-hot-cache asks for 9.00 GiB, but open pages and staging leave 7.86"),
        ({"hot_bytes": int(7.8556 * GIB)}, r"--sparse-decode-hot-cache of 7.856 GiB leaves no room.*give at most 7.8"),
        ({"staging_tokens": 2**21}, r"--sparse-decode-staging of 2097152 tokens and 17 open pages take 24.13 GiB"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(change: dict, message: str) -> None:
    given = {"host_bytes": 96 * GIB, "gpu_bytes": 8 * GIB, "staging_tokens": 1000} | change
    with pytest.raises(OffloadError, match=message) as error:
        plan_sizes(LLAMA, **given)
    assert "\n" not in str(error.value)


def test_blocks_have_to_be_copied_in_pieces_of_16_bytes() -> None:
    odd = dataclasses.replace(LLAMA, geometry=dataclasses.replace(LLAMA.geometry, head_dim=100))
    with pytest.raises(OffloadError, match=r"head dim 100 of torch.bfloat16 has 200 bytes"):
        plan_sizes(odd, host_bytes=GIB, gpu_bytes=GIB, staging_tokens=1)


def test_memory_is_gib_or_a_share() -> None:
    assert parse_memory("96", "--f", 10, "it") == 96 * GIB
    assert parse_memory("1.5GiB", "--f", 10, "it") == 3 * GIB // 2
    assert parse_memory("0.5GiB", "--f", 10, "it") == GIB // 2
    assert parse_memory("0.5", "--f", 10, "it") == 5
    assert parse_memory("0", "--f", 10, "it") == 0
    for wrong in ("-1", "many", "nan", "inf", ""):
        with pytest.raises(OptionsError, match=r"--f is .*: give GiB, such as 96, or a share of it below 1"):
            parse_memory(wrong, "--f", 10, "it")


def test_more_than_the_limit_leaves_is_refused() -> None:
    limit = MemoryLimit("the cgroup's memory limit", 128 * GIB, 100 * GIB)
    check_host_bytes(100 * GIB, limit)
    message = (
        r"--sparse-decode-host-memory asks for 101.0 GiB, but the cgroup's memory limit of 128.0 GiB leaves 100.0 GiB"
    )
    with pytest.raises(OffloadError, match=message):
        check_host_bytes(101 * GIB, limit)

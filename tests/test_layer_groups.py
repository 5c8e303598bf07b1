"""Readings by thirds of the model."""

from __future__ import annotations

import pytest

from sglang_sparse.observe.counters import Reading
from sglang_sparse.observe.layer_groups import by_layer_group, layer_group


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (1, ["first"]),
        (2, ["first", "middle"]),
        (3, ["first", "middle", "last"]),
        (7, ["first"] * 3 + ["middle"] * 2 + ["last"] * 2),
    ],
)
def test_each_layer_has_a_third(layers: int, expected: list[str]) -> None:
    assert [layer_group(layer, layers) for layer in range(layers)] == expected


def test_bytes_of_a_group_are_those_of_its_layers() -> None:
    reading = Reading(
        steps=1,
        kept_fraction=0.5,
        bytes_read_fraction=0.6,
        kept_by_layer_and_head=[[0.2, 0.4], [1.0, 1.0], [0.1, 0.1], [0.3, 0.5]],
        kv_bytes_by_layer=1000.0,
        scan_bytes_by_layer=[100.0, 0.0, 100.0, 100.0],
    )
    groups = by_layer_group(reading)
    assert list(groups) == ["first", "middle", "last"]
    assert groups["first"].kv_bytes == 2000
    assert groups["first"].kept_fraction == pytest.approx(0.65)
    assert groups["first"].bytes_read_fraction == pytest.approx(0.7)
    assert groups["last"].kept_bytes == pytest.approx(400)
    assert groups["last"].scan_bytes == 100


def test_blocks_of_a_smaller_format_count_as_what_is_read_of_them() -> None:
    reading = Reading(1, 0.5, 0.3, [[0.5, 0.5]], kv_bytes_by_layer=1000.0, scan_bytes_by_layer=[50.0], block_share=0.5)
    group = by_layer_group(reading)["first"]
    assert group.kept_bytes == 250
    assert group.bytes_read_fraction == pytest.approx(0.3)


def test_no_step_no_groups() -> None:
    assert by_layer_group(Reading(0, None, None, [])) == {}

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_sparse.calibrate.candidates import (
    CandidateError,
    CopyEstimator,
    KeyScheme,
    PageBound,
    ScreenedEstimator,
    _bf16_down,
    _fp8_down,
    asymmetric,
    block_log_mass,
    fp8_means,
    hadamard,
    make_candidate,
    rotated,
    symmetric_2bit,
    token_scores,
)
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.selection import Estimator, make_estimator

GEOMETRY = Geometry(kv_heads=2, group_size=3, head_dim=64, dtype=torch.bfloat16, page_size=32, block_size=16)
LENGTHS = [150, 97, 31]
PAGES = 6


def keys(seed: int = 0, bias: float = 5.0) -> torch.Tensor:
    """`[slots, Hkv, D]`; channels with large biases, as Qwen2's keys have."""
    rng = torch.Generator().manual_seed(seed)
    shift = torch.randn(2, 64, generator=rng) * bias
    return torch.randn(PAGES * 32, 2, 64, generator=rng) + shift


def block_mass(estimator: Estimator, pool: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`[B, Hkv, G, blocks]` of three rows, steps of one sequence on pages 1 to 5."""
    table = torch.arange(1, PAGES, dtype=torch.int32).expand(len(LENGTHS), -1).contiguous()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    summary = estimator.allocate(PAGES, "cpu")
    estimator.update(pool, table[0, : LENGTHS[0] // 32], summary)
    out = torch.full((len(LENGTHS), 2, 3, 10), float("nan"))
    estimator.block_mass(q, pool, summary, table, lengths, scale=0.1, min_context=0, out=out)
    return out


def queries() -> torch.Tensor:
    return torch.randn(len(LENGTHS), 6, 64, generator=torch.Generator().manual_seed(1))


def assert_rows_close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    for row, length in enumerate(LENGTHS):
        blocks = -(-length // 16)
        torch.testing.assert_close(a[row, ..., :blocks], b[row, ..., :blocks], rtol=0, atol=tolerance)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_asymmetric_copies_are_the_servers_thumbnails(bits: int) -> None:
    pool, q = keys(bias=1.0).to(torch.bfloat16).float(), queries()
    server = make_estimator(SparseDecodeOptions(thumbnail_bits=bits), GEOMETRY)
    candidate = make_candidate(f"asymmetric-{bits}bit", GEOMETRY)
    # The server folds the step into the query and rounds that to bfloat16.
    assert_rows_close(block_mass(candidate, pool, q), block_mass(server, pool, q), 0.03)
    assert candidate.scan_bytes() == server.scan_bytes()


def test_a_perfect_copy_gives_exact_masses_with_open_pages_read_exactly() -> None:
    pool, q = keys(), queries()
    copy = CopyEstimator(GEOMETRY, KeyScheme(lambda keys: keys, 0.0), "perfect")
    exact = make_estimator(SparseDecodeOptions(estimator="exact"), GEOMETRY)
    assert_rows_close(block_mass(copy, pool, q), block_mass(exact, pool, q), 1e-4)
    # Tokens of a row's open page may be in a closed page of a longer row: an empty copy must not reach them.
    nothing = CopyEstimator(GEOMETRY, KeyScheme(torch.zeros_like, 0.0), "nothing")
    made, expected = block_mass(nothing, pool, q), block_mass(exact, pool, q)
    for row, length in enumerate(LENGTHS):
        first, last = length // 32 * 2, -(-length // 16)
        torch.testing.assert_close(made[row, ..., first:last], expected[row, ..., first:last], rtol=0, atol=1e-4)


def test_the_symmetric_copy_is_the_estimator_ffd() -> None:
    pool, q = keys(bias=1.0).to(torch.bfloat16).float(), queries()
    server = make_estimator(SparseDecodeOptions(estimator="ffd"), GEOMETRY)
    candidate = make_candidate("symmetric-2bit", GEOMETRY)
    exact = block_mass(make_estimator(SparseDecodeOptions(estimator="exact"), GEOMETRY), pool, q)
    # The server rounds low and step to bfloat16 and folds the step into the query.
    assert_rows_close(block_mass(candidate, pool, q), block_mass(server, pool, q), 0.15)
    assert (block_mass(candidate, pool, q) - exact).nan_to_num().abs().max() > 0.6
    assert (server.name, candidate.scan_bytes()) == ("ffd", server.scan_bytes())


def test_symmetric_codes_have_ffds_levels() -> None:
    page = torch.tensor([-3.0, -1.2, -0.2, 0.1, 1.1, 2.6]).reshape(1, 6, 1, 1)
    # s = 3 / 1.5 = 2: levels -3, -1, 1, 3.
    assert symmetric_2bit(6).reconstruct(page).flatten().tolist() == [-3.0, -1.0, -1.0, 1.0, 1.0, 3.0]


@pytest.mark.parametrize("meta", ["bf16", "fp8"])
@pytest.mark.parametrize("bits", [2, 4])
def test_asymmetric_codes_stay_within_half_a_step(meta: str, bits: int) -> None:
    page = keys(3).reshape(PAGES, 32, 2, 64)
    error = (asymmetric(bits, 32, meta).reconstruct(page) - page).abs()
    spread = page.amax(1) - page.amin(1)
    # Low and step are rounded outwards: by 1/128 of the low (bf16), or 1/8 (fp8).
    slack = page.abs().amax(1) * (1 / 8 if meta == "fp8" else 1 / 128)
    assert (error.amax(1) <= (spread + slack) / (2**bits - 1) * 0.6 + 1e-4).all()


def test_fp8_means_are_means() -> None:
    page = keys(4).reshape(PAGES, 32, 2, 64)
    made = fp8_means(4, 32).reconstruct(page).unflatten(1, (8, 4))
    assert (made == made[:, :, :1]).all()
    centre = page.mean(1, keepdim=True)
    expected = page.unflatten(1, (8, 4)).mean(2)
    torch.testing.assert_close(made[:, :, 0] - centre, expected - centre, rtol=0.07, atol=0.05)


def test_rotation_changes_only_the_rounding() -> None:
    matrix = hadamard(64)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(64))
    page = keys(5).reshape(PAGES, 32, 2, 64)
    unrounded = rotated(KeyScheme(lambda keys: keys, 0.0), 64).reconstruct(page)
    torch.testing.assert_close(unrounded, page, rtol=1e-4, atol=1e-4)
    with pytest.raises(CandidateError, match="power of two"):
        hadamard(96)


def test_the_page_bound_bounds_every_block() -> None:
    pool, q = keys(6), queries()
    bound = block_mass(PageBound(GEOMETRY), pool, q)
    exact = block_mass(make_estimator(SparseDecodeOptions(estimator="exact"), GEOMETRY), pool, q)
    for row, length in enumerate(LENGTHS):
        closed = length // 32 * 2
        assert (bound[row, ..., :closed] >= exact[row, ..., :closed] - 1e-3).all()


def test_screening_drops_only_what_is_negligible() -> None:
    pool, q = keys(7, bias=0.0), queries() * 6
    # Two blocks carry the mass of every head.
    pool[40:56] += 3 * q[0].unflatten(0, (2, 3)).mean(1) / 6
    screened = make_candidate("bound+asymmetric-4bit", GEOMETRY)
    plain = make_candidate("asymmetric-4bit", GEOMETRY)
    assert isinstance(screened, ScreenedEstimator)
    made, whole = block_mass(screened, pool, q), block_mass(plain, pool, q)
    assert screened.scanned is not None
    for row, length in enumerate(LENGTHS):
        blocks = -(-length // 16)
        lost = whole[row, ..., :blocks].logsumexp(-1) - made[row, ..., :blocks].logsumexp(-1)
        assert (lost <= 0.006).all()
    assert screened.scanned.min() < 1
    assert screened.scanned.max() <= 1


def test_masses_do_not_depend_on_what_lies_past_a_row() -> None:
    q, pool = queries(), keys(8)
    scores = token_scores(q, pool[:150], 0.1)
    garbage = scores.clone()
    for row, length in enumerate(LENGTHS):
        garbage[row, ..., length:] = float("nan")
    lengths = torch.tensor(LENGTHS)
    torch.testing.assert_close(block_log_mass(scores, lengths, 16), block_log_mass(garbage, lengths, 16))


@pytest.mark.parametrize(
    "name", ["", "asymmetric", "asymmetric-2bits", "means--fp8", "bound+", "bound+bound+x", "bound+symmetric-2bit"]
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(CandidateError, match="is no candidate"):
        make_candidate(name, GEOMETRY)


@pytest.mark.parametrize(("down", "finest"), [(_bf16_down, 1e-3), (_fp8_down, 2**-9)])
def test_rounding_down_takes_the_next_value_below(down: Callable, finest: float) -> None:
    x = torch.cat((torch.randn(2000) * 20, torch.tensor([0.0, 1.0, -1.0, 1e-4, -1e-4, 400.0, -400.0])))
    made = down(x)
    assert (made <= x).all()
    assert ((x - made) <= x.abs() / 8 + finest).all()
    assert torch.equal(down(made), made)

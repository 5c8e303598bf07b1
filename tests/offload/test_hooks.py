"""Admission to a prefill batch, and the pool that SGLang is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from sglang_sparse import hook_targets
from sglang_sparse.offload.hooks import OffloadHooks
from sglang_sparse.options import OptionsError, SparseDecodeOptions


def stop(error: BaseException) -> NoReturn:
    raise error


def hooks(staging: int) -> OffloadHooks:
    made = OffloadHooks(SparseDecodeOptions(offload=True), stop)
    made._pools = SimpleNamespace(sizes=SimpleNamespace(staging_tokens=staging))  # type: ignore[assignment]
    return made


def request(prefix: int) -> Any:
    return SimpleNamespace(prefix_indices=range(prefix))


@pytest.mark.parametrize(
    ("batch", "prefix", "added"),
    [([], 5000, True), ([600], 400, True), ([600], 401, False), ([300, 300], 401, False), ([0, 0], 0, True)],
)
def test_prefixes_of_a_batch_have_to_fit_the_staging(batch: list[int], prefix: int, added: bool) -> None:
    """A request alone is let in: the staging holds the longest prefix."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    adder = SimpleNamespace(can_run_list=[request(each) for each in batch])
    calls = []

    def original(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "asked"

    hook = hooks(1000).by_target()[hook_targets.ADD_ONE_REQUEST]
    req = request(prefix)
    answer = hook(original, adder, req, False, truncation_align_size=None)
    assert answer == ("asked" if added else AddReqResult.OTHER)
    assert calls == ([((adder, req, False), {"truncation_align_size": None})] if added else [])


@pytest.mark.parametrize(
    ("left", "prefix", "length", "end", "goes_on"),
    [
        (200, 64, 1000, 256, True),
        (64, 64, 1000, 128, True),
        # Less than a page is left: it is taken whole.
        (7, 64, 1000, 128, True),
        (7, 64, 100, 100, False),
        (936, 64, 1000, 1000, False),
    ],
)
def test_chunks_end_with_pages_however_little_is_left(
    left: int, prefix: int, length: int, end: int, goes_on: bool
) -> None:
    """SGLang cuts the next chunk of a request to what running requests leave, in tokens."""
    from sglang.srt.managers.schedule_batch import Range
    from sglang.srt.managers.schedule_policy import PrefillAdder

    req = SimpleNamespace(
        full_untruncated_fill_ids=range(length),
        prefix_indices=range(prefix),
        sampling_params=SimpleNamespace(max_new_tokens=8),
        retracted_stain=False,
    )
    req.set_extend_range = lambda start, end: setattr(req, "extend_range", Range(start, end))
    adder = SimpleNamespace(
        dllm_config=None,
        is_hybrid_swa=False,
        rem_chunk_tokens=4096,
        rem_total_tokens=left + 0.7,
        prefill_delayer_single_pass=None,
        page_size=64,
        can_run_list=[],
        _update_prefill_budget=lambda *_, **__: None,
        _mamba_gap_budget_for_req=lambda _: 0,
    )
    hook = hooks(1000).by_target()[hook_targets.ADD_CHUNKED_REQUEST]
    left_over = hook(PrefillAdder.add_chunked_req, adder, req)
    assert (req.extend_range.start, req.extend_range.end) == (prefix, end)
    assert (left_over is req) == goes_on
    assert adder.can_run_list == [req]


def test_a_pool_without_sizes_ends_the_start() -> None:
    made = OffloadHooks(SparseDecodeOptions(offload=True), stop)
    with pytest.raises(OptionsError, match="offload has no sizes: another plugin replaces SGLang's pool sizing"):
        made.by_target()[hook_targets.BUILD_KV_POOL](None, None, max_total_num_tokens=64, mha_pool_class=object)

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


def test_a_pool_without_sizes_ends_the_start() -> None:
    made = OffloadHooks(SparseDecodeOptions(offload=True), stop)
    with pytest.raises(OptionsError, match="offload has no sizes: another plugin replaces SGLang's pool sizing"):
        made.by_target()[hook_targets.BUILD_KV_POOL](None, None, max_total_num_tokens=64, mha_pool_class=object)

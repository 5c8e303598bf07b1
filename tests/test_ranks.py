"""How heads are divided over ranks, and how what the ranks say of themselves is put together."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.communicator import FanOutCommunicator

from sglang_sparse import rank_support, sglang_compat
from sglang_sparse.control import answers, messages
from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.geometry import Geometry, heads_of_rank
from sglang_sparse.memory import SparsePoolConfigurator, reserve
from sglang_sparse.observe.ranks import RankState, merged
from sglang_sparse.option_values import UnsupportedError
from sglang_sparse.options import SparseDecodeOptions

MODEL = Geometry(kv_heads=4, group_size=2, head_dim=64, dtype=torch.float32, page_size=32, block_size=16)
BY_HEAD = ((0.2, 0.4, 1.0, 1.0), (0.9, 0.3, 1.0, 1.0))


def of_rank(rank: int, ranks: int) -> Geometry:
    heads = heads_of_rank(MODEL.kv_heads, rank, ranks)
    group = MODEL.query_heads // ranks // len(heads)
    return dataclasses.replace(MODEL, kv_heads=len(heads), group_size=group, first_kv_head=heads.start)


def make_step(geometry: Geometry, **options: Any) -> DecodeStep:
    made = SparseDecodeOptions(min_context=32, **options)
    return DecodeStep(made, geometry, layers=2, pages=8, max_requests=4, max_pages=4, device="cpu")


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "expected"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 4, [[0], [0], [0], [0]]),
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_heads_are_divided_as_sglang_does(kv_heads: int, ranks: int, expected: list[list[int]]) -> None:
    """`QKVParallelLinear` loads the shard `rank // replicas`."""
    assert [list(heads_of_rank(kv_heads, rank, ranks)) for rank in range(ranks)] == expected


@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 3), (3, 2), (2, 3), (6, 4)])
def test_heads_that_cannot_be_divided(kv_heads: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"{kv_heads} KV heads cannot be divided over {ranks} ranks"):
        heads_of_rank(kv_heads, 0, ranks)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: kv_heads, num_attention_heads=12)
    with pytest.raises(UnsupportedError, match=f"--tp-size {ranks}: 12 query heads and {kv_heads} KV heads cannot"):
        rank_support.check_head_partition(model, ranks, "cuda")


def test_query_heads_that_cannot_be_divided() -> None:
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 1, num_attention_heads=6)
    rank_support.check_head_partition(model, 2, "cuda")
    with pytest.raises(UnsupportedError, match="--tp-size 4: 6 query heads"):
        rank_support.check_head_partition(model, 4, "cuda")


def test_a_cpu_has_no_ranks_that_share_a_head() -> None:
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 2, num_attention_heads=8)
    rank_support.check_head_partition(model, 4, "cuda")
    rank_support.check_head_partition(model, 2, "cpu")
    with pytest.raises(UnsupportedError, match=r"--tp-size 4 exceeds the 2 KV heads of the model, .* use at most 2"):
        rank_support.check_head_partition(model, 4, "cpu")


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_rank_has_the_gammas_of_its_heads(ranks: int) -> None:
    found = [make_step(of_rank(rank, ranks), gamma_by_head=BY_HEAD) for rank in range(ranks)]
    for rank, step in enumerate(found):
        heads = list(heads_of_rank(MODEL.kv_heads, rank, ranks))
        for layer, gammas in enumerate(BY_HEAD):
            wanted = [gammas[head] for head in heads]
            assert step.buffers.thresholds[layer, 0].tolist() == pytest.approx(wanted)
            # What the audit compares the coverage of these heads with.
            assert step.control.gamma_of(layer) == pytest.approx(sum(wanted) / len(wanted))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_gamma_for_all_is_every_ranks(ranks: int) -> None:
    for rank in range(ranks):
        step = make_step(of_rank(rank, ranks), gamma_by_layer=(0.5, 0.9))
        assert step.buffers.thresholds[:, 0].tolist() == [
            pytest.approx([gamma] * step.geometry.kv_heads) for gamma in (0.5, 0.9)
        ]


class Configurator:
    """Stands in for SGLang's."""

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> int:
        return available_bytes


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_reserve_the_same_memory(ranks: int) -> None:
    """SGLang gives all ranks the same budget, and no two pools may differ. Some ranks keep all blocks here."""
    options = SparseDecodeOptions(gamma_by_head=BY_HEAD)
    sizes = set()
    for rank in range(ranks):
        made = reserve(Configurator(), options, geometry=of_rank(rank, ranks), layers=2, max_pages=64, max_requests=8)
        assert isinstance(made, SparsePoolConfigurator)
        sizes.add(made.calculate_pool_sizes(1 << 30, 32))
    assert len(sizes) == 1


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"offload": True}, {}, "--sparse-decode-offload"),
    ({"kv_format": "split"}, {}, "--sparse-decode-kv-format split"),
    ({"offload": True, "forecast": "query"}, {}, "--sparse-decode-offload"),
    ({"select_by": "forecast"}, {}, "--sparse-decode-select-by forecast"),
    ({}, {"enable_lora": True}, "--enable-lora"),
    ({}, {"lora_paths": ["a"]}, "--lora-paths"),
]


@pytest.mark.skipif(not sglang_compat.has_tested_ranks(), reason="tensor parallelism is refused on this release")
@pytest.mark.parametrize(("options", "given", "named"), REFUSED)
def test_what_needs_a_single_rank_is_refused_by_name(
    options: dict[str, Any], given: dict[str, Any], named: str
) -> None:
    made = SparseDecodeOptions(**options)
    rank_support.check_ranks(given, made)
    rank_support.check_ranks({**given, "tp_size": 1}, made)
    with pytest.raises(UnsupportedError, match=f"^{named} has not been tested with --tp-size 2: remove it"):
        rank_support.check_ranks({**given, "tp_size": 2}, made)
    rank_support.check_ranks({"tp_size": 2}, SparseDecodeOptions())


@pytest.mark.parametrize(("ranks", "device", "warns"), [(2, "cuda", True), (1, "cuda", False), (2, "cpu", False)])
def test_ranks_on_gpus_are_said_to_be_untested(
    ranks: int, device: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rank_support.warn_untested(ranks, device)
    assert [f"--tp-size {ranks}" in message for message in caplog.messages] == [True] * warns


def test_releases_without_tested_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_compat, "has_tested_ranks", lambda: False)
    with pytest.raises(UnsupportedError, match=r"not been tested on this SGLang release: use 0\.5\.17, or --tp-size 1"):
        rank_support.check_ranks({"tp_size": 2}, SparseDecodeOptions())


def block(kept: list[list[float]], audit: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """What a rank says of itself that is not the same on all ranks."""
    shares = [share for layer in kept for share in layer]
    mean = sum(shares) / len(shares) if shares else None
    read = {"kept_fraction": mean, "bytes_read_fraction": mean, "kept_fraction_by_layer_and_head": kept, "steps": 5}
    return {
        "options": {"rule": "coverage", "gamma": 0.9, "gamma_by_layer": [], "gamma_by_head": []},
        "control": {"gamma": None},
        "summary_bytes": 10,
        "audit": audit,
        **read,
        "since_change": {**read, "steps": 2},
        **more,
    }


def test_heads_of_ranks_are_put_side_by_side() -> None:
    ranks = [RankState([0, 1], block([[0.2, 0.4], [1, 0.6]])), RankState([2, 3], block([[0.6, 0.8], [0, 0.4]]))]
    found = merged(ranks)
    assert found["kept_fraction_by_layer_and_head"] == [[0.2, 0.4, 0.6, 0.8], [1, 0.6, 0, 0.4]]
    assert found["since_change"]["kept_fraction_by_layer_and_head"] == found["kept_fraction_by_layer_and_head"]
    assert found["kept_fraction"] == found["since_change"]["kept_fraction"] == pytest.approx(0.5)
    assert (found["steps"], found["since_change"]["steps"]) == (5, 2)
    assert (found["tp_size"], found["summary_bytes"], found["audit"]) == (2, 20, None)
    assert "self_check" not in found


def test_a_head_on_several_ranks_is_one_head() -> None:
    kept = [[0.2], [0.4], [0.5], [0.9]]
    found = merged([RankState([rank // 2], block([shares, []])) for rank, shares in enumerate(kept)])
    assert found["kept_fraction_by_layer_and_head"] == [pytest.approx([0.3, 0.7]), []]


def test_one_rank_is_left_as_it_is() -> None:
    state = block([[0.5]])
    assert merged([RankState([0], state)]) is state


def test_ranks_before_the_first_step() -> None:
    found = merged([RankState([rank], block([])) for rank in range(2)])
    assert found["kept_fraction"] is found["bytes_read_fraction"] is None
    assert found["kept_fraction_by_layer_and_head"] == []


def audit(samples: int, **layers: tuple[int, float]) -> dict[str, Any]:
    by_layer = {
        name.removeprefix("layer"): {"count": count, "mean": mean, "histogram": {"0.9": count, "1.0": 0}}
        for name, (count, mean) in layers.items()
    }
    return {"rate": 0.1, "samples": samples, "mean_coverage": None, "worst_layer": None, "by_layer": by_layer}


def test_coverage_of_ranks_is_added_up() -> None:
    one, two = audit(3, layer0=(2, 0.9), layer1=(1, 0.8)), audit(3, layer0=(2, 0.7), layer10=(4, 0.85))
    found = merged([RankState([0], block([[1]], one)), RankState([1], block([[1]], two))])["audit"]
    assert (found["samples"], found["rate"]) == (3, 0.1)
    assert list(found["by_layer"]) == ["0", "1", "10"]
    assert found["by_layer"]["0"] == {"count": 4, "mean": pytest.approx(0.8), "histogram": {"0.9": 4, "1.0": 0}}
    assert found["mean_coverage"] == pytest.approx((4 * 0.8 + 0.8 + 4 * 0.85) / 9)
    assert found["worst_layer"] in (0, 1)


@pytest.mark.parametrize(
    ("options", "gamma", "worst"),
    [
        ({}, None, 0),
        ({"gamma_by_layer": [0.5, 0.9]}, None, 1),
        ({"gamma_by_head": [[0.4, 0.6], [0.9, 0.9]]}, None, 1),
        ({"gamma_by_layer": [0.5, 0.9]}, 0.7, 0),
        ({"rule": "top-k"}, None, 0),
    ],
)
def test_the_worst_layer_is_that_of_all_heads(options: dict[str, Any], gamma: float | None, worst: int) -> None:
    """The one whose coverage lies furthest below what is asked for there."""
    ranks = []
    for head in range(2):
        state = block([[1], [1]], audit(2, layer0=(1, 0.6), layer1=(1, 0.8)))
        state["options"] |= options
        state["control"]["gamma"] = gamma
        ranks.append(RankState([head], state))
    assert merged(ranks)["audit"]["worst_layer"] == worst


def test_the_self_check_is_that_of_the_worst_rank() -> None:
    checks = [{"stale_pages": stale, "wrong_slots": wrong, "free_tokens": 7} for stale, wrong in ((0, 2), (3, 0))]
    found = merged([RankState([head], block([[1]], self_check=check)) for head, check in enumerate(checks)])
    assert found["self_check"] == {"stale_pages": 3, "wrong_slots": 2, "free_tokens": 7}
    checks[1]["stale_pages"] = None
    found = merged([RankState([head], block([[1]], self_check=check)) for head, check in enumerate(checks)])
    assert found["self_check"]["stale_pages"] is None


def test_what_a_request_read_says_of_which_rank_it_is() -> None:
    assert answers.summary([(1, 4)]) == {"kept_fraction": 0.25, "kept_blocks": 1, "blocks": 4}
    assert answers.summary([(1, 4, 2), (3, 4, 2)]) == {
        "kept_fraction": 0.5,
        "kept_blocks": 4,
        "blocks": 8,
        "tp_rank": 0,
        "tp_size": 2,
    }


class Ranks:
    """A TokenizerManager and the schedulers that it talks to, without processes: ranks answer in any order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int, order: list[int]) -> None:
        self.asked: list[Any] = []
        self.failing: int | None = None
        self.numbers: list[int] = []
        self._order = order
        self._handlers: list[Any] = []
        self._rank = 0
        monkeypatch.setattr(sglang_compat, "ranks_of", lambda manager: ranks)
        monkeypatch.setattr(sglang_compat, "decodes_sparsely", lambda server_args: True)
        monkeypatch.setattr(sglang_compat, "reply_address", lambda manager: "ipc:///nowhere")
        monkeypatch.setattr(sglang_compat, "rank_here", lambda: (self._rank, ranks))
        monkeypatch.setattr(
            sglang_compat, "Replies", lambda: SimpleNamespace(send=lambda address, answer: self.receive(answer))
        )
        self.manager: Any = SimpleNamespace(
            server_args=None,
            _dispatch_to_scheduler=self.dispatch,
            _result_dispatcher=[],
            auto_create_handle_loop=lambda: None,
            get_internal_state_communicator=FanOutCommunicator(self.dispatch_state, 1),
        )
        self._states = self.manager.get_internal_state_communicator
        messages.connect_tokenizer(self.manager)
        for rank in range(ranks):
            self._rank = rank
            scheduler: Any = SimpleNamespace(_request_dispatcher=[])
            messages.connect_scheduler(scheduler, lambda changes, rank=rank: self.answer(rank, changes))
            self._handlers.append(scheduler._request_dispatcher[0])

    def answer(self, rank: int, changes: dict[str, Any]) -> RankState:
        self.asked.append((rank, changes))
        if rank == self.failing:
            raise RuntimeError("no counters")
        return RankState([rank], block([[rank / 4]]))

    def dispatch(self, request: Any) -> None:
        for rank in self._order:
            answer = self._handlers[rank](request)
            self.numbers.append(request.number)
            assert (answer is not None) == (rank == 0)
            if answer is not None:
                asyncio.get_running_loop().call_soon(self.receive, answer)

    def receive(self, answer: Any) -> None:
        asyncio.get_running_loop().call_soon(self.manager._result_dispatcher[0], answer)

    def dispatch_state(self, request: Any) -> None:
        state = SimpleNamespace(internal_state={"dtype": "auto"})
        asyncio.get_running_loop().call_soon(self._states.handle_recv, state)


@pytest.fixture(autouse=True)
def dispatchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's dispatchers add up; here each is a list of what they would call."""
    monkeypatch.setattr(messages, "TypeBasedDispatcher", lambda pairs: [call for _, call in pairs])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_every_rank_hears_of_changes_and_answers_for_itself(monkeypatch: pytest.MonkeyPatch, order: list[int]) -> None:
    ranks = Ranks(monkeypatch, 3, order)
    found = asyncio.run(messages.exchange(ranks.manager, {"gamma": 0.5}))
    assert sorted(ranks.asked) == [(rank, {"gamma": 0.5}) for rank in range(3)]
    assert found["kept_fraction_by_layer_and_head"] == [[0, 0.25, 0.5]]


def test_the_server_s_state_has_the_block_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2, [1, 0])
    (state,) = asyncio.run(ranks.manager.get_internal_state_communicator("state"))
    assert state.internal_state["dtype"] == "auto"
    found = state.internal_state["sparse_decode"]
    assert found["kept_fraction_by_layer_and_head"] == [[0, 0.25]]
    assert "since_change" not in found
    assert ranks.manager.get_internal_state_communicator._fan_out == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_says_so(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    ranks = Ranks(monkeypatch, 2, [0, 1])
    ranks.failing = failing
    with pytest.raises(RuntimeError, match="no counters"):
        asyncio.run(messages.exchange(ranks.manager, {}))
    (state,) = asyncio.run(ranks.manager.get_internal_state_communicator("state"))
    assert state.internal_state["sparse_decode"] == {"error": "RuntimeError: no counters"}


def test_an_answer_that_does_not_come_ends_the_question_and_not_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late answers are those of an earlier question, of which one more would make half of the heads twice."""
    ranks = Ranks(monkeypatch, 2, [0])
    monkeypatch.setattr(messages, "ANSWER_SECONDS", 0.05)

    async def ask() -> dict[str, Any]:
        with pytest.raises(RuntimeError, match=r"not every rank answered within 0\.05 s"):
            await messages.exchange(ranks.manager, {})
        (state,) = await ranks.manager.get_internal_state_communicator("state")
        assert "not every rank answered" in state.internal_state["sparse_decode"]["error"]
        ranks._order[:] = [0, 1]
        late = messages.SparseDecodeReqOutput(number=1, rank=0, kv_heads=[0], state=block([[1]]))
        ranks.receive(late)
        return await messages.exchange(ranks.manager, {})

    assert asyncio.run(ask())["kept_fraction_by_layer_and_head"] == [[0, 0.25]]
    assert ranks.numbers == [1, 2, 3, 3]


def test_questions_at_once_get_an_answer_each(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2, [1, 0])

    async def ask() -> list[dict[str, Any]]:
        return await asyncio.gather(*(messages.exchange(ranks.manager, {}) for _ in range(5)))

    assert [found["kept_fraction_by_layer_and_head"] for found in asyncio.run(ask())] == [[[0, 0.25]]] * 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dense_engine_that_follows_a_sparse_one_is_left_alone(ranks: int) -> None:
    """The hook on SGLang's TokenizerManager stays in the process."""
    states = FanOutCommunicator(lambda request: None, 1)
    arguments = SimpleNamespace(decode_attention_backend=None, tp_size=ranks)
    manager: Any = SimpleNamespace(get_internal_state_communicator=states, _result_dispatcher=[], server_args=arguments)
    messages.connect_tokenizer(manager)
    assert manager.get_internal_state_communicator is states
    assert manager._result_dispatcher == []


def test_heads_that_sglang_divides_in_another_way_are_refused() -> None:
    rank_support.check_heads(2, range(2, 4))
    with pytest.raises(UnsupportedError, match="gives this rank 4 KV heads where 2 were expected"):
        rank_support.check_heads(4, range(2, 4))

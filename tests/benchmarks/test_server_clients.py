"""Streams, closed loops and their numbers, against a fake server."""

from __future__ import annotations

import pytest
from serving import FakeServer

from benchmarks.errors import ServerError
from benchmarks.results import Row
from benchmarks.server.client import Answer, Client, ReadTotals
from benchmarks.server.load import END_TOKENS, load_rows, measure_load
from benchmarks.server.statistics import agreement, percentile, throughput, tpot_together
from benchmarks.server.streams import all_at_once, check_cached, closed_loop, warm
from benchmarks.server.tpot import measure_server

TOGETHER = 0.03
"""Seconds a token: 40 take long enough that requests run together for most of it on a busy machine too."""


@pytest.mark.parametrize("incremental", [True, False])
def test_an_answer_has_its_tokens_and_times(server: FakeServer, incremental: bool) -> None:
    server.incremental, server.delay = incremental, 0.01
    answer = Client(server.url).generate([5, 6], 8)
    assert answer.tokens == [11, 12, 13, 14, 15, 16, 17, 18]
    assert answer.counts == list(range(1, 9))
    assert 0.009 < answer.tpot < 0.5
    assert answer.times[0] > answer.started


def test_errors_of_the_server_are_reported(server: FakeServer) -> None:
    server.fail_after = 0
    with pytest.raises(ServerError, match="out of memory"):
        Client(server.url).generate([1], 4)


def test_a_closed_loop_keeps_its_concurrency(server: FakeServer) -> None:
    server.delay = 0.005
    answers = closed_loop(Client(server.url), lambda i: [i], concurrency=3, requests=10, tokens=4)
    assert sorted(answer.tokens[0] for answer in answers) == list(range(10))
    assert server.most_at_once == 3
    # The first four requests cannot all have run at once: one more starts as soon as one ends.
    starts = sorted(answer.started for answer in answers)
    ends = sorted(answer.times[-1] for answer in answers)
    assert all(starts[i + 3] >= ends[i] - 0.05 for i in range(7))


def test_an_error_ends_a_closed_loop(server: FakeServer) -> None:
    server.fail_after = 3
    with pytest.raises(ServerError):
        closed_loop(Client(server.url), lambda i: [i], concurrency=2, requests=100, tokens=2)
    assert len(server.prompts) < 20


def test_warm_prompts_are_cached_and_cold_ones_are_noticed(server: FakeServer) -> None:
    client = Client(server.url)
    prompts = [[i] * 1000 for i in range(1, 3)]
    warm(client, prompts)
    check_cached(all_at_once(client, [[*prompt, 7] for prompt in prompts], 2), 1000)
    with pytest.raises(ServerError, match="only 0 of 1000 prompt tokens were in the prefix cache"):
        check_cached(all_at_once(client, [[9] * 1000], 2), 1000)


def test_what_was_read_is_that_of_the_measured_steps(server: FakeServer) -> None:
    server.delay = TOGETHER
    prompts = [[i] * 1600 for i in range(1, 5)]
    measured = list(measure_server(Client(server.url), {1600: prompts}, [4, 1], 40))
    assert [case[:2] for case in measured] == [(1600, 1), (1600, 4)]
    timed = measured[1][3]
    assert timed.seconds > 0
    assert timed.read == (pytest.approx(0.25), pytest.approx(0.4))
    assert timed.answers[1] == [(3200 + i) % 1000 for i in range(40)]


def test_batches_that_do_not_fit_are_left_out(server: FakeServer, capsys: pytest.CaptureFixture) -> None:
    server.delay = TOGETHER
    prompts = [[i] * 1600 for i in range(1, 9)]
    short = {100: [prompt[:100] for prompt in prompts], 1600: prompts}
    measured = list(measure_server(Client(server.url), short, [1, 8], 40))
    assert [case[:2] for case in measured] == [(100, 1), (100, 8), (1600, 1)]
    assert "batch 8 of 1600: takes 14144 tokens of KV cache, the server has 10000: left out" in capsys.readouterr().out


def test_coverage_is_changed_while_the_server_runs(server: FakeServer) -> None:
    server.delay = TOGETHER
    client = Client(server.url)
    measured = list(measure_server(client, {900: [[1] * 900, [2] * 900]}, [1, 2], 40, [0.9]))
    assert [case[:3] for case in measured] == [(900, batch, gamma) for batch in (1, 2) for gamma in (None, 0.9)]
    # A warm-up, and for each coverage an untimed and a timed batch.
    assert server.changes == [(1, {"gamma": None}), (3, {"gamma": 0.9}), (6, {"gamma": None}), (10, {"gamma": 0.9})]
    with pytest.raises(ServerError, match="gamma: has to be at most 1"):
        list(measure_server(client, {900: [[1] * 900]}, [1], 40, [2.0]))


def test_a_dense_server_reads_everything(server: FakeServer) -> None:
    server.sparse = False
    [(_, _, _, timed)] = measure_server(Client(server.url), {400: [[1] * 400]}, [1], 40)
    assert timed.read is None


def test_load_uses_warm_prefixes_with_ends_of_their_own(server: FakeServer) -> None:
    prefixes = [[i] * 900 for i in range(1, 4)]
    client = Client(server.url)
    warm(client, prefixes)
    answers, read = measure_load(client, prefixes, 5000, concurrency=3, rounds=2, tokens=5)
    asked = server.prompts[3:]
    assert len(answers) == len({tuple(prompt) for prompt in asked}) == 6
    assert all(len(prompt) == 900 + END_TOKENS and prompt[:900] in prefixes for prompt in asked)
    assert read == (pytest.approx(0.25), pytest.approx(0.4))
    with pytest.raises(ServerError, match="prefix cache"):
        measure_load(client, [[8] * 900], 5000, concurrency=1, rounds=1, tokens=2)


def made(start: float, times: list[float]) -> Answer:
    return Answer(start, times, list(range(1, len(times) + 1)), [0] * len(times))


def test_time_per_token_is_that_of_the_common_time() -> None:
    # Alone a token takes 1 s, beside another 2 s.
    first = made(0, [1, 2, 3, 5, 7, 9, 11, 12])
    second = made(2, [3, 5, 7, 9, 11])
    assert tpot_together([first, second]) == pytest.approx(2)
    assert tpot_together([first]) == pytest.approx(11 / 7)
    with pytest.raises(ServerError, match="raise --tokens"):
        tpot_together([made(0, [1, 2, 3, 4, 5, 6]), made(4, [5, 6, 7, 8, 9, 10])])


def test_coalesced_events_count_their_tokens() -> None:
    assert Answer(0, [1, 2, 4], [1, 4, 7]).tpot == pytest.approx(0.5)


def test_load_rows_hold_median_p99_and_throughput() -> None:
    answers = [made(0, [1, 2, 3, 4, 5]), made(0, [1, 3, 5, 7, 9])]
    assert throughput(answers) == pytest.approx(10 / 9)
    rows, median, p99, rate = load_rows("case", answers, (0.2, 0.3), Row("load", "", 2, 100, "sparse", 1.0, None, 7))
    assert (median, p99, rate) == (1.5, pytest.approx(1.99), pytest.approx(10 / 9))
    assert [row.case for row in rows] == [
        "case, TPOT median",
        "case, TPOT p99",
        "case, time per token of any request",
    ]
    assert [row.ms for row in rows] == [1500, pytest.approx(1990), pytest.approx(900)]
    assert {(row.kept, row.bytes_read, row.impl) for row in rows} == {(0.2, 7, "sparse")}


def test_percentiles() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile([1, 2], 0.5) == 1.5
    assert percentile([5], 0.99) == 5
    assert percentile(list(range(101)), 0.99) == pytest.approx(99)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_agreement_of_answers() -> None:
    equal, same, before = agreement([[1, 2, 3, 4], [1, 2, 3, 4]], [[1, 2, 3, 4], [1, 9, 3, 9]])
    assert (equal, same, before) == (0.75, 0.5, 5 / 8)


def test_shares_between_two_readings() -> None:
    early = ReadTotals(kept=0.5, bytes_read=0.7, tokens=1000, blocks=100)
    late = ReadTotals(kept=0.3, bytes_read=0.45, tokens=4000, blocks=400)
    kept, read = late.since(early)
    assert kept == pytest.approx((0.3 * 400 - 0.5 * 100) / 300)
    assert read - kept == pytest.approx((0.15 * 4000 - 0.2 * 1000) / 3000)
    assert late.since(None) == (pytest.approx(0.3), pytest.approx(0.45))
    assert late.since(late) is None

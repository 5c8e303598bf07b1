"""The live view: what it computes from two readings, what it prints, and one line for everything that can be wrong."""

from __future__ import annotations

import io
import json
import re
import socket
from threading import Thread
from typing import Any

import pytest
from fake_sparse_server import block, fake_server, metrics
from rich.console import Console

from sglang_sparse.top.__main__ import main
from sglang_sparse.top.view import screen

AUDIT = {
    "samples": 7,
    "mean_coverage": 0.91,
    "worst_layer": 1,
    "by_layer": {"0": {"mean": 0.95}, "1": {"mean": 0.87}},
}
# 100 steps that kept half, then 300 that kept a fifth in layer 0 and everything in layer 1.
BEFORE = block(100, [[0.5, 0.5], [0.5, 0.5]])
AFTER = block(400, [[0.275, 0.275], [0.875, 0.875]], audit=AUDIT)


Capture = pytest.CaptureFixture[str]


def once(capsys: Capture, *blocks: Any, texts: tuple[str, ...] = (), **server: Any) -> dict[str, Any]:
    with fake_server(*blocks, metric_texts=texts, **server) as url:
        key = ["--api-key", server["key"]] if "key" in server else []
        assert main(["--url", url, "--once", "--json", "--interval", "0.2", *key]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_interval_is_what_lies_between_two_readings(capsys: Capture) -> None:
    found = once(capsys, BEFORE, AFTER, texts=(metrics(1.0, 3.0), metrics(1.5, 3.5)), key="secret")
    interval = found["interval"]
    assert interval["steps"] == 300
    assert interval["kept_fraction_by_layer"] == pytest.approx([0.2, 1.0])
    assert interval["kept_fraction"] == pytest.approx(0.6)
    assert interval["bytes_read_fraction"] == pytest.approx(0.7)
    assert interval["tokens_per_second"] == pytest.approx(300 / interval["seconds"])
    assert interval["time_shares"] == pytest.approx({"estimate": 0.5, "rest": 0.5})
    assert found["since_start"]["time_shares"] == pytest.approx({"estimate": 0.3, "rest": 0.7})
    assert found["since_start"]["kept_fraction"] == pytest.approx(0.575)
    assert (found["running_requests"], found["queued_requests"]) == (3, 1)
    assert found["coverage"] == {"samples": 7, "mean": 0.91, "worst_layer": 1, "by_layer": {"0": 0.95, "1": 0.87}}


def offloaded(hits: int, misses: int, direct: int, used: int | None = None) -> dict[str, Any]:
    forecast = None if used is None else {"used_bytes": used}
    return {
        "hits": hits,
        "misses": misses,
        "direct": direct,
        "evictions": 0,
        "missed_bytes": 1_000_000_000 * misses,
        "forecast": forecast,
    }


def test_hit_rates_of_an_offloaded_server(capsys: Capture) -> None:
    kept = [[0.5, 0.5], [0.5, 0.5]]
    before = block(100, kept, offload=offloaded(90, 10, 10))
    found = once(capsys, before, block(400, kept, offload=offloaded(1060, 40, 10)))
    assert found["since_start"]["offload"]["hit_rate"] == pytest.approx(1060 / 1100)
    interval = found["interval"]["offload"]
    assert (interval["hits"], interval["misses"], interval["direct"]) == (970, 30, 0)
    assert (interval["hit_rate"], interval["direct_share"], interval["hidden_share"]) == (0.97, 0, None)
    shown = drawn(found)
    assert re.search(r"97\.0% of the blocks in slots, [\d.]+ GB/s missed\n", shown)
    assert "from the host" not in shown

    forecast = block(400, kept, offload=offloaded(1060, 40, 20, used=10**10))
    found = once(capsys, block(400, kept, offload=offloaded(1060, 40, 20, used=10**10)), forecast)
    assert found["interval"]["offload"]["hit_rate"] is None
    assert found["since_start"]["offload"]["hidden_share"] == pytest.approx(0.2)
    assert "1.8% read from the host, 40.00 GB missed, 20% of misses hidden" in drawn(found)
    assert once(capsys, BEFORE, AFTER)["interval"]["offload"] is None
    assert "in slots" not in drawn(once(capsys, BEFORE, AFTER))


def drawn(summary: dict[str, Any]) -> str:
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(screen("http://x", summary))
    return console.export_text()


def test_layers_with_a_sliding_window_are_left_out(capsys: Capture) -> None:
    before, after = block(100, [[], [0.5, 0.5], []]), block(400, [[], [0.275, 0.275], []])
    found = once(capsys, before, after)
    assert found["interval"]["kept_fraction_by_layer"] == [None, pytest.approx(0.2), None]
    assert found["interval"]["kept_fraction"] == pytest.approx(0.2)
    assert once(capsys, block(0, []), after)["interval"]["kept_fraction_by_layer"] == [None, 0.275, None]
    console = Console(width=100, color_system=None, record=True, file=None)
    with console.capture() as capture:
        console.print(screen("http://host", found))
    rows = [line.split() for line in capture.get().splitlines() if line.split() and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == ["1"]
    assert "20.0%" in rows[0]


def test_the_first_steps_of_a_server(capsys: Capture) -> None:
    found = once(capsys, block(0, []), AFTER)
    assert found["interval"]["kept_fraction_by_layer"] == pytest.approx([0.275, 0.875])
    assert found["running_requests"] is None
    assert found["since_start"]["time_shares"] is None


def test_a_server_that_does_nothing(capsys: Capture) -> None:
    found = once(capsys, AFTER, AFTER)
    assert found["interval"]["steps"] == 0
    assert found["interval"]["tokens_per_second"] == 0
    assert found["interval"]["kept_fraction"] is None
    assert found["since_start"]["steps"] == 400


def test_a_server_that_started_anew_has_no_interval(capsys: Capture) -> None:
    assert once(capsys, AFTER, BEFORE)["interval"] is None


def test_the_screen(capsys: Capture) -> None:
    found = once(capsys, BEFORE, AFTER, texts=(metrics(1.0, 3.0),))
    console = Console(width=100, color_system=None, record=True, file=None)
    with console.capture() as capture:
        console.print(screen("http://host", found))
    text = capture.get()
    assert "gamma 0.9" in text
    assert "0.910 in 7 audited steps, worst in layer 1" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()}
    assert "20.0%" in rows["0"]
    assert "0.950" in rows["0"]
    assert rows["1"].count("█") > 4 * rows["0"].count("█")
    # A layer that falls short by more than the margin stands out.
    spans = Console(width=100, color_system="standard", force_terminal=True)
    with spans.capture() as capture:
        spans.print(screen("http://host", found))
    assert re.findall(r"\x1b\[31m *([\d.]+)", capture.get()) == ["0.870"]


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        ({"enabled": True, "gamma": None}, "gamma by layer"),
        ({"enabled": True, "gamma": 0.7}, "gamma 0.7"),
        ({"enabled": False, "gamma": None}, "switched off"),
    ],
)
def test_settings_that_were_changed_while_the_server_ran(
    capsys: Capture, control: dict[str, Any], expected: str
) -> None:
    started = {**AFTER["options"], "gamma_by_layer": [0.9, 0.8]}
    with fake_server({**AFTER, "options": started, "control": control}) as url:
        assert main(["--url", url, "--once", "--interval", "0.1"]) == 0
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("steps", [0, 5])
def test_a_screen_without_audit_metrics_or_steps(steps: int) -> None:
    with fake_server(block(steps, [[0.5, 0.5]] if steps else [])) as url:
        assert main(["--url", url, "--once", "--interval", "0.1"]) == 0


def refused(capsys: Capture, *arguments: str) -> str:
    """The one line on stderr of a command that fails."""
    try:
        code = main([*arguments, "--once", "--interval", "0.1"])
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_no_server(capsys: Capture, free_port: int) -> None:
    assert "no server answers at" in refused(capsys, "--url", f"127.0.0.1:{free_port}")


def test_a_dense_server(capsys: Capture) -> None:
    with fake_server(None) as url:
        assert "decodes densely: start it with --sparse-decode" in refused(capsys, "--url", url)


def test_a_server_that_cannot_report(capsys: Capture) -> None:
    with fake_server({"error": "out\nof memory"}) as url:
        assert "cannot report: out of memory" in refused(capsys, "--url", url)


def test_a_server_with_a_key(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    with fake_server(AFTER, key="secret") as url:
        assert "give it with --api-key" in refused(capsys, "--url", url)
        monkeypatch.setenv("SGLANG_API_KEY", "secret")
        assert main(["--url", url, "--once", "--json", "--interval", "0.1"]) == 0


def test_another_service(capsys: Capture) -> None:
    with fake_server(AFTER) as url:
        assert "HTTP 404: check --url" in refused(capsys, "--url", f"{url}/somewhere")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH-2.0"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", "IncompleteRead"),
        (b"", "without response"),
    ],
)
def test_a_port_that_speaks_no_http(capsys: Capture, answer: bytes, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        Thread(target=serve, daemon=True).start()
        message = refused(capsys, "--url", f"http://127.0.0.1:{server.getsockname()[1]}")
    assert "no server answers at" in message
    assert reason in message


def test_a_server_with_another_release_of_the_plugin(capsys: Capture) -> None:
    with fake_server({key: value for key, value in AFTER.items() if key != "blocks"}) as url:
        assert "reports no blocks: use the sglang-sparse release" in refused(capsys, "--url", url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://"], "--url is 'http://'"),
        (["--url", "ftp://host"], "--url is 'ftp://host'"),
        (["--url", "http://host:port"], "no server answers at http://host:port (nonnumeric port"),
        (["--url", "http://a b"], "no server answers at http://a b (URL can't contain control characters"),
        (["--url", "http://[::1"], "no server answers at http://[::1 (Invalid IPv6 URL"),
        (["--interval", "0"], "--interval is 0"),
        (["--interval", "nan"], "--interval is nan"),
        (["--interval", "soon"], "--interval"),
    ],
)
def test_bad_arguments(capsys: Capture, arguments: list[str], message: str) -> None:
    code: Any
    try:
        code = main([*arguments, "--once"])
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_json_needs_once(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--json"])
    assert capsys.readouterr().err == "error: --json prints once: add --once\n"


def test_the_live_view_goes_on_until_it_is_interrupted(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("sglang_sparse.top.__main__.time.sleep", sleep)
    with fake_server(BEFORE, AFTER) as url:
        assert main(["--url", url, "--interval", "0.5"]) == 0
    assert waits == [0.5] * 3
    shown = capsys.readouterr().out
    assert "nothing decoded: since the start" in shown
    assert "last interval" in shown


def test_the_live_view_ends_with_one_line_when_the_server_goes(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sglang_sparse.top.__main__.time.sleep", lambda seconds: None)
    with fake_server(BEFORE, None) as url:
        assert main(["--url", url]) == 1
    assert capsys.readouterr().err.endswith("decodes densely: start it with --sparse-decode\n")


def test_the_live_view_needs_a_terminal(capsys: Capture) -> None:
    with fake_server(AFTER) as url:
        assert main(["--url", url]) == 1
    assert "needs a terminal: use --once" in capsys.readouterr().err

"""That a soak tells what a rounding chose from what is wrong: by scripted answers, and by a server with faults."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soak_border
import soak_server
from random_model import write_random_model
from soak_client import Answer, Outcome, Settings
from soak_forced import _BIAS, MARGIN, force
from soak_part import Part
from soak_plan import SCALES, Request
from soak_replay import Tally, _judge, replay

from sglang_sparse import cpu, sglang_compat

SHORT = SCALES["short"]
FEW = 6
"""Draws for what is wrong, with any number of them: each takes a second."""
OWN = -1
"""The draw of weights that are not moved."""
Behind = Callable[[int, bool, int], list[float]]
"""How far each token is behind, with a draw, with all blocks read or not, and when asked for the n-th time."""


class Scripted:
    """A server that has all tokens which it is given as far behind as a function says."""

    def __init__(self, behind: Behind) -> None:
        self.draw, self._asked, self._behind = OWN, 0, behind

    def post(self, path: str, body: dict[str, Any]) -> Any:
        content = {}
        if path == "/update_weights_from_disk":
            self.draw = int(body["model_path"])
        elif path == "/generate":
            self._asked += 1
            params = body["sampling_params"]["custom_params"]
            dense = params.get("sparse_decode", {}).get("dense", False)
            rows = [[[_BIAS, 7], [gap, 8], [-30.0, 9]] for gap in self._behind(self.draw, dense, self._asked)]
            content = {"output_ids": params["forced"], "meta_info": {"output_top_logprobs": rows}}
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: content)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., soak_border.Verdict]:
    def judged(behind: Behind, custom: dict[str, Any] | None = None, prompt: int = 100) -> soak_border.Verdict:
        server = Scripted(behind)
        part = Part(Request(0, (1,) * prompt, 4, 0, custom=custom), Settings(), (1,) * prompt, (7, 7, 7, 7))
        verdict = soak_border.judge(server, part, force(server, part, part.expected), SHORT)
        assert server.draw == OWN
        return verdict

    monkeypatch.setattr(soak_server, "model_path", lambda server: OWN)
    monkeypatch.setattr(soak_border, "move", lambda model, folder, draw: draw)
    return judged


def on_border(draw: int, dense: bool, asked: int) -> list[float]:
    """The third token is wrong by .5 nats, but for draws from 5 on."""
    return [-2.0, -2.0, -0.5 if draw >= 5 or dense else 0.5, -1.0]


def test_what_a_rounding_of_the_weights_chooses_is_a_border(judge: Any) -> None:
    verdict = judge(on_border)
    assert verdict.is_border
    assert "draw 5" in verdict.found


@pytest.mark.parametrize(
    ("what", "behind"),
    [
        ("so with 24 draws", lambda draw, dense, asked: [-2, -2, 0.5, -1]),
        # On the border, and wrong after it.
        ("so with 24 draws", lambda *args: [*on_border(*args)[:3], 0.3]),
        # Another draw for each of two tokens.
        ("so with 24 draws", lambda draw, *_: [-2, 0.4 if draw != 3 else -1, 0.5 if draw != 5 else -1, -1]),
        # Nearer, but not the best.
        ("so with 24 draws", lambda draw, *_: [-2, -2, 0.5 if draw == OWN else MARGIN / 2, -1]),
        ("not steady", lambda draw, dense, asked: [*on_border(draw, dense, asked)[:3], -1 - asked / 1000]),
        # A draw that gives it once, and not again.
        ("so with 24 draws", lambda draw, dense, asked: [-2, -2, -0.5 if asked == 9 else 0.5, -1]),
        ("no rounding", lambda draw, dense, asked: [*on_border(draw, dense, asked)[:3], -1 - 0.01 * (draw + 1)]),
        ("no blocks were chosen", lambda draw, dense, asked: [0.5 if draw < 5 else -0.5, -2, -2, -1]),
    ],
)
def test_what_is_wrong_stays_wrong(judge: Any, what: str, behind: Behind) -> None:
    verdict = judge(behind)
    assert not verdict.is_border
    assert what in verdict.found


@pytest.mark.parametrize(("custom", "prompt"), [({"dense": True}, 100), ({"gamma": 1.0}, 100), (None, 20)])
def test_there_is_no_border_where_all_blocks_are_read(judge: Any, custom: dict[str, Any] | None, prompt: int) -> None:
    verdict = judge(lambda draw, *_: on_border(draw, False, 0), custom, prompt)
    assert not verdict.is_border
    assert "no blocks were chosen" in verdict.found


@pytest.mark.parametrize(
    ("in_round", "in_all", "tokens", "problems"),
    [(0, 0, 0, 0), (1, 1, 50, 0), (2, 2, 100_000, 1), (1, 2, 99_999, 1), (1, 2, 100_000, 0), (2, 5, 323_035, 2)],
)
def test_requests_on_a_border_are_few(in_round: int, in_all: int, tokens: int, problems: int) -> None:
    assert len(soak_border.too_many(in_round, in_all, tokens)) == problems


@pytest.mark.parametrize(("is_border", "looked_into"), [(False, 1), (True, 2)])
def test_a_soak_that_has_failed_looks_into_no_more(
    monkeypatch: pytest.MonkeyPatch, is_border: bool, looked_into: int
) -> None:
    calls: list[Part] = []

    def judge(server: Any, part: Part, *_: Any) -> soak_border.Verdict:
        calls.append(part)
        return soak_border.Verdict(is_border, "")

    monkeypatch.setattr(soak_border, "judge", judge)
    server, tally = Scripted(on_border), Tally()
    for number in range(4):
        part = Part(Request(number, (number,) * 100, 4, 0), Settings(), (number,) * 100, (7, 7, 7, 7))
        _judge(server, [(part,)], {}, tally, SHORT)
    assert len(calls) == looked_into
    assert len(tally.wrong) == 4 - len(tally.borders)


PLUGIN = """
import os
from pathlib import Path

FILE = Path(os.environ["SOAK_FAULT"])

def register():
    from sglang_sparse import decode_step
    from sglang_sparse.summaries import PageSummaries

    attend, update = decode_step.sparse_attention, PageSummaries.update

    def faulty_attention(q, k_pool, v_pool, page_table, seq_lens, lists, counts, **rest):
        fault = FILE.read_text()
        if fault == "missing block" and lists is not None:
            lists, counts = lists.roll(-1, -1), counts - 1
        if fault == "wrong page":
            page_table = page_table.clone()
            page_table[:, 1] = page_table[:, 2]
        return attend(q, k_pool, v_pool, page_table, seq_lens, lists, counts, **rest)

    def faulty_update(self, layer, k_pool, v_pool, pages, *rest, **more):
        if FILE.read_text() != "stale summary":
            update(self, layer, k_pool, v_pool, pages, *rest, **more)

    decode_step.sparse_attention, PageSummaries.update = faulty_attention, faulty_update
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a plugin that makes the fault which the file `fault` names."""
    folder = tmp_path_factory.mktemp("border")
    (folder / "fault").write_text("")
    (folder / "faults_of_a_soak.py").write_text(PLUGIN)
    installed = folder / "faults_of_a_soak-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: faults-of-a-soak\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaults = faults_of_a_soak:register\n")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Any]:
    if sglang_compat.is_patched():
        pytest.skip("faults are a plugin, of which a patched SGLang has none")
    inherited = cpu.environment().get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(entry for entry in (str(folder), inherited) if entry)
    model, fault = write_random_model(folder / "model"), str(folder / "fault")
    log = folder / "server.log"
    with soak_server.start(model, "resident", log, SHORT, PYTHONPATH=path, SOAK_FAULT=fault) as running:
        yield running


def answer(server: Any, request: Request) -> list[int]:
    soak_server.flush(server)
    response = server.post("/generate", request.body("") | {"rid": None})
    response.raise_for_status()
    ids: list[int] = response.json()["output_ids"]
    return ids


def checked(server: Any, request: Request, ids: list[int]) -> Tally:
    return replay(server, [Outcome(request, Settings(), Settings(), answers=[Answer(ids)])])


def asked(seed: int, gamma: float = 0.9, tokens: int = 12) -> Request:
    draw = random.Random(seed)
    prompt = tuple(draw.randrange(256) for _ in range(546))
    return Request(seed, prompt, tokens, 0, custom={"gamma": gamma})


@pytest.mark.server
@pytest.mark.parametrize(("seed", "fault"), [(1, "missing block"), (2, "wrong page"), (3, "stale summary")])
def test_a_fault_of_the_server_is_wrong(
    server: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, fault: str
) -> None:
    """Each with another prompt: a stale summary is that of the one before."""
    monkeypatch.setattr(soak_border, "DRAWS", FEW)
    answer(server, asked(100 + seed))
    request = asked(seed)
    (folder / "fault").write_text(fault)
    try:
        served = answer(server, request)
    finally:
        (folder / "fault").write_text("")
    assert served != answer(server, request)
    tally = checked(server, request, served)
    assert (len(tally.wrong), tally.border_prompts) == (1, set())
    assert f"{FEW} draws" in tally.wrong[0]
    assert not checked(server, request, answer(server, request)).wrong


@pytest.mark.server
def test_an_answer_on_a_border_is_told_from_a_wrong_one(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The border is that of what is read: gammas next to each other, with other tokens."""
    low, high = 0.6, 0.9
    below, above = answer(server, asked(2, low)), answer(server, asked(2, high))
    while high - low > 1e-7:
        middle = (low + high) / 2
        tokens = answer(server, asked(2, middle))
        low, high, above = (middle, high, above) if tokens == below else (low, middle, tokens)
    assert below != above
    request = asked(2, low)
    tally = checked(server, request, above)
    assert (tally.wrong, tally.border_prompts, tally.exempt) == ([], {request.ids}, 0)
    assert 1 <= tally.border_tokens < len(above)
    assert "draw" in tally.borders[0]

    # Another token there, or after it, is none that a rounding chose.
    monkeypatch.setattr(soak_border, "DRAWS", FEW)
    first = next(place for place, pair in enumerate(zip(below, above, strict=True)) if pair[0] != pair[1])
    for place in {first, len(above) - 1}:
        wrong = [(token + (number == place)) % 256 for number, token in enumerate(above)]
        tally = checked(server, request, wrong)
        assert (len(tally.wrong), tally.border_prompts) == (1, set())

"""Soaks one server: rounds of mixed requests in a KV pool that is too small, and checks of the quiet server after each.

    python tests/soak/soak_run.py --requests 10000 --minutes 60 --mode resident --json soak.json

A failure prints the seed and the round, which `--seed` and `--first-round` replay: what is asked is then the same, when
it is asked is not, to the millisecond.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = [str(path) for path in (TESTS / "soak", TESTS / "server", TESTS, TESTS.parent)]
sys.path[:0] = [path for path in FOLDERS if path not in sys.path]

import harness  # noqa: E402
import requests  # noqa: E402
import soak_border  # noqa: E402
import soak_server  # noqa: E402
from random_model import write_random_model  # noqa: E402
from soak_client import Client, Outcome, Settings  # noqa: E402
from soak_plan import SCALES, Event, plan  # noqa: E402
from soak_replay import Tally, replay  # noqa: E402
from soak_report import Report, line, write  # noqa: E402

IN_FLIGHT = 14
"""More than run at once: some wait in the queue."""
MEMORY_GROWTH = 0.1
"""Largest share by which resident memory may grow from the second quarter of the rounds to the last."""
EXEMPT_SHARE = 0.1 if harness.SURE else 0.01
"""On a GPU a random model, in 16 bits, is near a tie every few dozen tokens."""
ROUND = 80


class Soak:
    """Rounds against one running server."""

    def __init__(self, server: Any, mode: str, seed: int, scale: str = "short") -> None:
        self.server = server
        self.report = Report(mode, scale, seed)
        self._scale = SCALES[scale]
        self._round = 0

    def run_round(self, number: int, size: int) -> list[Outcome]:
        """One round and its checks; returns what was asked and answered. A failure is noted in the report."""
        self._round = number
        before = soak_server.Counts.read(self.server)
        outcomes = self._serve(number, size)
        self._count(outcomes)
        self._check_idle()
        after = soak_server.Counts.read(self.server)
        self.report.evicted_tokens += after.evicted_tokens - before.evicted_tokens
        self.report.retractions += after.retractions - before.retractions
        soak_server.flush(self.server)
        self._note(soak_server.problems(self.server.idle_info()["self_check"], idle=True))
        self._add(replay(self.server, outcomes, self._scale))
        self._check_idle()
        self.report.memory_mib.append(round(soak_server.memory(self.server), 1))
        self._note(soak_server.complaints(self.server)[:3])
        self.report.rounds += 1
        return outcomes

    def finish(self) -> Report:
        """The report, with what only the whole soak shows."""
        report, memory = self.report, self.report.memory_mib
        quarter = len(memory) // 4
        if quarter >= 2:
            early, late = (sorted(part)[quarter // 2] for part in (memory[quarter : 2 * quarter], memory[-quarter:]))
            if late > early * (1 + MEMORY_GROWTH):
                self._note([f"resident memory grew from {early:.0f} to {late:.0f} MiB"])
        if report.exempt_tokens > EXEMPT_SHARE * max(1, report.checked_tokens):
            self._note([f"{report.exempt_tokens} of {report.checked_tokens} tokens are exempt"])
        return report

    def _serve(self, number: int, size: int) -> list[Outcome]:
        client = Client(self.server.url, f"soak-{self.report.seed}-{number}")
        slots = threading.Semaphore(IN_FLIGHT)
        sent: list[Future[Outcome]] = []

        def send(request: Any) -> Outcome:
            try:
                return client.send(request)
            finally:
                slots.release()

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            for step in plan(self.report.seed, number, size, self._scale):
                if isinstance(step, Event):
                    self._happen(step, client)
                    continue
                slots.acquire()
                sent.append(pool.submit(send, step))
            return [future.result() for future in sent]

    def _happen(self, event: Event, client: Client) -> None:
        post, report = self.server.post, self.report
        if event.kind == "flush":
            # SGLang refuses it while requests run.
            post("/flush_cache", {})
            report.flush_attempts += 1
        elif event.kind == "look":
            self._note(soak_server.problems(self.server.sparse_info()["self_check"], idle=False))
            report.self_checks += 1
        elif event.kind == "change":
            old = client.settings
            client.settings = dataclasses.replace(old, era=old.era + 1, is_changing=True)
            post("/sparse_decode", event.change).raise_for_status()
            new = {"gamma": old.gamma, "enabled": old.enabled} | event.change
            client.settings = Settings(old.era + 2, new["gamma"], new["enabled"])
            report.changes += 1
        else:
            client.aborts_begun += event.mode == "abort"
            post("/pause_generation", {"mode": event.mode}).raise_for_status()
            time.sleep(event.seconds)
            post("/continue_generation", {}).raise_for_status()
            client.aborts_over = client.aborts_begun
            report.pauses += 1

    def _count(self, outcomes: list[Outcome]) -> None:
        report = self.report
        report.requests += len(outcomes)
        for outcome in outcomes:
            ending = outcome.request.ending
            report.refused += ending == "refused" and outcome.status == 400
            report.disconnected += ending == "disconnect" and not outcome.was_ended
            report.aborted += outcome.was_ended
            report.prefix_hits += any(answer.cached_tokens for answer in outcome.answers)
            if outcome.failure:
                self._note([f"request {outcome.request.number} ({ending}): {outcome.failure}"])

    def _check_idle(self) -> None:
        found = soak_server.problems(self.server.idle_info()["self_check"], idle=True)
        self.report.leaks += sum("leaked" in problem for problem in found)
        self.report.self_checks += 1
        self._note(found)

    def _add(self, tally: Tally) -> None:
        report = self.report
        report.checked_answers += tally.answers
        report.checked_tokens += tally.tokens
        report.unchecked_answers += tally.unchecked_answers
        report.exempt_tokens += tally.exempt
        report.wrong_tokens += tally.wrong_tokens
        self._note(tally.wrong)
        report.border_tokens += tally.border_tokens
        report.border_requests += len(tally.border_prompts)
        report.borders += map(self._placed, tally.borders)
        self._note(soak_border.too_many(len(tally.border_prompts), report.border_requests, report.checked_tokens))

    def _note(self, failures: list[str]) -> None:
        self.report.failures += map(self._placed, failures)

    def _placed(self, found: str) -> str:
        return f"seed {self.report.seed}, round {self._round}: {found}"


def run(
    model: Path,
    log: Path,
    *,
    mode: str,
    scale: str,
    seed: int,
    requests_wanted: int,
    seconds: float,
    first_round: int = 0,
    round_size: int = ROUND,
    json_file: Path | None = None,
) -> Report:
    """Rounds until there were `requests_wanted` requests, `seconds` have passed, or something failed.

    `json_file` gets the counts after each round: a soak that is ended leaves them.
    """
    began = time.monotonic()
    with soak_server.start(model, mode, log, SCALES[scale]) as server:
        soak = Soak(server, mode, seed, scale)
        number = first_round
        while soak.report.requests < requests_wanted and not soak.report.failures:
            if time.monotonic() - began > seconds and soak.report.rounds:
                break
            try:
                soak.run_round(number, min(round_size, requests_wanted - soak.report.requests))
            except (requests.RequestException, AssertionError) as error:
                soak._note([f"{type(error).__name__}: {error}", server.tail(20)])
            number += 1
            soak.report.seconds = round(time.monotonic() - began, 1)
            print(line(soak.report), flush=True)
            if json_file:
                write(soak.report, json_file)
        report = soak.finish()
    if json_file:
        write(report, json_file)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument("--first-round", type=int, default=0, help="the round to begin with")
    parser.add_argument("--round-size", type=int, default=ROUND, help="requests a round; a replay needs the same")
    parser.add_argument("--mode", choices=list(soak_server.MODES), default="resident")
    parser.add_argument("--scale", choices=list(SCALES), default="short", help="length of prompts (default: short)")
    parser.add_argument("--json", type=Path, help="file that gets the counts, after each round")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    # As an interrupt does: the server has to be stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        report = run(
            write_random_model(Path(folder) / "model", max_position_embeddings=SCALES[args.scale].context),
            Path(folder) / "server.log",
            mode=args.mode,
            scale=args.scale,
            seed=seed,
            requests_wanted=args.requests,
            seconds=args.minutes * 60,
            first_round=args.first_round,
            round_size=args.round_size,
            json_file=args.json,
        )
    for name, value in dataclasses.asdict(report).items():
        if name not in ("borders", "failures", "memory_mib"):
            print(f"{name}: {value}")
    for border in report.borders:
        print(f"on a border: {border}")
    for failure in report.failures:
        print(f"FAILED: {failure}")
    if report.failures:
        same = f"--mode {args.mode} --scale {args.scale} --round-size {args.round_size}"
        print(f"again: {same} --seed {seed} --first-round N")
    return bool(report.failures)


if __name__ == "__main__":
    raise SystemExit(main())

"""What a server says about itself: the `sparse_decode` block of `/server_info`, and the timed layer of `/metrics`."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_SECONDS = 30.0
"""`/server_info` is answered between two steps, so a long prefill delays it."""

_KEYS = frozenset(
    """
    options summary_bytes steps decoded_tokens tokens blocks kept_fraction bytes_read_fraction
    kept_fraction_by_layer_and_head audit
    """.split()  # noqa: SIM905
)
# Labels may hold any text, such as a model's name with a brace.
_PHASE = re.compile(r'^sglang_sparse_timed_layer_seconds_total\{.*\bphase="(\w+)".*\} (\S+)$', re.MULTILINE)
_GAUGE = r"^sglang:{}(?:\{{.*\}})? (\S+)$"


class TopError(Exception):
    """The server cannot be shown. One line: why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """Totals since the server's start, at one moment."""

    seconds: float
    """By this process's monotonic clock."""
    model: str
    block: dict[str, Any]
    """The `sparse_decode` block of `/server_info`."""
    running: int | None
    """Requests that decode; None without `--enable-metrics`, as is what follows."""
    queued: int | None
    phase_seconds: dict[str, float] | None
    """Time of the timed layer, by phase."""


class Server:
    """A server's address.

    Args:
        url: `http://host:port`; one without a scheme is taken for http.
        api_key: of a server that was started with `--api-key`.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if not re.match(r"https?://[^/]", self.url):
            raise TopError(f"--url is {url!r}: give the server's address, such as http://127.0.0.1:30000")

    def read(self) -> Totals:
        """Asks the server; raises TopError if it does not answer or does not decode sparsely."""
        text = self._get("/server_info")
        now = time.monotonic()
        try:
            info = json.loads(text or "")
            states = info["internal_states"]
            state = states[0]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise TopError(f"{self.url}/server_info is not what an SGLang server answers: check --url") from None
        block = state.get("sparse_decode") if isinstance(state, dict) else None
        if not isinstance(block, dict):
            raise TopError(f"the server at {self.url} decodes densely: start it with --sparse-decode")
        if "error" in block:
            raise TopError(f"the server at {self.url} cannot report: {' '.join(str(block['error']).split())}")
        missing = _KEYS - set(block)
        if missing:
            raise TopError(
                f"the server at {self.url} reports no {', '.join(sorted(missing))}: "
                "use the sglang-sparse release that it runs"
            )
        metrics = self._get("/metrics", may_be_missing=True)
        phases: dict[str, float] = {}
        # Of each tensor-parallel rank.
        for name, value in _PHASE.findall(metrics or ""):
            phases[name] = phases.get(name, 0.0) + float(value)
        return Totals(
            seconds=now,
            model=str(info.get("served_model_name") or info.get("model_path") or "unknown"),
            block=block,
            running=_gauge(metrics, "num_running_reqs"),
            queued=_gauge(metrics, "num_queue_reqs"),
            phase_seconds=phases or None,
        )

    def _get(self, path: str, may_be_missing: bool = False) -> str | None:
        try:
            request = urllib.request.Request(self.url + path, headers=self._headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                return response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise TopError(f"the server at {self.url} wants a key: give it with --api-key") from None
            if may_be_missing:
                return None
            raise TopError(f"{self.url}{path} answers HTTP {error.code}: check --url and the server's log") from None
        except TimeoutError:
            raise TopError(
                f"{self.url} does not answer within {TIMEOUT_SECONDS:g} s: it may be loading a model or be stuck"
            ) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = " ".join(str(getattr(error, "reason", error)).split())
            raise TopError(f"no server answers at {self.url} ({reason}): start it, or give its --url") from None


def _gauge(metrics: str | None, name: str) -> int | None:
    values = re.findall(_GAUGE.format(name), metrics or "", re.MULTILINE)
    return round(sum(map(float, values))) if values else None

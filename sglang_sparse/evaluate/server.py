"""What a running OpenAI-compatible server says about itself: its model and how many tokens a request may have."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from sglang_sparse.evaluate.files import EvaluationError

RESERVED = 8
"""Tokens of the context that SGLang keeps for itself: with fewer left it would shorten the answer in silence."""

TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class Server:
    """`context`: tokens, prompt and answer together, that one request may have."""

    url: str
    model: str
    context: int
    info: dict[str, Any]

    @classmethod
    def at(cls, url: str, model: str | None = None, context: int | None = None) -> Server:
        """Asks the server at `url`; `model` and `context` win over what it says."""
        url = url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise EvaluationError(f"--base-url: {url} does not start with http:// or https://")
        listing = get(url, "/v1/models")
        models = [entry for entry in (listing or {}).get("data", []) if isinstance(entry, dict) and "id" in entry]
        names = [entry["id"] for entry in models]
        if not names:
            raise EvaluationError(f"--base-url: {url}/v1/models lists no model: is this an OpenAI-compatible server?")
        if model is not None and model not in names:
            raise EvaluationError(f"--model: the server has {', '.join(names)}, not {model}")
        name = model or names[0]
        info = get(url, "/server_info", optional=True) or {}
        limits = [
            models[names.index(name)].get("max_model_len"),
            info.get("context_length"),
            # The KV cache can be smaller than the context: SGLang then refuses or shortens longer requests too.
            info.get("max_total_num_tokens"),
            context,
        ]
        known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
        if not known:
            raise EvaluationError("the server does not say how long its context is: give it with --context")
        return cls(url, name, min(known), info)

    def check_room(self, needed: int, what: str) -> None:
        """Raises unless a request of `needed` tokens, answer included, fits."""
        if needed + RESERVED > self.context:
            raise EvaluationError(
                f"--lengths: {what} needs {needed} tokens with its answer, and {RESERVED} are kept back, but a request "
                f"to this server may have {self.context}: give it a larger --context-length or KV cache, or leave out "
                f"the length"
            )

    def report(self) -> dict[str, Any]:
        """What identifies the server in a result file: how it decodes, and how much was read until now."""
        try:
            info = get(self.url, "/server_info", optional=True) or {}
        except EvaluationError:
            # All answers are there by now: they are worth more than this.
            info = {}
        states = [state for state in info.get("internal_states") or [] if isinstance(state, dict)]
        sparse = [state["sparse_decode"] for state in states if "sparse_decode" in state]
        return {"version": info.get("version"), "context": self.context, "sparse_decode": sparse or None}


def get(url: str, path: str, optional: bool = False) -> Any:
    """The JSON object at `path`; if `optional`, None where the server has none."""
    # As lm-eval's client does it: never through a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url + path, timeout=TIMEOUT_SECONDS) as response:
            content = json.load(response)
    except urllib.error.HTTPError as error:
        if optional:
            return None
        raise EvaluationError(f"--base-url: {url}{path} answers {error.code} {error.reason}") from error
    except (ValueError, RecursionError) as error:
        if optional:
            return None
        raise EvaluationError(f"--base-url: {url}{path} does not answer with JSON") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise EvaluationError(f"--base-url: no server answers at {url} ({reason}): start it first") from error
    if not isinstance(content, dict):
        raise EvaluationError(f"--base-url: {url}{path} does not answer with a JSON object")
    return content

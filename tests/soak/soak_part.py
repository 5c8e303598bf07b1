"""Parts of answers: what a quiet server is asked for again."""

from __future__ import annotations

import dataclasses
from typing import Any

from soak_client import Settings
from soak_plan import Request, Scale


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Tokens that a request got between two prefills."""

    request: Request
    settings: Settings
    prompt: tuple[int, ...]
    expected: tuple[int, ...]

    def slots(self, scale: Scale) -> int:
        return -(-(len(self.prompt) + len(self.expected)) // scale.page_size) * scale.page_size

    def body(self, tokens: int) -> dict[str, Any]:
        """What `/generate` is asked."""
        whole = dataclasses.replace(self.request, ids=self.prompt, tokens=tokens, stream=False, n=1)
        body = whole.body("")
        del body["rid"]
        return body

    def selects(self, position: int, scale: Scale) -> bool:
        """Whether blocks were chosen for a token of it: not for the first, which is a prefill's."""
        own = self.request.custom or {}
        gamma = own.get("gamma", self.settings.gamma)
        is_sparse = self.settings.enabled and not own.get("dense") and gamma != 1
        return is_sparse and position > 0 and len(self.prompt) + position >= scale.min_context

    def __str__(self) -> str:
        request = self.request
        return f"request {request.number} (prompt {len(request.ids)}, {request.custom}, {self.settings})"

    def number(self, position: int) -> int:
        """The place in the whole answer of a token of the part."""
        return len(self.prompt) - len(self.request.ids) + position

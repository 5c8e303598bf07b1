"""Asks a quiet server for an answer with given tokens, and how far each of them is behind the best.

Each decode step reads the keys and values that the steps before it made of the given tokens, as it would in an answer
with these tokens: so every token of an answer is compared, also those after one that is another.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import dill
import harness
import soak_server
from soak_part import Part

MARGIN = max(1e-3, harness.SURE)
"""Nats between the two best tokens below which rounding may choose the second."""
_BIAS = 256.0
"""More than logits of a random model differ by; float32 then keeps 3e-5 of them."""


def _processor() -> str:
    """SGLang's form of a custom logit processor, which prefers the request's own `custom_params.forced`."""

    class Force:
        def __call__(self, logits: Any, custom_param_list: Any) -> Any:
            for row, params in zip(logits, custom_param_list, strict=True):
                request = params["__req__"]
                # Below 0 before the last chunk of a prefill; one step too many runs before the end is known.
                step = request.kv_committed_len - len(request.origin_input_ids)
                if 0 <= step < len(params["forced"]):
                    row[params["forced"][step]] += params["bias"]
            return logits

    # By value: the server does not know this module.
    return json.dumps({"callable": dill.dumps(Force, recurse=True).hex()})


_PROCESSOR = _processor()


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of an answer, at its place."""

    id: int
    rival: int
    """The best of all other tokens."""
    behind: float
    """Nats by which the token is behind its rival; below 0 if it is the best."""
    is_second: bool

    @property
    def is_best(self) -> bool:
        return self.behind <= 0

    @property
    def is_exempt(self) -> bool:
        """Whether the best two are so near that rounding may choose."""
        return not self.is_best and self.behind <= MARGIN and self.is_second

    @property
    def is_apart(self) -> bool:
        return not self.is_best and not self.is_exempt


def force(server: Any, part: Part, ids: Sequence[int], *, dense: bool = False) -> list[Token]:
    """The tokens `ids` of a part, asked for alone on an empty cache; `dense` reads all blocks."""
    soak_server.flush(server)
    body = part.body(len(ids))
    custom: dict[str, Any] = body["sampling_params"].setdefault("custom_params", {})
    custom |= {"forced": list(ids), "bias": _BIAS} | ({"sparse_decode": {"dense": True}} if dense else {})
    body |= {"custom_logit_processor": _PROCESSOR, "return_logprob": True, "top_logprobs_num": 3}
    response = server.post("/generate", body)
    response.raise_for_status()
    answer = response.json()
    assert answer["output_ids"] == list(ids), f"{ids} were not taken: {answer['output_ids']}"
    tokens = []
    for token, (given, rival, third) in zip(ids, answer["meta_info"]["output_top_logprobs"], strict=True):
        own = given[0] - _BIAS
        tokens.append(Token(token, rival[1], rival[0] - own, own >= third[0]))
    return tokens

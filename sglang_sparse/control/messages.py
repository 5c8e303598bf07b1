"""Our message to the scheduler processes, which travels as SGLang's own control messages do: ZMQ, msgspec, each rank.

The tokenizer process sends `SparseDecodeReqInput` through a communicator of its own; the scheduler that receives it
hands it to its other ranks, and each applies it before its next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import BaseReq, hook_custom_types
from sglang.utils import TypeBasedDispatcher

from sglang_sparse.control.values import Change

logger = logging.getLogger(__name__)

_COMMUNICATOR = "sparse_decode_communicator"


class SparseDecodeReqInput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """Asks a scheduler for its state, after noting `changes` (checked) for its next step."""

    changes: dict[str, bool | int | float | None]


class SparseDecodeReqOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """A scheduler's answer: its state, or what went wrong."""

    state: dict[str, Any]
    error: str | None = None


def register_types() -> None:
    """Makes SGLang's message decoder know the messages; for each process that receives one."""
    hook_custom_types(SparseDecodeReqInput, SparseDecodeReqOutput)


def connect_tokenizer(manager: Any) -> None:
    """Gives SGLang's TokenizerManager, once it has its own communicators, the one that `exchange` uses."""
    # As many schedulers answer as those that SGLang asks for their state.
    schedulers = manager.get_internal_state_communicator._fan_out
    communicator: FanOutCommunicator = FanOutCommunicator(manager._dispatch_to_scheduler, schedulers)
    setattr(manager, _COMMUNICATOR, communicator)
    manager._result_dispatcher += TypeBasedDispatcher([(SparseDecodeReqOutput, communicator.handle_recv)])


def connect_scheduler(scheduler: Any, answer: Callable[[dict[str, Change]], dict[str, Any]]) -> None:
    """Makes SGLang's Scheduler pass the messages to `answer`, which notes changes and returns the state."""

    def handle(request: SparseDecodeReqInput) -> SparseDecodeReqOutput:
        try:
            return SparseDecodeReqOutput(state=answer(dict(request.changes)))
        except Exception as error:
            # An exception here would end the scheduler.
            logger.exception("a message of /sparse_decode failed")
            return SparseDecodeReqOutput(state={}, error=f"{type(error).__name__}: {error}")

    scheduler._request_dispatcher += TypeBasedDispatcher([(SparseDecodeReqInput, handle)])


async def exchange(manager: Any, changes: Mapping[str, Change]) -> dict[str, Any]:
    """Sends checked `changes`, or none, and returns the state that the scheduler answers with.

    Raises:
        RuntimeError: the scheduler could not answer.
    """
    manager.auto_create_handle_loop()
    answers = await getattr(manager, _COMMUNICATOR)(SparseDecodeReqInput(changes=dict(changes)))
    for answer in answers:
        if answer.error is not None:
            raise RuntimeError(answer.error)
    return answers[0].state

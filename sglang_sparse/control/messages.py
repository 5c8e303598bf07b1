"""Our message to the scheduler processes, which travels as SGLang's own control messages do: ZMQ, msgspec, each rank.

The tokenizer process sends `SparseDecodeReqInput` through a communicator of its own; the scheduler that receives it
hands it to its other ranks, as it does with requests, and each applies it before its next step. Each rank answers for
its own heads, straight to the tokenizer process, which puts the answers together: no rank waits for another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import BaseReq, hook_custom_types
from sglang.utils import TypeBasedDispatcher

from sglang_sparse import sglang_compat
from sglang_sparse.control.values import Change
from sglang_sparse.observe.ranks import RankState, merged

logger = logging.getLogger(__name__)

_CHANNEL = "sparse_decode_channel"

ANSWER_SECONDS = 120.0
"""How long ranks may take to answer: a scheduler looks at messages between two batches."""


class SparseDecodeReqInput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """Asks a scheduler for its state, after noting `changes` (checked) for its next step."""

    number: int
    """Comes back with each answer, so that a late one is not taken for that of the next question."""
    changes: dict[str, bool | int | float | None]
    reply_to: str
    """Where ranks send their answer that SGLang has given no way to the tokenizer process."""


class SparseDecodeReqOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """One rank's answer: its state, or what went wrong."""

    number: int
    rank: int
    kv_heads: list[int]
    """Which of the model's KV heads the state is of."""
    state: dict[str, Any]
    error: str | None = None


def register_types() -> None:
    """Makes SGLang's message decoder know the messages; for each process that receives one."""
    hook_custom_types(SparseDecodeReqInput, SparseDecodeReqOutput)


class _Channel:
    """Asks all schedulers of a server, one question after the other.

    Args:
        send: sends a message to the schedulers.
        schedulers: how many answer.
    """

    def __init__(self, send: Callable[[SparseDecodeReqInput], None], schedulers: int) -> None:
        self._communicator: FanOutCommunicator = FanOutCommunicator(send, schedulers)
        self._lock = asyncio.Lock()
        self._number = 0

    async def ask(self, changes: Mapping[str, Change], reply_to: str) -> list[SparseDecodeReqOutput]:
        """Raises RuntimeError if not all of them answer in time."""
        async with self._lock:
            self._number += 1
            question = SparseDecodeReqInput(number=self._number, changes=dict(changes), reply_to=reply_to)
            try:
                return await asyncio.wait_for(self._communicator(question), ANSWER_SECONDS)
            except TimeoutError:
                raise RuntimeError(f"not every rank answered within {ANSWER_SECONDS:g} s") from None

    def receive(self, answer: SparseDecodeReqOutput) -> None:
        if answer.number == self._number:
            self._communicator.handle_recv(answer)


def connect_tokenizer(manager: Any) -> None:
    """Gives SGLang's TokenizerManager, once it has its own communicators, the channel that `exchange` uses.

    Not that of a server without sparse decode, as an Engine may be that follows one with it in the same process.
    """
    if not sglang_compat.decodes_sparsely(manager.server_args):
        return
    ranks, states = sglang_compat.ranks_of(manager), manager.get_internal_state_communicator
    # SGLang hears of its state from the first rank of each group; here all of them answer.
    channel = _Channel(manager._dispatch_to_scheduler, states._fan_out * ranks)
    setattr(manager, _CHANNEL, channel)
    manager._result_dispatcher += TypeBasedDispatcher([(SparseDecodeReqOutput, channel.receive)])
    if ranks > 1:
        manager.get_internal_state_communicator = _StatesOfAllRanks(states, lambda: exchange(manager, {}))


class _StatesOfAllRanks:
    """SGLang's communicator for internal states, whose answers get the `sparse_decode` block of all ranks."""

    def __init__(self, communicator: FanOutCommunicator, state: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._communicator = communicator
        self._state = state

    async def __call__(self, request: Any) -> list[Any]:
        answers = await self._communicator(request)
        try:
            block = await self._state()
            del block["since_change"]
        except Exception as error:
            # A look at the server must not fail because of this block.
            logger.exception("the sparse_decode block of /server_info failed")
            block = {"error": str(error)}
        for answer in answers:
            answer.internal_state["sparse_decode"] = block
        return answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)


def connect_scheduler(scheduler: Any, answer: Callable[[dict[str, Change]], RankState]) -> None:
    """Makes SGLang's Scheduler pass the messages to `answer`, which notes changes and returns the state."""
    rank, _ = sglang_compat.rank_here()
    replies = sglang_compat.Replies()

    def output(request: SparseDecodeReqInput) -> SparseDecodeReqOutput:
        found, failure = RankState([], {}), None
        try:
            found = answer(dict(request.changes))
        except Exception as error:
            # An exception here would end the scheduler.
            logger.exception("a message of /sparse_decode failed")
            failure = f"{type(error).__name__}: {error}"
        return SparseDecodeReqOutput(
            number=request.number, rank=rank, kv_heads=list(found.kv_heads), state=found.state, error=failure
        )

    def handle(request: SparseDecodeReqInput) -> SparseDecodeReqOutput | None:
        answered = output(request)
        if rank == 0:
            return answered
        # What this returned would be dropped.
        try:
            replies.send(request.reply_to, answered)
        except Exception:
            logger.exception("an answer to /sparse_decode could not be sent")
        return None

    scheduler._request_dispatcher += TypeBasedDispatcher([(SparseDecodeReqInput, handle)])


async def exchange(manager: Any, changes: Mapping[str, Change]) -> dict[str, Any]:
    """Sends checked `changes`, or none, and returns the state that the ranks answer with, put together.

    Raises:
        RuntimeError: a rank could not answer, or did not in time.
    """
    manager.auto_create_handle_loop()
    answers = await getattr(manager, _CHANNEL).ask(changes, sglang_compat.reply_address(manager))
    for answer in answers:
        if answer.error is not None:
            raise RuntimeError(answer.error)
    return merged([RankState(answer.kv_heads, answer.state) for answer in sorted(answers, key=lambda one: one.rank)])

"""Decode workers that do as they are told, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from weft.rpc import server as rpc_server
from weft_mesh.v1 import common_pb2, decode_service_pb2, scheduler_service_pb2
from weft_mesh.v1.decode_service_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server

BLOCK_TOKENS = 16
STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
Start = decode_service_pb2.StartSequence
SequenceDelta = decode_service_pb2.SequenceDelta
Script = Callable[[Start], AsyncIterator[SequenceDelta]]
Stage = scheduler_service_pb2.Settlement.Stage


class Silence:
    """How many scripts have said what they had to say."""

    num_silent = 0


async def forever() -> None:
    """Until cancelled."""
    Silence.num_silent += 1
    try:
        await asyncio.Event().wait()
    finally:
        Silence.num_silent -= 1


def position(token_id: int, num_top: int) -> common_pb2.PositionLogprobs:
    """Made-up logprobs of one token."""
    top = [common_pb2.TokenLogprob(token_id=token_id + i, logprob=-0.5 - i) for i in range(num_top)]
    return common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=-0.5), top=top)


def deltas(
    start: Start, token_ids: Sequence[int], finish: common_pb2.FinishReason.ValueType | None = STOP, cached: int = 0
) -> list[SequenceDelta]:
    """One delta a token, as an engine sends them: usage with the first, the end with the last."""
    out = []
    for token_id in token_ids:
        delta = SequenceDelta(key=start.key, token_ids=[token_id])
        if start.sampling.HasField("num_logprobs"):
            delta.logprobs.append(position(token_id, start.sampling.num_logprobs))
        out.append(delta)
    out[0].prompt.CopyFrom(decode_service_pb2.PromptUsage(cached_tokens=cached, prefill_worker_id="prefill-0"))
    if finish is not None:
        out[-1].finish_reason = finish
    return out


def speaking(
    token_ids: Sequence[int], finish: common_pb2.FinishReason.ValueType | None = STOP, cached: int = 0
) -> Script:
    """Say these tokens; without a finish, fall silent after them."""

    async def script(start: Start) -> AsyncIterator[SequenceDelta]:
        for delta in deltas(start, token_ids, finish, cached):
            yield delta
        if finish is None:
            await forever()

    return script


def answering(
    token_ids: Sequence[int], dies_after: int | None = None, finish: common_pb2.FinishReason.ValueType = STOP
) -> Script:
    """Say what of the answer is not said yet, as an engine does; fall silent when so much of it is out."""

    async def script(start: Start) -> AsyncIterator[SequenceDelta]:
        said = list(start.token_ids)[len(start.token_ids) - start.resumed_tokens :]
        assert said == list(token_ids[: len(said)]), "another answer is to be continued"
        rest = list(token_ids[len(said) : dies_after])
        for delta in (
            deltas(start, rest, None if dies_after else finish, cached=len(start.token_ids) // 2) if rest else ()
        ):
            yield delta
        if dies_after:
            await forever()

    return script


def failing(code: int, worker_id: str = "") -> Script:
    """Fail with this code."""

    async def script(start: Start) -> AsyncIterator[SequenceDelta]:
        failure = decode_service_pb2.SequenceFailure(code=code, message="at 10.1.2.3:4", worker_id=worker_id)
        yield SequenceDelta(key=start.key, failure=failure)

    return script


class FakeDecode(DecodeServiceServicer):
    """Plays its script for every sequence that is started."""

    def __init__(self, worker_id: str = "decode-0", boot_id: str = "boot-0") -> None:
        self.worker_id, self.boot_id = worker_id, boot_id
        self.address = ""
        # what a script gives as a list is said in one message
        self.script: Script | Callable[[Start], AsyncIterator[list[SequenceDelta]]] = speaking([1])
        self.started: list[Start] = []
        self.cancelled: list[str] = []
        self.num_attached = 0
        self.num_said = 0  # tokens, and pieces of prompts' scores
        self.changed = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._server = grpc.aio.server(options=rpc_server.SERVER_OPTIONS)
        add_DecodeServiceServicer_to_server(self, self._server)

    async def open(self) -> None:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def kill(self) -> None:
        await self._server.stop(None)

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await self._note(attached=1)
        async with asyncio.TaskGroup() as group:
            plays: dict[str, asyncio.Task[None]] = {}
            async for request in request_iterator:
                if request.HasField("start"):
                    plays[str(request.start.key)] = group.create_task(self._play(request.start, context))
                    await self._note(started=request.start)
                else:
                    plays.pop(str(request.cancel.key)).cancel()
                    await self._note(cancelled=request.cancel.key.request_id)

    async def _play(self, start: Start, context: Any) -> None:
        async for said in self.script(start):
            frame = said if isinstance(said, list) else [said]
            async with self._writing:
                await context.write(decode_service_pb2.AttachResponse(deltas=frame))
            self.num_said += sum(len(delta.token_ids) + delta.HasField("prompt_logprobs") for delta in frame)

    async def _note(self, attached: int = 0, started: Start | None = None, cancelled: str | None = None) -> None:
        async with self.changed:
            self.num_attached += attached
            self.started += [started] if started is not None else []
            self.cancelled += [cancelled] if cancelled is not None else []
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool], seconds: float = 10) -> None:
        """Wait for something to happen here."""
        async with asyncio.timeout(seconds), self.changed:
            await self.changed.wait_for(condition)

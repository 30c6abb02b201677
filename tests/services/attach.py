"""A gateway's end of Attach, and the prompts it asks for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch

from weft.request import RequestKey, SamplingParams, WorkerAddress
from weft.rpc.client import open_channel
from weft.rpc.wire import address_to_wire, key_to_wire, sampling_to_wire
from weft_mesh.v1 import decode_service_pb2, decode_service_pb2_grpc

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
_numbers = itertools.count()


def new_key() -> RequestKey:
    """A key that no other request has."""
    return RequestKey(f"request-{next(_numbers)}")


def prompt(num_tokens: int, seed: int = 1) -> tuple[int, ...]:
    """Random tokens of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 131, (num_tokens,), generator=generator).tolist())


@dataclass
class Answer:
    """Everything a gateway has been told about one sequence."""

    tokens: list[int] = field(default_factory=list)
    usage: decode_service_pb2.PromptUsage | None = None
    finish_reason: int = 0
    failure: decode_service_pb2.SequenceFailure | None = None
    prompt_logprobs: list[decode_service_pb2.PromptLogprobs] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, delta: decode_service_pb2.SequenceDelta) -> None:
        """Later deltas append."""
        if delta.HasField("prompt_logprobs"):
            assert not self.tokens
            self.prompt_logprobs.append(delta.prompt_logprobs)
            return
        self.tokens += delta.token_ids
        self.has_begun.set()
        if delta.HasField("prompt"):
            assert self.usage is None
            self.usage = delta.prompt
        if delta.finish_reason or delta.HasField("failure"):
            assert not self.has_ended.is_set()
            self.finish_reason = delta.finish_reason
            self.failure = delta.failure if delta.HasField("failure") else None
            self.has_ended.set()


class Gateway:
    """The other end of Attach."""

    def __init__(self, decode: WorkerAddress, tasks: asyncio.TaskGroup) -> None:
        self.frames: list[decode_service_pb2.AttachResponse] = []
        self._decode = decode
        self._answers: dict[str, Answer] = {}
        self._channel = open_channel(decode.address)
        self._stream = decode_service_pb2_grpc.DecodeServiceStub(self._channel).Attach()
        self._reader = tasks.create_task(self._read())

    async def _read(self) -> None:
        with suppress(grpc.aio.AioRpcError):  # the worker has gone
            async for frame in self._stream:
                self.frames.append(frame)
                for delta in frame.deltas:
                    self._answers[delta.key.request_id].take(delta)

    async def start(
        self,
        token_ids: Sequence[int],
        prefill: WorkerAddress | None = None,
        sampling: SamplingParams = GREEDY,
        key: RequestKey | None = None,
        **fields: Any,
    ) -> tuple[RequestKey, Answer]:
        """Begin a sequence."""
        key = key or new_key()
        answer = self._answers.setdefault(key.request_id, Answer())
        start = self.start_message(key, token_ids, prefill, sampling, **fields)
        await self._stream.write(decode_service_pb2.AttachRequest(start=start))
        return key, answer

    def start_message(
        self,
        key: RequestKey,
        token_ids: Sequence[int],
        prefill: WorkerAddress | None,
        sampling: SamplingParams,
        **fields: Any,
    ) -> decode_service_pb2.StartSequence:
        """As a gateway would send it."""
        return decode_service_pb2.StartSequence(
            key=key_to_wire(key),
            prefill=address_to_wire(prefill) if prefill else None,
            token_ids=token_ids,
            sampling=sampling_to_wire(sampling),
            **{"decode_boot_id": self._decode.boot_id, "remaining_ms": 30_000, **fields},
        )

    async def cancel(self, key: RequestKey) -> None:
        """Nobody waits for it any more."""
        await self._stream.write(
            decode_service_pb2.AttachRequest(cancel=decode_service_pb2.CancelSequence(key=key_to_wire(key)))
        )

    async def generate(self, token_ids: Sequence[int], prefill: WorkerAddress | None = None, **options: Any) -> Answer:
        """A sequence from its start to its end."""
        _, answer = await self.start(token_ids, prefill, **options)
        async with asyncio.timeout(20):
            await answer.has_ended.wait()
        return answer

    async def done(self) -> None:
        """Send nothing more."""
        await self._stream.done_writing()

    async def leave(self) -> None:
        """Break the stream."""
        self._reader.cancel()
        self._stream.cancel()
        await self._channel.close()

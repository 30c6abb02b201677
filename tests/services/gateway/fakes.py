"""A scheduler and decode workers that do as they are told, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from weft.rpc.server import SERVER_OPTIONS
from weft_mesh.v1 import common_pb2, decode_service_pb2, scheduler_service_pb2
from weft_mesh.v1.decode_service_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from weft_mesh.v1.scheduler_service_pb2_grpc import (
    FleetServiceServicer,
    SchedulerServiceServicer,
    add_FleetServiceServicer_to_server,
    add_SchedulerServiceServicer_to_server,
)

BLOCK_TOKENS = 16
STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
Start = decode_service_pb2.StartSequence
SequenceDelta = decode_service_pb2.SequenceDelta
Script = Callable[[Start], AsyncIterator[SequenceDelta]]
Stage = scheduler_service_pb2.Settlement.Stage


async def forever() -> None:
    """Until cancelled."""
    await asyncio.Event().wait()


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
        self.script: Script = speaking([1])
        self.started: list[Start] = []
        self.cancelled: list[str] = []
        self.num_attached = 0
        self.changed = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
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
        async for delta in self.script(start):
            async with self._writing:
                await context.write(decode_service_pb2.AttachResponse(deltas=[delta]))

    async def _note(self, attached: int = 0, started: Start | None = None, cancelled: str | None = None) -> None:
        async with self.changed:
            self.num_attached += attached
            self.started += [started] if started is not None else []
            self.cancelled += [cancelled] if cancelled is not None else []
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to happen here."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(condition)


class Refused(Exception):
    """What a stream says where a call would have been aborted."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        super().__init__(details)
        seconds = float(dict(metadata).get("weft-retry-after", 0))
        self.message = scheduler_service_pb2.RouteRefusal(
            code=code.value[0], message=details, retry_after_seconds=seconds
        )


class _Aborting:
    """A context for one request of a stream."""

    async def abort(self, *status: Any) -> None:
        raise Refused(*status)


class FakeScheduler(SchedulerServiceServicer, FleetServiceServicer):
    """Places on the first worker whose boot is not excluded, remembers everything."""

    def __init__(self, decoders: list[FakeDecode], model: str, max_context: int) -> None:
        self.decoders, self.model, self.max_context = decoders, model, max_context
        self.routed: list[scheduler_service_pb2.RouteRequest] = []
        self.settled: list[scheduler_service_pb2.Settlement] = []
        self.refusal: tuple[Any, ...] | None = None  # what `abort` takes
        self.is_prefill_ready = True
        self.prefill = [_PREFILL]
        self.is_stuck = False
        self.reports: dict[str, scheduler_service_pb2.WorkerReport] = {}
        self.store: scheduler_service_pb2.StoreStatus | None = None
        self.num_waiting = 0
        self.draining: set[str] = set()
        self.flexible: set[str] = set()  # those that can change their role
        self.roles: dict[str, common_pb2.WorkerRole.ValueType] = {}  # that they were given
        self.address = ""
        self.changed = asyncio.Condition()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        add_SchedulerServiceServicer_to_server(self, self._server)
        add_FleetServiceServicer_to_server(self, self._server)

    async def open(self) -> None:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def kill(self) -> None:
        await self._server.stop(None)

    async def Drain(self, request: Any, context: Any) -> Any:
        if request.worker_id not in [status.hello.worker.worker_id for status in self._statuses()]:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no worker {request.worker_id!r} is live")
        self.draining ^= {request.worker_id} if (request.worker_id in self.draining) == request.undo else set()
        return scheduler_service_pb2.DrainResponse()

    async def SetRole(self, request: Any, context: Any) -> Any:
        if request.worker_id not in self.flexible:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"worker {request.worker_id!r} has one role only")
        self.roles[request.worker_id] = request.role
        return scheduler_service_pb2.SetRoleResponse()

    async def Route(self, request: Any, context: Any) -> Any:
        async with self.changed:
            self.routed.append(request)
            self.changed.notify_all()
        if self.is_stuck:
            await forever()
        if self.refusal is not None:
            await context.abort(*self.refusal)
        for decoder in self.decoders:
            if decoder.boot_id not in request.excluded_boot_ids:
                return scheduler_service_pb2.RouteResponse(decode=_address(decoder), prefill=_PREFILL)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "no decode worker")

    async def RouteMany(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """Each as `Route` would answer it, in a message of its own."""
        writing = asyncio.Lock()

        async def answer(request: scheduler_service_pb2.RouteRequest) -> None:
            result = scheduler_service_pb2.RouteResult(key=request.key)
            try:
                result.placed.CopyFrom(await self.Route(request, _Aborting()))
            except Refused as refusal:
                result.refused.CopyFrom(refusal.message)
            async with writing:
                await context.write(scheduler_service_pb2.RouteManyResponse(results=[result]))

        async with asyncio.TaskGroup() as group:
            tasks = {}
            async for batch in request_iterator:
                for request in batch.requests:
                    key = (request.key.request_id, request.key.generation)
                    tasks[key] = group.create_task(answer(request))
                for withdrawn in batch.withdrawn:
                    tasks[withdrawn.request_id, withdrawn.generation].cancel()
            for task in tasks.values():
                task.cancel()

    async def Settle(self, request: Any, context: Any) -> Any:
        async with self.changed:
            self.settled.extend(request.settlements)
            self.changed.notify_all()
        return scheduler_service_pb2.SettleResponse()

    def Join(self, request_iterator: Any, context: Any) -> Any:
        """No worker joins a fake."""
        raise NotImplementedError

    async def ListWorkers(self, request: Any, context: Any) -> Any:
        return scheduler_service_pb2.ListWorkersResponse(
            workers=self._statuses(), store=self.store, waiting_requests=self.num_waiting
        )

    def _statuses(self) -> list[scheduler_service_pb2.WorkerStatus]:
        statuses = [self._status(_address(decoder), common_pb2.WORKER_ROLE_DECODE, True) for decoder in self.decoders]
        role = common_pb2.WORKER_ROLE_PREFILL
        return [*statuses, *(self._status(worker, role, self.is_prefill_ready) for worker in self.prefill)]

    def _status(self, worker: Any, role: Any, ready: bool) -> scheduler_service_pb2.WorkerStatus:
        hello = scheduler_service_pb2.WorkerHello(
            worker=worker,
            role=self.roles.get(worker.worker_id, role),
            can_change_role=worker.worker_id in self.flexible,
            model=self.model,
            max_context_tokens=self.max_context,
            fingerprint=common_pb2.ModelFingerprint(weights_hash="abcdef0123456789", block_tokens=BLOCK_TOKENS),
        )
        report = scheduler_service_pb2.WorkerReport(ready=ready)
        if (own := self.reports.get(worker.worker_id)) is not None:
            hello.num_blocks = own.free_blocks + own.cached_blocks + own.active_blocks + own.quarantined_blocks
            report.MergeFrom(own)
        if worker.worker_id in self.draining:
            report.ready, report.draining = False, True
        return scheduler_service_pb2.WorkerStatus(hello=hello, report=report)

    def stages(self, generation: int = 0) -> list[str]:
        """Names of the stages settled for that attempt, in order."""
        return [Stage.Name(each.stage)[6:].lower() for each in self.settled if each.key.generation == generation]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to happen here."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(condition)


_PREFILL = scheduler_service_pb2.WorkerAddress(worker_id="prefill-0", boot_id="boot-p", address="127.0.0.1:9")


def _address(decoder: FakeDecode) -> scheduler_service_pb2.WorkerAddress:
    return scheduler_service_pb2.WorkerAddress(
        worker_id=decoder.worker_id, boot_id=decoder.boot_id, address=decoder.address
    )

"""A worker without a model, which joins a scheduler and answers in step frames: `loadtest.gateway.fake_worker`.

Token ids come at a set pace, or as fast as the gateway takes them. Every answer is the same text, again and again.
`--metrics-port` serves counters of the frames and the tokens in them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import Counter, start_http_server
from tokenizers import Tokenizer

from weft.rpc.client import cancelled_on_exit, open_channel
from weft.rpc.server import RpcServer, run, until_signal
from weft_mesh.v1 import common_pb2, decode_service_pb2_grpc
from weft_mesh.v1 import decode_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2 as scheduler_pb
from weft_mesh.v1.scheduler_service_pb2_grpc import FleetServiceStub

ROOT = Path(__file__).resolve().parents[2]
WORKER_ID, BOOT_ID = "source-0", "source-boot"
NUM_BLOCKS, BLOCK_TOKENS, CONTEXT = 1 << 24, 16, 1 << 20
REPORT_SECONDS, JOIN_SECONDS, GATHER_SECONDS = 1.0, 60.0, 1.0
STEPS = Counter("source_steps", "Frames of a step, those of first tokens apart")
STEP_TOKENS = Counter("source_step_tokens", "Tokens in them")
SERVICE = pb.DESCRIPTOR.services_by_name["DecodeService"].full_name


@dataclass(slots=True)
class Speaker:
    """A running sequence: the place of its next token, and the number of tokens left."""

    key: common_pb2.RequestKey
    num_left: int
    place: int
    has_spoken: bool = False


class Stage:
    """The sequences of one gateway: `begun` is set while some have no token, `is_under_way` since the first step."""

    def __init__(self) -> None:
        self.speakers: dict[str, Speaker] = {}
        self.begun = asyncio.Event()
        self.is_under_way = False
        self._fresh: list[str] = []

    def enter(self, start: pb.StartSequence) -> None:
        """Start a sequence behind the tokens that it resumes from."""
        said, name = start.resumed_tokens, start.key.request_id
        self.speakers[name] = Speaker(start.key, start.sampling.max_tokens - said, said)
        self._fresh.append(name)
        self.begun.set()

    async def has_begun(self, until: float) -> bool:
        """Wait for a new sequence until a time of the loop; return whether one came."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                return await self.begun.wait()
        return False

    def take_fresh(self) -> list[str]:
        """Return the names of sequences without a token."""
        fresh, self._fresh = self._fresh, []
        self.begun.clear()
        return fresh


class Source(decode_service_pb2_grpc.DecodeServiceServicer):
    """DecodeService without a model: a step gives every sequence of a gateway one token."""

    def __init__(self, token_ids: list[int], step_seconds: float, at_once: int) -> None:
        """With `step_seconds` 0 a step runs whenever the stream takes a frame. The first step waits for `at_once`
        sequences over all gateways."""
        self._token_ids = token_ids
        self._step_seconds = step_seconds
        self._at_once = at_once
        self._stages: list[Stage] = []
        self._has_entered = asyncio.Event()

    @property
    def num_running(self) -> int:
        """Running sequences of all gateways."""
        return sum(len(stage.speakers) for stage in self._stages)

    async def Attach(self, request_iterator: AsyncIterator[pb.AttachRequest], context: Any) -> None:  # type: ignore[override]
        """Serve one gateway."""
        stage = Stage()
        self._stages.append(stage)
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(self._write(stage, context))
            async for request in request_iterator:
                if request.WhichOneof("command") == "start":
                    stage.enter(request.start)
                    self._has_entered.set()
                else:
                    stage.speakers.pop(request.cancel.key.request_id, None)
            writer.cancel()

    async def _write(self, stage: Stage, context: Any) -> None:
        """Write first tokens at once, as prefill does, and the others by steps."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not stage.speakers:
                stage.is_under_way = False
                await stage.begun.wait()
                due = loop.time()
            if stage.begun.is_set() or (loop.time() < due and await stage.has_begun(due)):
                frame = self._step(stage.speakers, stage.take_fresh())
            elif not stage.is_under_way:
                await self._gather()
                stage.is_under_way = True
                continue  # new sequences get their first tokens before the step
            else:
                due += self._step_seconds
                frame = self._step(stage.speakers, list(stage.speakers))
                STEPS.inc()
                STEP_TOKENS.inc(len(frame.deltas))
            if frame.deltas:
                await context.write(frame)

    async def _gather(self) -> None:
        """Wait for `at_once` sequences, or for GATHER_SECONDS."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GATHER_SECONDS):
                while self.num_running < self._at_once:
                    self._has_entered.clear()
                    await self._has_entered.wait()

    def _step(self, speakers: dict[str, Speaker], names: list[str]) -> pb.AttachResponse:
        frame, ended = pb.AttachResponse(), []
        for name in names:
            if (speaker := speakers.get(name)) is None:
                continue  # cancelled
            delta = frame.deltas.add()
            delta.key.CopyFrom(speaker.key)
            delta.token_ids.append(self._token_ids[speaker.place % len(self._token_ids)])
            if not speaker.has_spoken:
                speaker.has_spoken = True
                delta.prompt.prefill_worker_id = WORKER_ID
            speaker.place += 1
            speaker.num_left -= 1
            if speaker.num_left == 0:
                delta.finish_reason = common_pb2.FINISH_REASON_LENGTH
                ended.append(name)
        for name in ended:
            del speakers[name]
        return frame


async def be_member(scheduler: str, address: str, model: str, source: Source) -> None:
    """Join the scheduler and report without end."""
    hello = scheduler_pb.WorkerHello(
        worker=scheduler_pb.WorkerAddress(worker_id=WORKER_ID, boot_id=BOOT_ID, address=address),
        role=common_pb2.WORKER_ROLE_BOTH,
        model=model,
        fingerprint=common_pb2.ModelFingerprint(weights_hash="none", kv_dtype="none", block_tokens=BLOCK_TOKENS),
        num_blocks=NUM_BLOCKS,
        max_context_tokens=CONTEXT,
    )
    async with open_channel(scheduler) as channel:
        await asyncio.wait_for(channel.channel_ready(), JOIN_SECONDS)
        async with cancelled_on_exit(FleetServiceStub(channel).Join()) as call:
            await call.write(scheduler_pb.JoinRequest(hello=hello))
            while True:
                report = scheduler_pb.WorkerReport(ready=True, free_blocks=NUM_BLOCKS, num_running=source.num_running)
                await call.write(scheduler_pb.JoinRequest(report=report))
                await asyncio.sleep(REPORT_SECONDS)


async def serve(options: argparse.Namespace) -> None:
    """Serve until a signal arrives."""
    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    token_ids = tokenizer.encode((ROOT / "docs" / "bundles.md").read_text(), add_special_tokens=False).ids
    rpc = RpcServer([SERVICE])
    step_seconds = 1 / options.steps_per_second if options.steps_per_second else 0.0
    source = Source(token_ids, step_seconds, options.at_once)
    if options.metrics_port:
        start_http_server(options.metrics_port, "127.0.0.1")
    decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(source, rpc.server)
    address = await rpc.start("127.0.0.1", 0, lambda: None)
    await until_signal(be_member(options.scheduler, address, options.name, source))
    await rpc.stop(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gateway.fake_worker", description=__doc__)
    parser.add_argument("--scheduler", required=True, help="host:port")
    parser.add_argument("--model", required=True, help="directory of the tokenizer")
    parser.add_argument("--name", required=True, help="served name")
    parser.add_argument("--steps-per-second", type=float, default=0.0, help="0: as fast as they are taken")
    parser.add_argument("--at-once", type=int, default=0, help="sequences that a first step waits for")
    parser.add_argument("--metrics-port", type=int, default=0, help="0: none")
    options = parser.parse_args()
    grpc.aio.init_grpc_aio()
    run(lambda: serve(options))


if __name__ == "__main__":
    main()

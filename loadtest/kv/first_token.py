"""Time to first token at a decode worker: through a prefill worker, and computed by itself. Speaks as a gateway."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from loadtest.local_mesh import LocalMesh
from weft.rpc.client import cancelled_on_exit, open_channel
from weft_mesh.v1 import common_pb2, decode_service_pb2, decode_service_pb2_grpc, scheduler_service_pb2

FIRST_ORDINARY = 300
PATIENCE_MS = 300_000
NUM_TOKENS = 3  # the first one, and what shows that the KV has come


@dataclass(frozen=True, slots=True)
class Times:
    """Of one prompt, in milliseconds: to the first token, to the second, and what its compute and hand-off took."""

    first: float
    second: float
    compute: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Row:
    """One length, both ways, the same prompts never asked before."""

    length: int
    alone: list[Times]
    paired: list[Times]


class Asker:
    """One Attach stream to a decode worker, one sequence at a time."""

    def __init__(self, stream: Any, decode: scheduler_service_pb2.WorkerAddress, vocab_size: int) -> None:
        self._stream = stream
        self._decode = decode
        self._vocab_size = vocab_size
        self._dice = random.Random(5)

    async def ask(self, length: int, prefill: scheduler_service_pb2.WorkerAddress | None) -> Times:
        """A prompt that nobody has seen before."""
        tokens = [self._dice.randrange(FIRST_ORDINARY, self._vocab_size) for _ in range(length)]
        start = decode_service_pb2.StartSequence(
            key=common_pb2.RequestKey(request_id=uuid4().hex),
            decode_boot_id=self._decode.boot_id,
            prefill=prefill,
            token_ids=tokens,
            sampling=common_pb2.SamplingParams(max_tokens=NUM_TOKENS, top_p=1.0, ignore_eos=True),
            remaining_ms=PATIENCE_MS,
        )
        moments: list[float] = []
        began, usage = time.perf_counter(), decode_service_pb2.PromptUsage()
        await self._stream.write(decode_service_pb2.AttachRequest(start=start))
        while len(moments) < NUM_TOKENS:
            frame = await self._stream.read()
            delta = frame.deltas[0]
            assert not delta.HasField("failure"), delta.failure.message
            moments += [1000 * (time.perf_counter() - began)] * len(delta.token_ids)
            if delta.HasField("prompt"):
                usage = delta.prompt
        assert (usage.transferred_bytes > 0) == (prefill is not None), "the prompt went another way"
        return Times(moments[0], moments[1], usage.compute_ms, usage.exposed_transfer_ms)


async def measure_ttft(
    mesh: LocalMesh, lengths: Sequence[int], rounds: int, vocab_size: int, in_new_pools: bool
) -> list[Row]:
    """A row a length; in turn, each way first as often as the other, after one of each that does not count.

    Unless pools are to be new, prompts before that until both workers have used all of theirs.
    """
    workers = {address.worker_id: address for address in mesh.addresses()}
    prefill, decode = workers["prefill-0"], workers["decode-0"]
    channel = open_channel(decode.address)
    rows = []
    try:
        async with cancelled_on_exit(decode_service_pb2_grpc.DecodeServiceStub(channel).Attach()) as stream:
            asker = Asker(stream, decode, vocab_size)
            for _ in range(0 if in_new_pools else mesh.pool_tokens() // max(lengths) + 1):
                for lender in (None, prefill):
                    await asker.ask(max(lengths), lender)
            for length in lengths:
                row = Row(length, [], [])
                ways = [(row.alone, None), (row.paired, prefill)]
                for number in range(rounds + 1):
                    for times, lender in ways if number % 2 else reversed(ways):
                        times.append(await asker.ask(length, lender))
                del row.alone[0], row.paired[0]
                rows.append(row)
    finally:
        await channel.close()
    return rows

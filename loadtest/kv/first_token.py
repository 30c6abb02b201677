"""Time to first token at a decode worker: through a prefill worker, and computed by itself. Speaks as a gateway."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from uuid import uuid4

from loadtest.local_mesh import LocalMesh
from weft.rpc.client import open_channel, owned
from weft_mesh.v1 import common_pb2, decode_service_pb2, decode_service_pb2_grpc, scheduler_service_pb2

Row = tuple[int, list[float], list[float]]
FIRST_ORDINARY = 300
PATIENCE_MS = 300_000


class Asker:
    """One Attach stream to a decode worker, one sequence at a time."""

    def __init__(self, stream: object, decode: scheduler_service_pb2.WorkerAddress, vocab_size: int) -> None:
        self._stream: object = stream
        self._decode = decode
        self._vocab_size = vocab_size
        self._dice = random.Random(5)

    async def first_token(self, length: int, prefill: scheduler_service_pb2.WorkerAddress | None) -> float:
        """Seconds to the first token of a prompt that nobody has seen before."""
        tokens = [self._dice.randrange(FIRST_ORDINARY, self._vocab_size) for _ in range(length)]
        start = decode_service_pb2.StartSequence(
            key=common_pb2.RequestKey(request_id=uuid4().hex),
            decode_boot_id=self._decode.boot_id,
            prefill=prefill,
            token_ids=tokens,
            sampling=common_pb2.SamplingParams(max_tokens=1, top_p=1.0, ignore_eos=True),
            remaining_ms=PATIENCE_MS,
        )
        began = time.perf_counter()
        await self._stream.write(decode_service_pb2.AttachRequest(start=start))  # type: ignore[attr-defined]
        frame = await self._stream.read()  # type: ignore[attr-defined]
        seconds = time.perf_counter() - began
        delta = frame.deltas[0]
        assert not delta.HasField("failure"), delta.failure.message
        assert (delta.prompt.transferred_bytes > 0) == (prefill is not None), "the prompt went another way"
        return seconds


async def measure_ttft(mesh: LocalMesh, lengths: Sequence[int], rounds: int, vocab_size: int) -> list[Row]:
    """Lengths, and the seconds of both ways; in turn, after one of each that does not count."""
    workers = {address.worker_id: address for address in mesh.addresses()}
    prefill, decode = workers["prefill-0"], workers["decode-0"]
    channel = open_channel(decode.address)
    rows = []
    try:
        async with owned(decode_service_pb2_grpc.DecodeServiceStub(channel).Attach()) as stream:
            asker = Asker(stream, decode, vocab_size)
            for length in lengths:
                await asker.first_token(length, None)
                await asker.first_token(length, prefill)
                row: Row = (length, [], [])
                for _ in range(rounds):
                    row[1].append(await asker.first_token(length, None))
                    row[2].append(await asker.first_token(length, prefill))
                rows.append(row)
    finally:
        await channel.close()
    return rows

"""A gateway in front of a fleet that is made up: workers that say what they are told, and answer in words.

Run it to look at the page without a model: `python -m tests.page.scene 8100`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.services.gateway.conftest import CONTEXT, MODEL_NAME, TEMPLATE, tiny_tokenizer, write_model
from tests.services.gateway.fake_scheduler import FakeScheduler
from tests.services.gateway.fakes import FakeDecode, SequenceDelta, Start, deltas
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.process import Gateway, running

ANSWER = "the answer is here, hello world: a prompt was computed there, and written token by token here."
PAUSE_SECONDS = 0.012
TOKENIZER = tiny_tokenizer()


class Scene:
    """The fleet's numbers, and what moves them."""

    def __init__(self, gateway: Gateway, scheduler: FakeScheduler) -> None:
        self.gateway, self.scheduler = gateway, scheduler

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://{self.gateway.http_address}/"


async def answer(start: Start) -> AsyncIterator[SequenceDelta]:
    """In words, one every few milliseconds, with an account of the prompt."""
    tokens = TOKENIZER.encode(ANSWER).ids
    out = deltas(start, tokens, cached=len(start.token_ids) // 16 * 16)
    usage = out[0].prompt
    usage.transferred_bytes, usage.queue_ms, usage.compute_ms, usage.exposed_transfer_ms = 1_310_720, 4, 31, 6
    usage.routed_us, usage.reserved_us, usage.prefilling_us, usage.transferring_us = 900, 2100, 36_000, 6200
    await asyncio.sleep(0.045)
    for delta in out:
        yield delta
        await asyncio.sleep(PAUSE_SECONDS)


def report(shares: tuple[int, int, int], **numbers: Any) -> pb.WorkerReport:
    """A ready worker whose blocks are active, cached and free."""
    active, cached, free = shares
    return pb.WorkerReport(ready=True, active_blocks=active, cached_blocks=cached, free_blocks=free, **numbers)


def furnish(scheduler: FakeScheduler) -> None:
    """What the workers say first."""
    prefix = pb.PrefixTally(looked_up_tokens=91_200, pool_tokens=41_000, dram_tokens=16_700, nvme_tokens=3100)
    prefill = report((300, 2100, 1696), num_running=2, num_waiting=1, queued_prefill_tokens=3920)
    prefill.prefix.CopyFrom(prefix)
    scheduler.reports = {
        "prefill-0": prefill,
        "decode-0": report((1720, 900, 1476), num_running=14, active_tokens=27_520),
        "decode-1": report((820, 1400, 1876), num_running=6, active_tokens=13_100),
    }
    scheduler.store = pb.StoreStatus(
        memory_bytes=1 << 30, memory_used_bytes=611 << 20, disk_bytes=8 << 30, disk_used_bytes=1503 << 20
    )


def tick(scheduler: FakeScheduler, seconds: int) -> None:
    """A second of work."""
    prefill = scheduler.reports["prefill-0"]
    prefill.computed_prompt_tokens += 5200 + 900 * (seconds % 4)
    for place, decoder in enumerate(scheduler.decoders):
        mine = scheduler.reports[decoder.worker_id]
        mine.generated_tokens += (610, 240)[place] + 35 * ((seconds + place) % 5)
        if not mine.hand_offs:
            mine.hand_offs.add(prefill_worker_id="prefill-0")
        mine.hand_offs[0].num_prompts += 2 - place
        mine.hand_offs[0].size_bytes += 9_800_000


@asynccontextmanager
async def scene(folder: Path, port: int = 0, keys: str = "") -> AsyncIterator[Scene]:
    """Two decode workers and a prefill worker; `keys` is the file of those that are asked for."""
    async with AsyncExitStack() as stack:
        decoders = [FakeDecode(f"decode-{i}", f"boot-{i}") for i in range(2)]
        for decoder in decoders:
            decoder.script = answer
            await decoder.open()
            stack.push_async_callback(decoder.kill)
        scheduler = FakeScheduler(decoders, MODEL_NAME, CONTEXT)
        scheduler.flexible = {"decode-0", "decode-1"}
        furnish(scheduler)
        await scheduler.open()
        stack.push_async_callback(scheduler.kill)
        model = str(write_model(folder, TOKENIZER, TEMPLATE))
        config = GatewayConfig(
            model=model, scheduler_addr=scheduler.address, http_port=port, grpc_port=0, grace_seconds=1, keys=keys
        )
        gateway = await stack.enter_async_context(running(config))
        await gateway.watch.poll()
        yield Scene(gateway, scheduler)


async def main(port: int) -> None:
    """Until Ctrl-C, with the numbers moving."""
    with tempfile.TemporaryDirectory() as folder:
        async with scene(Path(folder), port) as shown:
            print(shown.url, flush=True)
            for second in range(100_000):
                tick(shown.scheduler, second)
                await asyncio.sleep(1)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))

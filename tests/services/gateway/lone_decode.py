"""A decode worker in a process of its own, for tests that freeze it: says one token, then nothing."""

from __future__ import annotations

import asyncio

from tests.services.gateway.fakes import FakeDecode, forever, speaking


async def _serve_alone() -> None:
    decode = FakeDecode()
    decode.script = speaking([100], finish=None)
    await decode.open()
    print(decode.address, flush=True)
    await forever()


if __name__ == "__main__":
    asyncio.run(_serve_alone())

"""An operating system process with one prefill worker for each TRANSPORT:CHECKPOINT on its command line.

Prints one line of JSON, argument -> worker id, boot id and address, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from tests.services.workers import start_worker
from tests.weft.tiny_llama import Tiny
from weft.model.config import read_config
from weft_services.prefill.service import install


class Checkpoint(Tiny):
    """A tiny model without its oracle."""

    @property
    def weights(self) -> dict[str, Tensor]:
        return load_file(self.directory / "model.safetensors")


async def main(arguments: list[str]) -> None:
    """Serve until stdin closes."""
    async with AsyncExitStack() as stack:
        found = {}
        for index, argument in enumerate(arguments):
            transport, _, directory = argument.partition(":")
            tiny = Checkpoint(None, Path(directory), read_config(Path(directory)))
            worker = await stack.enter_async_context(start_worker(tiny, f"prefill-{index}", install, transport))
            found[argument] = (worker.address.worker_id, worker.address.boot_id, worker.address.address)
        print(json.dumps(found), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))

"""KV transfers of every model family from a prefill worker in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.services.attach import Gateway
from tests.services.workers import start_worker
from tests.weft.tiny_families import FAMILIES, TinyFamily, make_family
from weft.asyncio_compat import background_tasks
from weft.request import SamplingParams, WorkerAddress
from weft_services.decode.service import install

LENGTHS = (1, 7, 24, 45)
# more under `make soak`
SAMPLING = SamplingParams(max_tokens=64 if "WEFT_SOAK_STEPS" in os.environ else 16, ignore_eos=True)
OVER_MOONCAKE = ("llama4", "deepseek")  # their caches are shaped least like a Llama's
Family = Callable[[str], TinyFamily]

pytestmark = pytest.mark.timeout(180)  # the first test waits for all models and for a process


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return cache(lambda name: make_family(name, tmp_path_factory.mktemp(name) / name))


def argument(transport: str, tiny: TinyFamily) -> str:
    return f"{transport}:{tiny.directory}"


@pytest.fixture(scope="module")
def prefills(family_of: Family) -> Iterator[dict[str, WorkerAddress]]:
    """Start prefill workers of all families in one child process."""
    arguments = [argument("grpc", family_of(name)) for name in FAMILIES]
    arguments += [argument("mooncake", family_of(name)) for name in OVER_MOONCAKE]
    command = [sys.executable, "-m", "tests.services.decode.prefill_child", *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        line = next((line for line in child.stdout if line.startswith("{")), "")
        assert line, f"the prefill process ended with {child.wait(10)}"
        yield {name: WorkerAddress(*words) for name, words in json.loads(line).items()}
    finally:
        child.stdin.close()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


async def check(tiny: TinyFamily, transport: str, prefill: WorkerAddress) -> None:
    """Run prompts within a block and over many, then again from decode's own cache."""
    async with start_worker(tiny, "decode-0", install, transport) as decode, background_tasks() as tasks:
        gateway = Gateway(decode.address, tasks)
        paging = decode.engine.paging
        for length in LENGTHS:
            token_ids = tuple((5 * i * i + 3 * i + 7 * length) % 110 + 3 for i in range(length))
            for turn in ("handed off", "from its own cache"):
                answer = await gateway.generate(token_ids, prefill, sampling=SAMPLING)
                assert answer.failure is None
                assert len(answer.tokens) == SAMPLING.max_tokens
                assert tiny.is_greedy(list(token_ids), answer.tokens), turn
                assert answer.usage is not None
                if turn == "handed off":
                    assert answer.usage.prefill_worker_id == prefill.worker_id
                    # of layers with a window, what the next token sees, or the prompt's repetition
                    groups = range(len(paging.spans))
                    num_pages = sum(len(paging.needed_blocks(group, 0, length, length)) for group in groups)
                    assert answer.usage.transferred_bytes == num_pages * decode.engine.pool_memory.block_bytes
                else:
                    size = paging.block_tokens
                    assert answer.usage.cached_tokens == (length - 1) // size * size
        await decode.until_idle()
        await gateway.leave()


@pytest.mark.parametrize(
    ("transport", "name"), [*(("grpc", name) for name in FAMILIES), *(("mooncake", name) for name in OVER_MOONCAKE)]
)
async def test_tokens_are_exact_after_a_hand_off_between_processes(
    transport: str, name: str, prefills: dict[str, WorkerAddress], family_of: Family
) -> None:
    tiny = family_of(name)
    await check(tiny, transport, prefills[argument(transport, tiny)])

"""What a draft head adds to a CPU worker's memory is what `weft plan` and `weft up` count for it."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.weft.worker.test_draft_engine import NANO, served
from tests.weft.worker.test_startup import arrival, config
from weft.capacity.draft import draft_size
from weft.capacity.sizes import choose_sizes
from weft.engine.engine import Engine
from weft.engine.head_executor import HeadExecutor
from weft.engine.runner import ModelRunner, assemble
from weft.model.config import read_config
from weft.model.draft_layers import with_draft
from weft.model.kv_layout import block_bytes
from weft.weights.checkpoint import read_checkpoint
from weft.weights.draft_checkpoint import DraftFiles, read_draft
from weft.worker import startup
from weft.worker.config import WorkerConfig
from weft.worker.startup import WeightImages

NUM_BLOCKS = 400
MAX_DIFFERENCE = 0.02


@dataclass(frozen=True)
class Memory:
    """Bytes of an engine: the process's own memory, which weights and features take, and its KV pool."""

    own: int
    pool: int

    def __sub__(self, other: Memory) -> Memory:
        return Memory(self.own - other.own, self.pool - other.pool)

    @property
    def total(self) -> int:
        return self.own + self.pool


def worker_config(weight_format: str) -> WorkerConfig:
    return config(MODEL=str(NANO), NUM_BLOCKS=str(NUM_BLOCKS), DTYPE="float32", WEIGHT_FORMAT=weight_format)


def head_of(model: Path) -> DraftFiles:
    head = read_draft("auto", model)
    assert head is not None
    return head


def planned(weight_format: str) -> Memory:
    """What the head adds by the arithmetic of `weft up`."""
    sizes = choose_sizes(worker_config(weight_format).wanted, False)
    target, head = read_config(NANO), draft_size(head_of(NANO).config, sizes.machine.dtype, True)
    both = with_draft(target, head.layer)
    found = []
    for model, draft in ((target, None), (both, head)):
        room = sizes.memory_budget(model, 1 << 40, draft)
        size = block_bytes(model, sizes.machine.dtype, sizes.machine.block_tokens)
        found.append(Memory(room.weights + room.activations, NUM_BLOCKS * size))
    return found[1] - found[0]


def measured(model: Path, weight_format: str) -> Memory:
    """What the head adds to an engine that a worker builds. The first engine counts for the libraries' own memory."""
    with served(read_checkpoint(model)) as target, served(head_of(model).checkpoint) as head:
        images = WeightImages(target), WeightImages(target, head)
        engines: list[Engine] = []
        _, plain, headed = (built(each, weight_format, engines) for each in (images[1], *images))
        return headed - plain


def built(images: WeightImages, weight_format: str, engines: list[Engine]) -> Memory:
    own, before = worker_config(weight_format), anonymous_bytes()
    make = partial(assemble, listener=lambda output: None)
    engine = startup._build(own, choose_sizes(own.wanted, False), images, make, arrival()).engine
    engines.append(engine)  # memory of one that has ended would be used again
    assert isinstance(engine._runner, ModelRunner)
    if isinstance(head := engine._runner.executor.head, HeadExecutor):
        head._features.fill_(0)  # takes pages only once it is written to
    pool = engine.pool_memory
    return Memory(anonymous_bytes() - before, pool.num_blocks * pool.block_bytes)


def anonymous_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def test_head_takes_the_memory_that_is_planned(tmp_path: Path) -> None:
    """In a process of its own. Plain matrices: packed ones take less, and the plan does not count on that."""
    model = tmp_path / "nano"
    shutil.copytree(NANO, model, ignore=shutil.ignore_patterns("training.*"))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        plain, packed = (process.submit(measured, model, form).result(timeout=100) for form in ("plain", "packed12"))
    expected = planned("plain")
    print(f"measured {plain}, packed {packed}, planned {expected}")
    assert plain.pool == packed.pool == expected.pool
    assert abs(plain.total - expected.total) <= MAX_DIFFERENCE * expected.total
    assert packed.total < plain.total

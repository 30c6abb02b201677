"""An engine whose model runs on several ranks: followers are threads that read the leader's frames."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.weft.engine.harness import DEADLINE_SECONDS, Driver
from tests.weft.groups.threads import shared_comms
from tests.weft.tiny_llama import Tiny
from weft.engine.device_copier import DeviceCopier
from weft.engine.drafting.drafter import Speculator
from weft.engine.engine import Engine
from weft.engine.executor import DTYPES, ModelExecutor
from weft.engine.group import follow
from weft.engine.runner import assemble
from weft.model.decoder import Decoder
from weft.model.draft import DraftModel
from weft.model.group_rank import GroupRank
from weft.model.sharding import Layout, Shard
from weft_kernels.collectives.shared import SharedComm

CPU = torch.device("cpu")


class Frames:
    """A connection of one follower; it keeps the frames that it carried."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def send(self, frame: bytes) -> None:
        self.sent.append(frame)
        self._waiting.put(frame)

    def close(self) -> None:
        self._waiting.put(None)

    def receive(self) -> bytes | None:
        return self._waiting.get(timeout=2 * DEADLINE_SECONDS)


class AllFrames:
    """Sends to every follower."""

    def __init__(self, links: list[Frames]) -> None:
        self.links = links

    def send(self, frame: bytes) -> None:
        for link in self.links:
            link.send(frame)


class GroupDriver(Driver):
    """A `Driver` of a group."""

    def __init__(self, tiny: Tiny, layout: Layout, dtype: str = "float32", **options: Any) -> None:
        self.layout = layout
        self.links = [Frames() for _ in range(layout.stage_gpus - 1)]
        self.failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        super().__init__(tiny, dtype, "cpu", **options)

    def _build(
        self, dtype: str, device: str, speculator: Speculator | None, make_head: Callable[[Decoder], DraftModel] | None
    ) -> Engine:
        assert make_head is None
        comms = shared_comms(self.layout.stage_gpus)
        engine = assemble(
            self._decoder(comms[0], dtype),
            dtype,
            self.config,
            self._listen,
            speculator=speculator,
            followers=AllFrames(self.links),
        )
        assert engine.pool_memory.shared_fd is not None
        for comm, link in zip(comms[1:], self.links, strict=True):
            work = partial(self._follow, comm, link, dtype, os.dup(engine.pool_memory.shared_fd))
            self._threads.append(threading.Thread(target=work, daemon=True))
            self._threads[-1].start()
        return engine

    def _decoder(self, comm: SharedComm, dtype: str) -> Decoder:
        rank = GroupRank(Shard(self.layout, comm.rank), comm)
        return Decoder(self.tiny.config, self.tiny.weights, DTYPES[dtype], CPU, rank=rank)

    def _follow(self, comm: SharedComm, link: Frames, dtype: str, pool_fd: int) -> None:
        try:
            model = self._decoder(comm, dtype)
            executor = ModelExecutor(model, self.config, dtype, DeviceCopier(CPU), pool_fd=pool_fd)
            follow(executor, link, DTYPES[dtype])
        except BaseException as error:
            self.failures.append(error)
            comm.lose()
            raise

    def __exit__(self, *unused: object) -> None:
        super().__exit__(*unused)
        for link in self.links:
            link.close()
        for thread in self._threads:
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()
        assert not self.failures

"""Our engine on a group of processes in the CPU comparison: one rank for each thread of the task."""

from __future__ import annotations

import os
import shutil
import time

import torch

from loadtest.engine.cpu_ours import Weft
from loadtest.engine.cpu_task import Task, read_task, run_task
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.executor import DTYPES
from weft.engine.runner import assemble
from weft.model.config import ModelConfig
from weft.model.decoder import Decoder
from weft.model.sharding import Layout
from weft.weights.image import image_path
from weft.weights.image_tensors import open_image
from weft.worker.follower import FollowerOrder
from weft.worker.group import Group, start_group


class WeftGroup(Weft):
    """The engine with its followers, as a worker starts them; all share the weights in memory."""

    def _build(self, config: ModelConfig, limits: EngineConfig, task: Task) -> Engine:
        self._image = image_path(f"weft-weights-{0:016x}-{os.getpid():016x}-1-{os.getuid()}.safetensors")
        shutil.copyfile(task.model / "model.safetensors", self._image)
        try:
            return self._assemble(config, limits, task)
        finally:
            self._image.unlink()

    def _assemble(self, config: ModelConfig, limits: EngineConfig, task: Task) -> Engine:
        size_bytes, layout = self._image.stat().st_size, Layout(task.threads)

        def order(place: int) -> FollowerOrder:
            return FollowerOrder(
                worker_id="bench",
                layout=(layout.tp, 1, 1),
                place=place,
                image=self._image.name,
                image_bytes=size_bytes,
                config_json=(task.model / "config.json").read_text(),
                dtype=task.dtype,
                stored_dtype=config.dtype,
                is_resident=True,
                threads=1,
                cpus="",
                niceness=0,
            )

        torch.set_num_threads(1)
        self.group: Group = start_group(layout, order, time.monotonic)
        tensors = open_image(self._image.name, size_bytes)
        dtype = DTYPES[task.dtype]
        model = Decoder(config, tensors, dtype, torch.device("cpu"), is_resident=True, rank=self.group.rank)
        self.group.await_loaded()
        engine = assemble(
            model,
            task.dtype,
            limits,
            lambda output: self._outputs.put((task.clock(), output)),
            followers=self.group,
        )
        assert engine.pool_memory.shared_fd is not None
        self.group.connect(limits, engine.pool_memory.shared_fd)
        return engine


def main() -> None:
    """Run the task of the command line."""
    engine = WeftGroup(task := read_task())
    run_task(task, lambda: engine)
    engine.engine.stop()
    engine.group.close()


if __name__ == "__main__":
    main()

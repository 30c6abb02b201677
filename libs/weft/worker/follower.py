"""The process of a follower: loads its part of the model, then executes the leader's frames until the leader ends.

It has no address, no requests and no tokens: the worker is the leader, and this is a part of its engine.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from weft import log
from weft.engine.config import EngineConfig, set_thread_niceness
from weft.engine.device_copier import DeviceCopier
from weft.engine.executor import DTYPES, ModelExecutor
from weft.engine.group import follow
from weft.kv.layer_groups import AttentionSpan
from weft.kv.memfd import map_file
from weft.kv.parent_death import die_with_parent
from weft.model.config import config_of
from weft.model.decoder import Decoder
from weft.model.fields import Fields
from weft.model.group_rank import GroupRank
from weft.model.sharding import Layout, Shard
from weft.options import parse_cpus
from weft.weights.image_tensors import open_image
from weft.worker.group_link import MessageSocket
from weft.worker.os_tuning import disable_malloc_trim, move_to_cpus
from weft_kernels.collectives.shared import SharedComm, shared_bytes

logger = logging.getLogger(__name__)
BEAT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class FollowerOrder:
    """What a follower needs to load its part; the leader sends it as JSON.

    `stored_dtype`: that of the checkpoint's plain tensors. `cpus`: see WEFT_CPUS; empty for all.
    """

    worker_id: str
    layout: tuple[int, int, int]
    place: int
    image: str
    image_bytes: int
    config_json: str
    dtype: str
    stored_dtype: str
    is_resident: bool
    threads: int
    cpus: str
    niceness: int


def main() -> None:
    """Serve the leader. Arguments: its process id, and descriptors of two sockets and the shared memory."""
    parent, frames_fd, life_fd, memory_fd = map(int, sys.argv[1:])
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C is for the leader, which drains and then ends this process.
        signal.signal(number, signal.SIG_IGN)
    link = MessageSocket(socket.socket(fileno=frames_fd))
    threading.Thread(target=_beat, args=(socket.socket(fileno=life_fd),), daemon=True).start()
    order = _receive_order(link)
    log.setup(f"{order.worker_id}.{order.place}")
    if order.cpus:
        move_to_cpus(parse_cpus(order.cpus))  # This process has inherited the cores of the leader.
    torch.set_num_threads(order.threads)
    disable_malloc_trim()
    size = order.layout[0]
    comm = SharedComm(order.place, size, map_file(memory_fd, shared_bytes(size), is_writable=True))
    model = _load(order, comm)
    link.send(b"loaded")
    _execute(link, model, order)


def _receive_order(link: MessageSocket) -> FollowerOrder:
    data = link.receive()
    if data is None:
        sys.exit("the leader has ended")
    fields = json.loads(data)
    return FollowerOrder(**{**fields, "layout": tuple(fields["layout"])})


def _load(order: FollowerOrder, comm: SharedComm) -> Decoder:
    config = config_of(Fields(Path("config.json"), json.loads(order.config_json)))
    config = replace(config, dtype=order.stored_dtype)
    began, tensors = time.monotonic(), open_image(order.image, order.image_bytes)
    rank = GroupRank(Shard(Layout(*order.layout), order.place), comm)
    model = Decoder(config, tensors, DTYPES[order.dtype], torch.device("cpu"), order.is_resident, rank=rank)
    logger.info("rank loaded place=%d seconds=%.1f", order.place, time.monotonic() - began)
    return model


def _execute(link: MessageSocket, model: Decoder, order: FollowerOrder) -> None:
    limits = link.receive()
    if limits is None:
        return
    _, (pool_fd, *_), _, _ = socket.recv_fds(link.stream, 1, 1)
    executor = ModelExecutor(
        model, read_limits(limits), order.dtype, DeviceCopier(torch.device("cpu")), pool_fd=pool_fd
    )
    link.send(b"ready")
    set_thread_niceness(order.niceness)
    follow(executor, link, DTYPES[order.dtype])


def write_limits(config: EngineConfig) -> bytes:
    """Return what followers need to know of the engine's limits."""
    spans = [[span.window, span.chunk] for span in config.spans]
    names = ("num_blocks", "block_tokens", "vocab_size", "max_context_tokens", "chunk_tokens", "max_num_seqs")
    return json.dumps({"spans": spans, **{name: getattr(config, name) for name in names}}).encode()


def read_limits(data: bytes) -> EngineConfig:
    """Read what `write_limits` wrote."""
    fields = json.loads(data)
    return EngineConfig(**{**fields, "spans": tuple(AttentionSpan(*span) for span in fields["spans"])})


def _beat(life: socket.socket) -> None:
    """Tell the leader that this process runs, also while its main thread waits; end with the leader."""
    try:
        while True:
            life.sendall(b".")
            time.sleep(BEAT_SECONDS)
    except OSError:
        os._exit(1)


if __name__ == "__main__":
    main()

"""The leader's side of a group: starts the followers of this machine, sends them frames, and notices when one is lost.

A group that lost a rank cannot go on: collectives of the others would wait for ever. So all waiting ends at once, the
worker's process ends with a line that names the rank, and its supervisor starts the whole group again.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field

from weft import metrics
from weft.engine.config import EngineConfig
from weft.errors import EngineFailed, PeerLost
from weft.kv.memfd import create_shared_memory, map_file
from weft.kv.parent_death import inherit_autogroup
from weft.model.group_rank import GroupRank
from weft.model.sharding import Layout, Shard
from weft.worker.follower import FollowerOrder, write_limits
from weft.worker.group_link import SEND_SECONDS, MessageSocket
from weft_kernels.collectives.shared import SharedComm, shared_bytes

logger = logging.getLogger(__name__)
# A follower loads as much as the leader; the weights are in memory by then.
LOAD_SECONDS = 900.0
# Signs of life come twice a second. A rank that is silent for longer does not run.
SILENCE_SECONDS = 5.0
LOOK_SECONDS = 0.25
END_SECONDS = 2.0


@dataclass(slots=True)
class _Follower:
    """One process, with the leader's ends of its sockets."""

    place: int
    process: subprocess.Popen[bytes]
    frames: MessageSocket
    life: socket.socket
    heard_at: float = 0.0


@dataclass(slots=True)
class Group:
    """The ranks of this worker's model. `followers` are processes of their own; this process is rank 0."""

    layout: Layout
    comm: SharedComm
    followers: list[_Follower]
    clock: Callable[[], float]
    on_lost: Callable[[str], object] = lambda reason: None
    lost: str = ""
    _is_closing: threading.Event = field(default_factory=threading.Event)
    _watching: threading.Thread | None = None

    @property
    def rank(self) -> GroupRank:
        """This process' place."""
        return GroupRank(Shard(self.layout, 0), self.comm)

    @property
    def pids(self) -> list[int]:
        """Process ids of the followers, by place."""
        return [each.process.pid for each in self.followers]

    def send(self, frame: bytes) -> None:
        """Send a frame to every follower. Raises PeerLost."""
        for each in self.followers:
            each.frames.send(frame)
        metrics.GROUP_FRAME_BYTES.inc(len(frame))

    def await_loaded(self) -> None:
        """Wait until every follower has loaded its part. Raises EngineFailed."""
        self._expect(b"loaded", LOAD_SECONDS)

    def connect(self, config: EngineConfig, pool_fd: int) -> None:
        """Give the followers the engine's limits and the memory of its pool. Raises EngineFailed."""
        for each in self.followers:
            each.frames.send(write_limits(config))
            socket.send_fds(each.frames.stream, [b"p"], [pool_fd])
        self._expect(b"ready", LOAD_SECONDS)
        for each in self.followers:
            each.frames.stream.settimeout(SEND_SECONDS)
        self._watching = threading.Thread(target=self._watch, name="weft-group", daemon=True)
        self._watching.start()

    def _expect(self, answer: bytes, seconds: float) -> None:
        for each in self.followers:
            each.frames.stream.settimeout(seconds)
            try:
                found = each.frames.receive()
            except PeerLost as error:
                raise EngineFailed(f"rank {each.place} does not load: {error}") from error
            if found != answer:
                raise EngineFailed(f"rank {each.place} ended while it loaded ({_ending(each.process)}); see its lines")

    def _watch(self) -> None:
        """Look at the signs of life until the group is closed, or a rank is lost."""
        with selectors.DefaultSelector() as selector:
            for each in self.followers:
                each.heard_at = self.clock()
                selector.register(each.life, selectors.EVENT_READ, each)
            while not self._is_closing.is_set() and not self.lost:
                for key, _ in selector.select(LOOK_SECONDS):
                    follower: _Follower = key.data
                    follower.heard_at = self.clock()
                    if not self._hears(follower):
                        self._lose(f"rank {follower.place} has ended ({_ending(follower.process)})")
                silent = [each for each in self.followers if self.clock() - each.heard_at > SILENCE_SECONDS]
                if silent:
                    self._lose(f"rank {silent[0].place} gave no sign of life for {SILENCE_SECONDS:g} s")

    def _hears(self, follower: _Follower) -> bool:
        with suppress(OSError):
            return bool(follower.life.recv(4096))
        return False

    def _lose(self, reason: str) -> None:
        if self.lost or self._is_closing.is_set():
            return
        self.lost = reason
        logger.error("group lost, the worker ends reason=%r", reason)
        self.comm.lose()
        self.on_lost(reason)

    def close(self) -> None:
        """End all followers; they have nothing to save."""
        self._is_closing.set()
        self.comm.lose()
        for each in self.followers:
            each.frames.stream.close()
            each.process.kill()
        for each in self.followers:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(END_SECONDS)
            each.life.close()
        if self._watching is not None:
            self._watching.join(END_SECONDS)


def start_group(layout: Layout, order: Callable[[int], FollowerOrder], clock: Callable[[], float]) -> Group:
    """Start the followers and send each its order.

    Call it on the main thread: the kernel ends a follower with the thread that started it. Raises EngineFailed.
    """
    size = layout.num_gpus
    shared = create_shared_memory(shared_bytes(size), "weft-group")
    if shared is None:
        raise EngineFailed("groups need memory that processes share, which this system does not have")
    comm = SharedComm(0, size, map_file(os.dup(shared.fd), shared_bytes(size), is_writable=True))
    group = Group(layout, comm, [], clock)
    try:
        for place in range(1, size):
            group.followers.append(_start(place, shared.fd))
            group.followers[-1].frames.send(json.dumps(asdict(order(place))).encode())
    except (OSError, PeerLost) as error:
        group.close()
        raise EngineFailed(f"rank {len(group.followers)} cannot start: {error}") from error
    return group


def _start(place: int, memory_fd: int) -> _Follower:
    with ExitStack() as theirs_to_close:
        frames, theirs = socket.socketpair()
        theirs_to_close.callback(theirs.close)
        life, their_life = socket.socketpair()
        theirs_to_close.callback(their_life.close)
        fds = theirs.fileno(), their_life.fileno(), memory_fd
        process = subprocess.Popen(
            [sys.executable, "-m", "weft.worker.follower", str(os.getpid()), *map(str, fds)],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C in the terminal is for the leader.
        )
    inherit_autogroup(process.pid)
    return _Follower(place, process, MessageSocket(frames), life)


def _ending(process: subprocess.Popen[bytes]) -> str:
    """Return how a process ended."""
    with suppress(subprocess.TimeoutExpired):
        status = process.wait(END_SECONDS)
        return f"signal {-status}" if status < 0 else f"status {status}"
    return "it still runs"

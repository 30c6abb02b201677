"""Cells with real processes: a mesh of one prefill and two decode workers, hit by signals.

Each fault strikes once, while a request is in each of the states and another one is generated beside them. Where it
strikes kvstore, one more has just been asked whose prompt lies there alone.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import pytest

from tests.chaos.stream import PATIENCE_SECONDS, Stream
from tests.chaos.witness import witnessed
from tests.mesh.conftest import Mesh, wait_until
from tests.mesh.oracle import FIRST_ORDINARY, text_ids

pytestmark = pytest.mark.timeout(300)
LEASE_SECONDS = 3.0
NUM_WORKERS = 3
# within the lease, and long after everybody has given the frozen one up
SHORT_SECONDS, LONG_SECONDS = 1.0, 5.0
# a state: tokens of prompt and answer
STATES = {"finished": (150, 6), "decoding": (150, 600), "prefilling": (1900, 6), "queued": (150, 6)}
STORED = "in the store"
NUM_STORED_TOKENS, NUM_KEPT, NUM_TRIES, BLOCK_TOKENS = 320, 12, 5, 16
BESIDE = (200, 300)
# where its tokens must come from two workers: the answer is longer by what a quick processor may decode on the way of
# a signal
NUM_TO_GO = 300
NUM_SALTS = 1600
_numbers = itertools.count()


@pytest.fixture(scope="module")
def chaos_mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Small chunks, so that there is much hand-off over the transport that is the parameter; a short lease; time to
    start again even on a busy machine. What the store has, in memory or on its disk, is always fetched."""
    environment = {
        "WEFT_CHUNK_TOKENS": "16",
        "WEFT_LEASE_SECONDS": str(LEASE_SECONDS),
        "WEFT_MIGRATION_TIMEOUT_SECONDS": "120",
    }
    environment["WEFT_STORE_FETCH_POLICY"] = "always"
    disk = str(tmp_path_factory.mktemp("disk"))
    running = Mesh("--transport", request.param, "--decode", "2", "--disk", disk, environment=environment)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def shelf(chaos_mesh: Mesh) -> Shelf:
    """The mesh's."""
    return Shelf(chaos_mesh)


class Shelf:
    """Prompts whose blocks lie in the store and in no pool: the workers that computed them are gone."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._prompts: list[list[int]] = []

    def take(self) -> list[int]:
        """One of them; from now on it may be in pools, too."""
        if not self._prompts:
            self._fill()
        return self._prompts.pop()

    def expect_in_use(self) -> None:
        """A prompt is really fetched. Workers that have just started may need a moment to find the store."""
        tries = []
        for _ in range(NUM_TRIES):
            before, stream = self._num_fetched(), Stream(self._mesh, self.take(), 2)
            stream.read()
            stream.expect_right()
            tries.append(self._num_fetched() - before)
            if tries[-1] == (NUM_STORED_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS:
                return
            time.sleep(1.0)
        raise AssertionError(f"tokens fetched from the store, of prompts of {NUM_STORED_TOKENS}: {tries}")

    def _fill(self) -> None:
        mesh = self._mesh
        self._prompts = [fresh_prompt(NUM_STORED_TOKENS) for _ in range(NUM_KEPT)]
        for prompt in self._prompts:
            Stream(mesh, prompt, 1).read()
        mesh.wait_idle()
        mesh.kill_and_wait_for_return(*mesh.boots())

    def _num_fetched(self) -> float:
        name = "weft_prefix_cache_hit_tokens_total"
        metric, workers = self._mesh.metric, self._mesh.workers()
        return sum(metric(worker, name, tier=tier) for worker in workers for tier in ("dram", "nvme"))


@dataclass
class Scene:
    """A request in each state, of one session, and one beside them. `decode_id`: where the one that decodes does so.

    `stored`: the prompt of one that has just been asked, if there is to be such. `num_to_go`: tokens that the one that
    decodes has still before it.
    """

    mesh: Mesh
    threads: ThreadPoolExecutor
    stored: list[int] = field(default_factory=list)
    num_to_go: int = 0
    victims: dict[str, Stream] = field(default_factory=dict)
    readings: list[Future[None]] = field(default_factory=list)
    decode_id: str = ""

    def begin(self) -> None:
        """Reach every state, the longest one first."""
        session = f"session-{next(_numbers)}"
        for state, (num_prompt, num_tokens) in STATES.items():
            num_tokens += self.num_to_go if state == "decoding" else 0
            self.victims[state] = Stream(self.mesh, fresh_prompt(num_prompt), num_tokens, session)
        self.beside = Stream(self.mesh, fresh_prompt(BESIDE[0]), BESIDE[1])
        self._read(self.victims["finished"]).result(PATIENCE_SECONDS)
        wait_until("nobody is decoded", lambda: not self._decoding())
        self._read(self.victims["decoding"])
        wait_until("tokens come", lambda: len(self.victims["decoding"].tokens) >= 3)
        self.decode_id = next(iter(self._decoding()), "")
        self._read(self.beside)
        wait_until("the one beside them has begun", lambda: bool(self.beside.tokens))
        self._read(self.victims["prefilling"])
        # its own tokens: those of the others may still be on the books
        wait_until("the prompt is placed", self._is_placed)
        self._read(self.victims["queued"])
        if self.stored:
            self.victims[STORED] = Stream(self.mesh, self.stored, 6)
            self._read(self.victims[STORED])

    def too_far(self) -> list[str]:
        """Who has come further than is asked for."""
        begun = [state for state in ("prefilling", "queued") if self.victims[state].tokens]
        ended = [name for name, it in (("decoding", self.victims["decoding"]), ("beside", self.beside)) if it.ends]
        if not ended and len(self.victims["decoding"].tokens) > STATES["decoding"][1]:
            ended.append("decoding, nearly")
        return begun + ended + ([] if self.decode_id else ["placed"])

    def leave(self) -> None:
        """The clients of all victims."""
        for victim in self.victims.values():
            victim.leaves.set()

    def end(self) -> None:
        """Everybody has come to an end."""
        for reading in self.readings:
            reading.result(PATIENCE_SECONDS)

    def _is_placed(self) -> bool:
        """Or further already, where it came and went between two looks: `too_far` will say so."""
        begun = self.victims["prefilling"].tokens
        return bool(begun) or self.mesh.workers()["prefill-0"].booked_prefill_tokens > 1500

    def _decoding(self) -> list[str]:
        """Workers that have something to decode."""
        statuses = self.mesh.workers().items()
        return [name for name, status in statuses if name.startswith("decode") and status.booked_requests]

    def _read(self, stream: Stream) -> Future[None]:
        reading = self.threads.submit(stream.read)
        self.readings.append(reading)
        return reading


def fresh_prompt(length: int) -> list[int]:
    """Its first tokens are no other prompt's, so nobody has a block of it."""
    index, salt = divmod(next(_numbers), NUM_SALTS)
    start = [FIRST_ORDINARY + 100 + salt, FIRST_ORDINARY + 100 + index]
    return [*start, *(4 * text_ids())][:length]


def _frozen(mesh: Mesh, name: str, seconds: float) -> None:
    process = mesh.valkey() if name == "valkey" else mesh.child(name)
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)


def _killed(mesh: Mesh, *names: str) -> None:
    for name in names:
        (mesh.valkey() if name == "valkey" else mesh.child(name)).send_signal(signal.SIGKILL)


# kills of workers lie apart: the process that is kept ready for the next one takes some seconds itself
FAULTS: dict[str, Callable[[Scene], None]] = {
    "SIGKILL prefill": lambda scene: _killed(scene.mesh, "prefill-0"),
    "valkey frozen": lambda scene: _frozen(scene.mesh, "valkey", SHORT_SECONDS),
    "SIGSTOP prefill, long": lambda scene: _frozen(scene.mesh, "prefill-0", LONG_SECONDS),
    "SIGKILL decode": lambda scene: _killed(scene.mesh, scene.decode_id),
    "kvstore dead": lambda scene: _killed(scene.mesh, "kvstore"),
    "SIGSTOP decode, short": lambda scene: _frozen(scene.mesh, scene.decode_id, SHORT_SECONDS),
    "SIGSTOP decode, long": lambda scene: _frozen(scene.mesh, scene.decode_id, LONG_SECONDS),
    "SIGKILL prefill and decode": lambda scene: _killed(scene.mesh, "prefill-0", scene.decode_id),
    "valkey dead": lambda scene: _killed(scene.mesh, "valkey"),
    "client gone": lambda scene: scene.leave(),
    "SIGSTOP prefill, short": lambda scene: _frozen(scene.mesh, "prefill-0", SHORT_SECONDS),
    "kvstore frozen": lambda scene: _frozen(scene.mesh, "kvstore", LONG_SECONDS),
    "scheduler restarts": lambda scene: _killed(scene.mesh, "scheduler"),
}
# whose tokens must have come from two workers
MOVING = ("SIGKILL decode", "SIGKILL prefill and decode", "SIGSTOP decode, long")
QUICK = ["SIGSTOP prefill, short", "SIGKILL decode"]


def states(strike: str) -> list[str]:
    """What is hurt by it."""
    return [*STATES, STORED] if "kvstore" in strike else [*STATES]


def test_processes(chaos_mesh: Mesh, shelf: Shelf, strike: str) -> None:
    mesh = chaos_mesh
    # the one before may have failed halfway
    wait_until("all workers are there", lambda: _is_whole(mesh), PATIENCE_SECONDS)
    if STORED in states(strike):
        shelf.expect_in_use()
    boots = mesh.boots()
    with witnessed(mesh) as streams:
        with ThreadPoolExecutor(len(states(strike)) + 1) as threads:
            scene = _staged(mesh, threads, strike, shelf)
            streams |= {**scene.victims, "beside": scene.beside}
            FAULTS[strike](scene)
            scene.end()
        _expect_right(scene, strike)
        wait_until("all workers are back", lambda: _are_back(mesh, boots, strike), PATIENCE_SECONDS)
        mesh.wait_idle()
        for state, victim in scene.victims.items():
            after = streams[f"{state}, again"] = Stream(mesh, victim.prompt, 8)
            after.read()
            after.expect_right()


def _expect_right(scene: Scene, strike: str) -> None:
    for state, victim in scene.victims.items():
        if strike != "client gone" or state == "finished":
            victim.expect_right(may_be_refused=state == "queued")
    scene.beside.expect_right()
    assert scene.victims["decoding"].num_attempts > 1 or strike not in MOVING


def _staged(mesh: Mesh, threads: ThreadPoolExecutor, strike: str, shelf: Shelf) -> Scene:
    """Requests come further while the next ones are placed; where one has come too far, all begin anew."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        stored = shelf.take() if STORED in states(strike) else []
        scene = Scene(mesh, threads, stored, NUM_TO_GO if strike in MOVING else 0)
        scene.begin()
        if not (too_far := scene.too_far()):
            return scene
        scene.end()
        assert time.monotonic() < deadline, f"the states were never reached together; at last {too_far} were over"


def _are_back(mesh: Mesh, boots: dict[str, str], fault: str) -> bool:
    return _is_whole(mesh) and ("SIGKILL" not in fault or mesh.boots() != boots)


def _is_whole(mesh: Mesh) -> bool:
    try:
        workers = mesh.workers().values()
    except grpc.RpcError:  # a scheduler that is not back yet
        return False
    return len(workers) == NUM_WORKERS and all(status.report.ready for status in workers) and mesh.is_ready()

"""What a draft head achieves does not depend on where the KV of a prompt comes from, and the text is that without it.

The counts of a cold prompt are those of an engine in this process, which computes everything itself.
"""

from __future__ import annotations

import itertools
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import orjson
import psutil
import pytest

from tests.mesh.conftest import MODEL, ROOT, Mesh, wait_until
from tests.mesh.oracle import prompts, unlikely
from tests.mesh.test_failures import lines, stream_body
from tests.weft.engine.steady_head import SteadyHead
from tests.weft.worker.test_draft_engine import served
from tests.weft.worker.test_startup import arrival, config
from weft.capacity.sizes import choose_sizes
from weft.cli.layout import free_ports
from weft.engine.config import EngineConfig
from weft.engine.drafting.drafter import DraftSource
from weft.engine.engine import Engine
from weft.engine.messages import SequenceMode, SequenceSpec, StepOutput
from weft.engine.runner import assemble
from weft.model.decoder import Decoder
from weft.request import RequestKey, SamplingParams
from weft.weights.checkpoint import read_checkpoint
from weft.weights.draft_checkpoint import read_draft
from weft.worker import startup
from weft.worker.startup import WeightImages
from weft_mesh.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc

pytestmark = pytest.mark.timeout(300)
BLOCK = 16
LENGTHS = (70, 150)  # the ends of prompts lie at other places in their blocks
NUM_TOKENS, NUM_MOVED_TOKENS = 150, 400
WORKERS = "steady-0", "steady-1"
MAX_DIFFERENCE = 0.02
NUM_TRIES = 8
CACHED = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
TRANSFERRED, HITS = "weft_kv_transfer_bytes_total", "weft_prefix_cache_hit_tokens_total"


@dataclass(frozen=True)
class Achieved:
    """Proposals of a head that steps verified, and how many of their tokens were accepted."""

    proposals: float
    accepted: float

    def __sub__(self, other: Achieved) -> Achieved:
        return Achieved(self.proposals - other.proposals, self.accepted - other.accepted)

    def __add__(self, other: Achieved) -> Achieved:
        return Achieved(self.proposals + other.proposals, self.accepted + other.accepted)

    def assert_near(self, cold: Achieved) -> None:
        length, expected = self.accepted / self.proposals, cold.accepted / cold.proposals
        print(f"accepted tokens per step {length:.4f}, cold {expected:.4f}: {self}, {cold}")
        assert abs(length - expected) <= MAX_DIFFERENCE * expected, (self, cold)


@dataclass(frozen=True)
class Cold:
    """A text, and what the head achieved in it."""

    tokens: list[int]
    achieved: Achieved


class ColdEngine:
    """The engine of a worker without a mesh. It finds no prompt in its cache."""

    def __init__(self, images: WeightImages) -> None:
        own = config(MODEL=str(MODEL), NUM_BLOCKS="400", DTYPE="float32", WEIGHT_FORMAT="plain", THREADS="1")
        self._speculator, self._names = SteadyHead(), itertools.count()
        self._outputs: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        sizes = choose_sizes(own.wanted, False)
        self._engine = startup._build(own, sizes, images, self._assemble, arrival()).engine

    def __enter__(self) -> ColdEngine:
        self._engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.stop()

    def generate(self, prompt: Sequence[int], num_tokens: int) -> Cold:
        """Generate a text; it must be that of transformers."""
        key, tokens, reason, before = RequestKey(f"cold-{next(self._names)}"), list[int](), None, self._achieved()
        sampling, salt = SamplingParams(num_tokens, ignore_eos=True), key.request_id.encode()
        self._engine.submit(SequenceSpec(key, tuple(prompt), sampling, SequenceMode.GENERATE, salt))
        while reason is None:
            output = self._outputs.get(timeout=60)
            assert not output.failures
            for delta in output.deltas:
                assert not (delta.prompt and delta.prompt.num_cached_tokens)
                tokens, reason = tokens + list(delta.token_ids), delta.finish_reason
        assert len(tokens) == num_tokens
        assert not unlikely(list(prompt), tokens)
        return Cold(tokens, self._achieved() - before)

    def _assemble(self, model: Decoder, dtype: str, limits: EngineConfig, **parts: Any) -> Engine:
        return assemble(model, dtype, limits, self._outputs.put, **parts | {"speculator": self._speculator})

    def _achieved(self) -> Achieved:
        head = self._speculator.stats().sources[DraftSource.HEAD]
        return Achieved(head.num_proposals, sum(head.accepted))


@contextmanager
def shipped_images() -> Iterator[WeightImages]:
    """The model and its head, in a directory of their own, after which images are named."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_images:
        model = Path(folder) / "nano"
        shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("training.*"))
        head = read_draft("auto", model)
        assert head is not None
        parts = read_checkpoint(model), head.checkpoint
        yield WeightImages(*(open_images.enter_context(served(each)) for each in parts))


@pytest.fixture(scope="module")
def cold() -> Iterator[ColdEngine]:
    with shipped_images() as images, ColdEngine(images) as engine:
        yield engine


class SteadyWorkers:
    """Two decode workers of a mesh that always draft. `use` says which of its workers decodes from now on."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        like = mesh.child("decode-0").environ()
        self._scheduler = like["WEFT_SCHEDULER_ADDR"]
        self._processes = {name: _start(name, like) for name in WORKERS}
        wait_until("the workers that always draft are ready", self._are_ready)

    def stop(self) -> None:
        """Leave the mesh as it was."""
        self.use("decode-0")
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait(30)
        wait_until("they have left", lambda: not self._processes.keys() & self.mesh.workers().keys())

    def use(self, *names: str) -> None:
        """Only these decode."""
        others = {"decode-0", *self._processes} - set(names)
        with grpc.insecure_channel(self._scheduler) as channel:
            stub: Any = scheduler_service_pb2_grpc.FleetServiceStub(channel)
            for name in (each for each in (*names, *others) if each in self.mesh.workers()):
                stub.Drain(scheduler_service_pb2.DrainRequest(worker_id=name, undo=name in names), timeout=10)
        wait_until(f"{names} decode", lambda: self._decoding() == set(names))

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait(10)

    def achieved(self, name: str) -> Achieved:
        counted = partial(self.mesh.metric, name, source="head")
        return Achieved(counted("weft_spec_drafts_total"), counted("weft_spec_accepted_tokens_total"))

    def ask(self, name: str, prompt: list[int], num_tokens: int = NUM_TOKENS) -> Answer:
        """Ask the mesh, of which the worker decodes."""
        before = self._counts(name)
        body = {"model": "weft-nano", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        reply = self.mesh.client.post("/v1/completions", json=body | {"return_token_ids": True})
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        achieved, moved, stored = self._counts(name)
        num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        tokens = answer["choices"][0]["token_ids"]
        return Answer(tokens, achieved - before[0], moved - before[1], stored - before[2], num_cached)

    def _counts(self, name: str) -> tuple[Achieved, float, float]:
        stored = sum(self.mesh.metric("prefill-0", HITS, tier=tier) for tier in ("dram", "nvme"))
        return self.achieved(name), self.mesh.metric(name, TRANSFERRED), stored

    def _are_ready(self) -> bool:
        workers = self.mesh.workers()
        return all(name in workers and workers[name].report.ready for name in WORKERS)

    def _decoding(self) -> set[str]:
        return {
            name
            for name, status in self.mesh.workers().items()
            if name != "prefill-0" and status.report.ready and not status.report.draining
        }


@dataclass(frozen=True)
class Answer:
    """What came of a request. `moved_bytes`: of KV that the decode worker pulled. `stored_tokens`: from the store."""

    tokens: list[int]
    achieved: Achieved
    moved_bytes: float
    stored_tokens: float
    num_cached: int


def _start(name: str, like: Mapping[str, str]) -> psutil.Popen:
    (port,) = free_ports(1)
    own = {"WEFT_WORKER_ID": name, "WEFT_PORT": str(port), "WEFT_METRICS_PORT": "0", "WEFT_ROLE": "decode"}
    settings = {each: value for each, value in like.items() if each.startswith("WEFT_")}
    command = [sys.executable, "-m", "tests.mesh.steady_worker"]
    environ = {**os.environ, **settings, **own}
    return psutil.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture
def steady(mesh: Mesh) -> Iterator[SteadyWorkers]:
    workers = SteadyWorkers(mesh)
    try:
        yield workers
    finally:
        workers.stop()


def test_head_achieves_the_same_wherever_kv_comes_from(cold: ColdEngine, steady: SteadyWorkers) -> None:
    first, second = WORKERS
    asked = Texts(cold, salt=60)
    stored = Texts(cold, salt=70)

    steady.use(first)
    handed_over = asked.ask(steady, first)
    assert all(answer.moved_bytes and not answer.num_cached for answer in handed_over)
    in_pool = asked.ask(steady, first)
    assert all(answer.num_cached and not answer.moved_bytes for answer in in_pool)
    stored.ask(steady, first)
    tries = prompts(NUM_TRIES, 40, 40, salt=90)
    for prompt in tries:
        steady.ask(first, prompt, 1)

    expect_migrated(cold, steady)

    in_prefill = asked.ask(steady, second)
    assert [answer.num_cached for answer in in_prefill] == CACHED
    assert all(answer.moved_bytes and not answer.stored_tokens for answer in in_prefill)
    steady.mesh.wait_idle()  # with all blocks in the store
    steady.mesh.kill_and_wait_for_return("prefill-0")
    expect_store_in_use(steady, second, tries)
    in_store = stored.ask(steady, second)
    assert [answer.stored_tokens for answer in in_store] == CACHED
    assert all(answer.moved_bytes for answer in in_store)


class Texts:
    """Prompts, and what comes of them cold."""

    def __init__(self, cold: ColdEngine, salt: int) -> None:
        self.prompts = [prompts(1, length, length, salt + place)[0] for place, length in enumerate(LENGTHS)]
        self.cold = [cold.generate(prompt, NUM_TOKENS) for prompt in self.prompts]

    def ask(self, steady: SteadyWorkers, name: str) -> list[Answer]:
        """Ask with all of them: the texts and what the head achieves must be as they are cold."""
        answers = [steady.ask(name, prompt) for prompt in self.prompts]
        assert [answer.tokens for answer in answers] == [each.tokens for each in self.cold]
        sum_of(each.achieved for each in answers).assert_near(sum_of(each.achieved for each in self.cold))
        return answers


def sum_of(parts: Iterable[Achieved]) -> Achieved:
    return sum(parts, Achieved(0, 0))


def expect_store_in_use(steady: SteadyWorkers, name: str, tries: list[list[int]]) -> None:
    """Ask until a prompt comes from the store: a worker that has just started may need a moment to find it."""
    for prompt in tries:
        if steady.ask(name, prompt, 1).stored_tokens:
            return
        time.sleep(1.0)
    raise AssertionError("no prompt came from the store")


def expect_migrated(cold: ColdEngine, steady: SteadyWorkers) -> None:
    """A stream that drafts loses its worker, and continues on the other one."""
    first, second = WORKERS
    mesh, (prompt,) = steady.mesh, prompts(1, 100, 100, salt=80)
    generated = partial(mesh.metric, second, "weft_engine_tokens_total", kind="generated")
    before, achieved, tokens, has_drafts = generated(), steady.achieved(second), list[int](), False
    body = stream_body(prompt, NUM_MOVED_TOKENS)
    body |= {"return_token_ids": True, "stream_options": {"include_draft_tokens": True}}
    with mesh.client.stream("POST", "/v1/completions", json=body) as response:
        for frame in itertools.takewhile(lambda frame: frame != "[DONE]", lines(response)):
            (choice,) = orjson.loads(frame)["choices"]
            tokens += choice["token_ids"]
            if choice.get("is_draft") and not has_drafts:
                has_drafts = True
                steady.kill(first)
                steady.use(second)
    assert has_drafts
    assert tokens == cold.generate(prompt, NUM_MOVED_TOKENS).tokens
    num_moved = int(generated() - before)
    assert NUM_MOVED_TOKENS // 2 < num_moved < NUM_MOVED_TOKENS
    rest = cold.generate(prompt + tokens[:-num_moved], num_moved)
    (steady.achieved(second) - achieved).assert_near(rest.achieved)

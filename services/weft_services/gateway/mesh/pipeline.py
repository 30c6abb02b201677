"""The path from a parsed request to a run on the mesh, for REST and gRPC. Bounds the requests in flight."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from typing import TypeVar

from weft import metrics
from weft.errors import Overloaded, PeerLost, Unauthenticated, WeftError
from weft_services.gateway.access.authentication import Principal, current_principal
from weft_services.gateway.generation import Conversation, Embedding, Generation
from weft_services.gateway.mesh.embeddings import EmbeddingRunner
from weft_services.gateway.mesh.fleet import FleetWatcher
from weft_services.gateway.mesh.generation_run import GenerationRun, MeshContext
from weft_services.gateway.mesh.prepare import (
    PreparedEmbedding,
    PreparedRequest,
    count,
    prepare,
    prepare_embedding,
)
from weft_services.gateway.mesh.routing_hints import ClientHints, read_client_hints
from weft_services.gateway.model import Catalog, ServedModel

# Parsing a body up to this size is faster than waking a thread for it.
SHORT_BYTES = 2048
# Threads for longer ones.
NUM_THREADS = 2
# Each thread has one job queued, because the event loop may be busy when it finishes.
NUM_HANDED_OUT = 2 * NUM_THREADS
ResultT = TypeVar("ResultT")
Slot = asyncio.Future[None]


class Pipeline:
    """Admits, prepares and starts requests; one per process."""

    def __init__(
        self, models: Catalog, mesh: MeshContext, embeddings: EmbeddingRunner, fleet: FleetWatcher, max_requests: int
    ) -> None:
        self.models = models
        self.embeddings = embeddings
        self.fleet = fleet
        self.scheduler = mesh.scheduler
        self.num_in_flight = 0
        self.is_draining = False
        self._mesh = mesh
        self._max_requests = max_requests
        self._num_by_tenant: Counter[str] = Counter()
        self._in_flight: dict[asyncio.Task[object], Principal] = {}
        # tasks aborted here, and the error for the client
        self._abort_errors: dict[asyncio.Task[object], WeftError] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._text_pool = FairThreadPool()

    @property
    def is_ready(self) -> bool:
        """True if new requests are accepted for at least one model."""
        return self.fleet.is_ready and not self.is_draining

    @property
    def reasons(self) -> list[str]:
        """Why new requests are rejected, for all models or some."""
        return ["shutting down"] if self.is_draining else self.fleet.reasons

    def max_context_tokens(self, model: ServedModel) -> int:
        """Limit of prompt and answer together, from the model and its workers."""
        return min(model.max_context_tokens, self.fleet.of(model.name).max_context_tokens or model.max_context_tokens)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count the current task as a request in flight.

        Raises RateLimited, Overloaded, or PeerLost while shutting down.
        """
        principal = current_principal.get()
        principal.check_quota()
        if self.is_draining:
            raise PeerLost("the gateway is shutting down")
        if self.num_in_flight >= self._max_requests:
            # Retry-After stays at one second: with so many requests in flight, some end within it.
            raise Overloaded(f"{self._max_requests} requests are in flight already; retry later")
        num_own = self._num_by_tenant[principal.tenant]
        if principal.shares_capacity and num_own >= self._tenant_limit(num_own):
            raise Overloaded(f"{num_own} requests of this tenant are in flight already; retry later")
        self._num_by_tenant[principal.tenant] += 1
        self.num_in_flight += 1
        self._idle.clear()
        metrics.IN_FLIGHT.set(self.num_in_flight)
        task = asyncio.current_task()
        assert task is not None
        self._in_flight[task] = principal
        try:
            yield
        except asyncio.CancelledError:
            # Convert only our own cancellation; re-raise any other (same rule as asyncio.timeout).
            if (why := self._abort_errors.get(task)) is None or task.uncancel() > 0:
                raise
            raise why from None
        finally:
            del self._in_flight[task]
            self._abort_errors.pop(task, None)
            self._num_by_tenant[principal.tenant] -= 1
            if not self._num_by_tenant[principal.tenant]:
                del self._num_by_tenant[principal.tenant]
            self.num_in_flight -= 1
            metrics.IN_FLIGHT.set(self.num_in_flight)
            if self.num_in_flight == 0:
                self._idle.set()

    def _tenant_limit(self, num_own: int) -> int:
        """Return the limit of one of several tenants: half of what the others leave."""
        return max(1, (self._max_requests - (self.num_in_flight - num_own)) // 2)

    async def wait_idle(self, seconds: float) -> None:
        """Wait until no request is in flight, for at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    def abort_all(self) -> None:
        """End all requests with an error that clients can read."""
        for task in self._in_flight:
            self._abort(task, PeerLost("the gateway is shutting down"))

    def abort_revoked(self) -> None:
        """End the requests of revoked API keys."""
        for task, principal in self._in_flight.items():
            if principal.is_revoked:
                self._abort(task, Unauthenticated("this API key was revoked"))

    def _abort(self, task: asyncio.Task[object], why: WeftError) -> None:
        if task not in self._abort_errors:
            self._abort_errors[task] = why
            task.cancel()

    async def prepare(
        self, parse: Callable[[bytes], Generation], body: bytes, num_earlier_bytes: int = 0
    ) -> PreparedRequest:
        """Parse, render, tokenize and hash. Raises InvalidRequest, NotFound or RateLimited.

        Every request counts against its key's request limit; only a valid one counts against the token limit.
        `num_earlier_bytes`: size of what `parse` reads in addition to the body.
        """
        if len(body) + num_earlier_bytes > SHORT_BYTES:
            prepared = await self.compute_charged(lambda: self._prepare(parse(body)))
        else:
            prepared = await self._prepare_short(parse, body)
        await current_principal.get().take_quota(prepared.num_prompt_tokens)
        return prepared

    async def count(self, parse: Callable[[bytes], Generation], body: bytes) -> tuple[ServedModel, int]:
        """Return the model and the prompt length of a request that will not run. Raises as `prepare`."""

        def work() -> tuple[ServedModel, int]:
            generation = parse(body)
            model = self.models.resolve(generation.model)
            return model, count(generation, model, self.max_context_tokens(model))

        counted = await self.compute_charged(work)
        await current_principal.get().take_quota(0)
        return counted

    async def _prepare_short(self, parse: Callable[[bytes], Generation], body: bytes) -> PreparedRequest:
        """Prepare on the event loop, except grammars: their cost does not depend on their length."""
        with charge_on_error():
            generation = parse(body)
            if generation.answer_format is None and generation.tool_use is None:
                return self._prepare(generation)
        return await self.compute_charged(lambda: self._prepare(generation))

    def _prepare(self, generation: Generation) -> PreparedRequest:
        model = self.models.resolve(generation.model)
        if not generation.model:
            generation = replace(generation, model=model.name)
        return prepare(generation, model, self.fleet.of(model.name).block_tokens, self.max_context_tokens(model))

    async def prepare_embedding(self, parse: Callable[[], Embedding]) -> PreparedEmbedding:
        """Prepare an embedding request; see `prepare`."""

        def work() -> PreparedEmbedding:
            asked = parse()
            model = self.models.resolve(asked.model)
            return prepare_embedding(replace(asked, model=model.name), model, self.max_context_tokens(model))

        prepared = await self.compute_charged(work)
        await current_principal.get().take_quota(prepared.num_tokens)
        return prepared

    async def compute_charged(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in a thread; an error counts as a request."""
        with charge_on_error():
            return await self.compute(work)

    async def compute_counted(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in a thread and count it as a request."""
        await current_principal.get().take_quota(0)
        return await self.compute(work)

    async def compute(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in a thread without counting it."""
        return await self._text_pool.run(work)

    def start_run(self, prepared: PreparedRequest, client: ClientHints, timeout_seconds: float) -> GenerationRun:
        """Return the run of a prepared request; entering it starts the sequences. Headers override the body's hints."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        is_chat = isinstance(prepared.generation.prompts[0], Conversation)
        codec = prepared.model.chat_codec if is_chat else prepared.model.codec
        hints = client.with_principal(current_principal.get()).routing_hints(
            prepared.generation.session, prepared.generation.priority
        )
        return GenerationRun(self._mesh, prepared, codec, hints, deadline)

    def close(self) -> None:
        self._text_pool.close()


@contextmanager
def charge_on_error() -> Iterator[None]:
    """Count a request that ends in an error or a cancellation against its key."""
    try:
        yield
    except (WeftError, asyncio.CancelledError):
        current_principal.get().charge(requests=1)
        raise


def client_hints(headers: Iterable[tuple[str | bytes, str | bytes]]) -> ClientHints:
    """Read the hints of an admitted request. Raises InvalidRequest."""
    with charge_on_error():
        return read_client_hints(headers)


class FairThreadPool:
    """Thread pool that serves tenants in turn when all threads are busy.

    The number of admitted requests bounds the queues.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._num_free = NUM_HANDED_OUT
        # Never holds an empty queue; the first is served next.
        self._queues: OrderedDict[str, deque[Slot]] = OrderedDict()

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in a thread with the caller's context.

        Cancelling the caller does not stop the work; its size is bounded.
        """
        await self._acquire(current_principal.get().tenant)
        try:
            job = self._pool.submit(copy_context().run, work)
        except RuntimeError:  # The system cannot start a thread now.
            self._release()
            raise
        try:
            return await asyncio.wrap_future(job)
        finally:
            self._release_after(job)

    def close(self) -> None:
        """Drop the work that has not started."""
        for slot in [slot for queue in self._queues.values() for slot in queue]:
            slot.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _acquire(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        slot = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.cancelled():
                self._remove(tenant, slot)
            else:  # The slot was granted just before the cancellation.
                self._release()
            raise

    def _remove(self, tenant: str, slot: Slot) -> None:
        if slot not in (queue := self._queues.get(tenant, deque())):
            return
        queue.remove(slot)
        if not queue:
            del self._queues[tenant]

    def _release_after(self, job: Future[ResultT]) -> None:
        """Free the slot when the job ends; a cancelled caller's job may still occupy its thread."""
        if job.done():
            self._release()
            return
        loop = asyncio.get_running_loop()

        def release(_: Future[ResultT]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._release)

        job.add_done_callback(release)

    def _release(self) -> None:
        while self._queues:
            tenant, queue = next(iter(self._queues.items()))
            slot = queue.popleft()
            if queue:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
            if not slot.done():  # otherwise cancelled, with the exception still pending
                slot.set_result(None)
                return
        self._num_free += 1

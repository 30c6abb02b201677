"""One client request on the mesh: places its sequences, follows them, tries again elsewhere, cleans up.

The only place that retries, since only here it is known what the client has received. After the first token a lost
worker is an error; a sequence knows its prompt and its tokens so far, which is what moving it would take.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from uuid import uuid4

from weft.errors import DeadlineExceeded, PeerLost, WeftError
from weft.lifetime import Stage
from weft.request import PromptUsage, RequestKey
from weft.rpc.status import as_weft_error
from weft_services.gateway.inbox import Delta, Inbox
from weft_services.gateway.links import DecodeLinks
from weft_services.gateway.model import Codec
from weft_services.gateway.peers import DecodeLink, Placement, RouteQuery, Scheduler, StartCommand
from weft_services.gateway.prepare import Prepared, PreparedPrompt, PreparedSequence
from weft_services.gateway.sequence import Piece, Sequence
from weft_services.gateway.settler import Booking, Settler

logger = logging.getLogger(__name__)

MAX_RETRIES = 2


@dataclass(frozen=True, slots=True)
class Mesh:
    """The peers a run speaks to."""

    scheduler: Scheduler
    links: DecodeLinks
    settler: Settler


@dataclass(slots=True)
class _Flight:
    """One sequence under way. `generation` counts attempts; messages of older ones are ignored."""

    spec: PreparedSequence
    prompt: PreparedPrompt
    sequence: Sequence
    request_id: str = field(default_factory=lambda: uuid4().hex)
    generation: int = 0
    excluded: tuple[str, ...] = ()
    booking: Booking | None = None
    link: DecodeLink | None = None
    usage: PromptUsage | None = None

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.generation)

    @property
    def is_done(self) -> bool:
        return self.sequence.finish_reason is not None

    def end(self, stage: Stage, failed_worker_id: str = "", cancel: bool = True) -> None:
        """Give everything back. Idempotent per attempt."""
        if self.link is not None:
            if cancel:
                self.link.cancel(self.key)
            else:
                self.link.forget(self.key)
            self.link = None
        if self.booking is not None:
            self.booking.close(stage, failed_worker_id)
            self.booking = None


class Run:
    """`async with Run(...) as run:` then `await run.next()` until None. Leaving early cancels in the engine."""

    def __init__(self, mesh: Mesh, prepared: Prepared, codec: Codec, session: bytes, deadline: float) -> None:
        """`deadline` in the loop's time."""
        self.prepared = prepared
        self._mesh = mesh
        self._session = session
        self._deadline = deadline
        self._inbox = Inbox()
        self._failure: WeftError | None = None  # to be raised once the pieces before it are delivered
        stops = prepared.generation.stop
        self._flights = [
            _Flight(spec, prepared.prompts[spec.prompt], Sequence(index, codec, stops))
            for index, spec in enumerate(prepared.sequences)
        ]
        self._by_id = {flight.request_id: flight for flight in self._flights}

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.TaskGroup() as group:
                for flight in self._flights:
                    group.create_task(self._place(flight))
        except BaseException as error:
            self._abandon()
            if isinstance(error, BaseExceptionGroup):
                raise as_weft_error(error) from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandon()

    @property
    def request_id(self) -> str:
        """The first sequence's id inside the mesh, to find it in the workers' logs."""
        return self._flights[0].request_id

    @property
    def num_attempts(self) -> int:
        """Attempts over all sequences; more than there are sequences means retries."""
        return sum(flight.generation + 1 for flight in self._flights)

    @property
    def num_completion_tokens(self) -> int:
        """Generated so far, end tokens included."""
        return sum(len(flight.sequence.token_ids) for flight in self._flights)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed, as prefill counted them; never more than there are.

        Of several choices that continue one prompt, the one that computed most of it counts, as the prompt counts once.
        """
        cached = [len(prompt.token_ids) for prompt in self.prepared.prompts]
        for flight in self._flights:
            count = flight.usage.cached_tokens if flight.usage else 0
            cached[flight.spec.prompt] = min(cached[flight.spec.prompt], count)
        return sum(cached)

    @property
    def worst_prompt(self) -> PromptUsage:
        """The prompt that took longest, for the access log."""
        usages = [flight.usage for flight in self._flights if flight.usage is not None]
        return max(usages, key=lambda usage: usage.queue_ms + usage.compute_ms, default=PromptUsage())

    async def next(self, idle_seconds: float) -> list[Piece] | None:
        """Everything that has come since, one piece a choice; empty after `idle_seconds` of silence; None at the end.

        Raises WeftError when a sequence has failed for good, DeadlineExceeded when time is up.
        """
        now = asyncio.get_running_loop().time()
        wake = min(now + idle_seconds, self._deadline)
        while self._failure is None and not all(flight.is_done for flight in self._flights):
            try:
                async with asyncio.timeout_at(wake):
                    deltas = await self._inbox.take()
            except TimeoutError:
                if wake == self._deadline:
                    raise DeadlineExceeded("the request took too long") from None
                return []
            if pieces := await self._accept(deltas):
                return pieces
        if self._failure is not None:
            raise self._failure
        return None

    async def _accept(self, deltas: list[Delta]) -> list[Piece]:
        grouped: dict[str, list[Delta]] = defaultdict(list)
        broken: dict[str, Delta] = {}
        for delta in deltas:
            flight = self._by_id.get(delta.key.request_id)
            if flight is None or flight.is_done or delta.key != flight.key:
                continue  # late
            if delta.error is not None:
                broken[delta.key.request_id] = delta
            else:
                grouped[delta.key.request_id].append(delta)
        pieces = [self._advance(self._by_id[request_id], batch) for request_id, batch in grouped.items()]
        try:
            for request_id, delta in broken.items():
                await self._retry(self._by_id[request_id], delta)
        except WeftError as error:
            self._failure = error
        return pieces

    def _advance(self, flight: _Flight, deltas: list[Delta]) -> Piece:
        piece = flight.sequence.accept(deltas)
        flight.usage = next((delta.prompt for delta in deltas if delta.prompt is not None), flight.usage)
        if piece.token_ids and flight.booking is not None:
            flight.booking.first_token()
        if flight.is_done:
            engine_has_ended = deltas[-1].finish_reason is not None
            flight.end(Stage.FINISHED, cancel=not engine_has_ended)
        return piece

    async def _place(self, flight: _Flight) -> None:
        """Route and start; a worker that cannot even be reached counts as a failed attempt."""
        while True:
            placement = await self._route(flight)
            try:
                link = await self._mesh.links.get(placement.decode)
                link.start(self._command(flight, placement), self._inbox)
            except PeerLost as error:
                self._fail_attempt(flight, error, error.worker_id)
            else:
                flight.link = link
                return

    async def _retry(self, flight: _Flight, failed: Delta) -> None:
        if flight.is_done or failed.error is None:
            return
        self._fail_attempt(flight, failed.error, failed.worker_id)
        try:
            await self._place(flight)
        except PeerLost as error:
            raise failed.error from error

    def _fail_attempt(self, flight: _Flight, error: WeftError, worker_id: str) -> None:
        """Prepares the next attempt, or raises the error when there is none."""
        logger.warning("attempt=%s failed worker=%s error=%s", flight.key, worker_id or "unknown", error)
        flight.end(Stage.FAILED, worker_id, cancel=False)
        may_retry = isinstance(error, PeerLost) and not flight.sequence.token_ids
        if not may_retry or flight.generation >= MAX_RETRIES:
            raise error
        flight.generation += 1
        if worker_id:
            flight.excluded = (*flight.excluded, worker_id)

    async def _route(self, flight: _Flight) -> Placement:
        """Book and choose. When all others are excluded, the excluded are asked for again: one may be back by now."""
        try:
            return await self._route_once(flight)
        except PeerLost:
            if not flight.excluded:
                raise
            flight.excluded = ()
            return await self._route_once(flight)

    async def _route_once(self, flight: _Flight) -> Placement:
        query = RouteQuery(
            key=flight.key,
            model=self.prepared.generation.model,
            num_prompt_tokens=len(flight.prompt.token_ids),
            max_tokens=flight.spec.sampling.max_tokens,
            session=self._session,
            block_keys=flight.prompt.block_keys,
            excluded_worker_ids=flight.excluded,
        )
        # booked before the call: if it breaks half-way, the scheduler is told in any case
        flight.booking = Booking(flight.key, self._mesh.settler)
        return await self._mesh.scheduler.route(query, self._remaining())

    def _command(self, flight: _Flight, placement: Placement) -> StartCommand:
        return StartCommand(
            key=flight.key,
            placement=placement,
            token_ids=flight.prompt.token_ids,
            sampling=flight.spec.sampling,
            cache_salt=self.prepared.cache_salt,
            remaining_seconds=self._remaining(),
        )

    def _remaining(self) -> float:
        remaining = self._deadline - asyncio.get_running_loop().time()
        if remaining <= 0:
            raise DeadlineExceeded("the request took too long")
        return remaining

    def _abandon(self) -> None:
        for flight in self._flights:
            flight.end(Stage.CANCELLED)

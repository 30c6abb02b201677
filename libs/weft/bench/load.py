"""Sends jobs to a server and records when each piece of an answer arrived. One event loop; no limit of connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from weft.bench.workload import Job
from weft.completion_client import (
    CONNECT_SECONDS,
    CompletionError,
    CompletionEvent,
    Request,
    encode_request,
    open_client,
    served_model,
    stream_completion,
)
from weft.file_descriptors import raise_fd_limit

# the difference of two prompts is without what a chat template adds
CALIBRATIONS = tuple(Job(None, (("calibration", tokens),), 1) for tokens in (200, 40))
GUESSED_CHARS_PER_TOKEN = 4.5
OUT_OF_TIME, NEVER_SENT = "out of time", "never sent: out of time"
NO_TEXT = "no text"
MAX_ERROR_CHARS = 200
REFUSED = ("HTTP 400", "HTTP 422")


@dataclass(slots=True)
class Record:
    """One request, in seconds since the start of the load.

    `due`: when it should have been sent. If the server or this program delays it, the wait counts as latency.
    """

    due: float
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    asked_tokens: int = 0

    @property
    def first_token(self) -> float:
        """Time to the first token."""
        return self.arrivals[0] - self.due

    @property
    def per_token(self) -> float:
        """Mean time of every token after the first; 0 when there is none."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(self.output_tokens - 1, 1)


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-compatible server and how to ask it."""

    client: httpx.AsyncClient
    model: str
    is_chat: bool
    chars_per_token: float = GUESSED_CHARS_PER_TOKEN
    ignores_end: bool = True

    def request(self, job: Job) -> Request:
        """Return the request of a job."""
        text = job.text(self.chars_per_token)
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if self.is_chat else {"prompt": text}
        ignore = {"ignore_eos": True} if self.ignores_end else {}
        return encode_request(
            {**prompt, "model": self.model, "max_tokens": job.output_tokens, "temperature": 0, **ignore}
        )


async def open_target(url: str, model: str, api_key: str, is_chat: bool) -> Target:
    """Find the model, its characters per token, and whether the server accepts `ignore_eos`, which is not OpenAI's.

    Raises CompletionError.
    """
    raise_fd_limit()  # what fails for want of one is not the server's
    client = open_client(url, api_key, httpx.Limits(max_connections=None, max_keepalive_connections=None))
    try:
        target = Target(client, model or await served_model(client), is_chat)
        record = await _answered(target, CALIBRATIONS[0])
        if record.error.startswith(REFUSED):
            target = replace(target, ignores_end=False)
            record = await _answered(target, CALIBRATIONS[0])
        if record.prompt_tokens and record.error in ("", NO_TEXT):  # one token of thoughts may be no text
            record.error = ""
            target = replace(target, chars_per_token=await _chars_per_token(target, record.prompt_tokens))
        if record.error == httpx.ConnectError.__name__:
            raise CompletionError(f"no server answers at {url}: start one, or look at --url")
        if record.error:
            raise CompletionError(f"{url}: {record.error}")
    except BaseException:
        await client.aclose()
        raise
    # from here on the load says how long anything may take
    client.timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    return target


async def _chars_per_token(target: Target, tokens_of_first: int) -> float:
    chars, fewer_chars = (len(job.text(GUESSED_CHARS_PER_TOKEN)) for job in CALIBRATIONS)
    fewer_tokens = (await _answered(target, CALIBRATIONS[1])).prompt_tokens
    if 0 < fewer_tokens < tokens_of_first:
        return (chars - fewer_chars) / (tokens_of_first - fewer_tokens)
    return chars / tokens_of_first


async def _answered(target: Target, job: Job) -> Record:
    record = Record(0.0)
    await _fill(target, target.request(job), record, time.perf_counter())
    return record


class Load:
    """Sends jobs to a server. `records` can be read at any time, also of an interrupted load."""

    def __init__(self, target: Target, jobs: Iterator[Job], tell: Callable[[int], None] = lambda ended: None) -> None:
        self.records: list[Record] = []
        self._target, self._jobs, self._tell = target, jobs, tell
        self._began, self._num_ended = time.perf_counter(), 0

    async def run(self, concurrency: int, max_seconds: float) -> list[Record]:
        """Run every job and return the records; jobs that `max_seconds` cuts off count as failed.

        With `concurrency` that many clients run the jobs one after another, else each job starts at its own time.
        """
        self._began = time.perf_counter()
        try:
            async with asyncio.timeout(max_seconds), asyncio.TaskGroup() as group:
                if concurrency:
                    for _ in range(concurrency):
                        group.create_task(self._client())
                else:
                    await self._clock(group)
        except TimeoutError:
            ended = self._now()
            self.records += [Record(ended if job.at is None else job.at, error=NEVER_SENT) for job in self._jobs]
            for record in self.records:
                if record.error == NEVER_SENT:
                    record.sent = record.ended = ended
        return self.records

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _client(self) -> None:
        for job in self._jobs:
            request = self._target.request(job)
            await self._send(request, self._noted(job, self._now()))

    async def _clock(self, group: asyncio.TaskGroup) -> None:
        for job in self._jobs:
            record = self._noted(job, job.at or 0.0)
            request = self._target.request(job)  # build the body before its time
            await asyncio.sleep(record.due - self._now())
            group.create_task(self._send(request, record))

    def _noted(self, job: Job, due: float) -> Record:
        """Add a record for the job; it counts as never sent until it is."""
        record = Record(due, error=NEVER_SENT, asked_tokens=job.output_tokens)
        self.records.append(record)
        return record

    async def _send(self, request: Request, record: Record) -> None:
        record.error = ""
        try:
            await _fill(self._target, request, record, self._began)
        except asyncio.CancelledError:
            record.error, record.ended = OUT_OF_TIME, self._now()
            raise
        self._num_ended += 1
        self._tell(self._num_ended)


async def _fill(target: Target, request: Request, record: Record, began: float) -> None:
    record.sent = time.perf_counter() - began
    try:
        async for event in stream_completion(target.client, request):
            _take(event, record, event.at - began)
    except CompletionError as error:
        record.error = error.summary[:MAX_ERROR_CHARS]
    record.ended = time.perf_counter() - began
    if not record.arrivals and record.output_tokens:  # tokens without text, such as the one that starts reasoning
        record.arrivals.append(record.ended)
    # without usage, count each piece as one token
    record.output_tokens = record.output_tokens or len(record.arrivals)
    if not record.error and not record.arrivals:
        record.error = NO_TEXT


def _take(event: CompletionEvent, record: Record, at: float) -> None:
    if event.usage:
        record.prompt_tokens, record.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        record.cached_tokens = event.usage.cached_tokens
    if event.has_token:
        record.arrivals.append(at)

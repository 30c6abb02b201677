"""/v1/embeddings through the official client and over gRPC, with scripted prefill workers."""

from __future__ import annotations

import asyncio
import base64
import math
import threading
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from openai import APIStatusError

from tests.services.gateway.conftest import CONTEXT, MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import forever
from tests.services.gateway.test_grpc import stub_of
from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret
from weft.rpc import server as rpc_server
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1 import prefill_service_pb2 as prefill_pb
from weft_mesh.v1 import scheduler_service_pb2 as scheduler_pb
from weft_mesh.v1.prefill_service_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server
from weft_services.gateway.dialects.token_requests import embedding_body
from weft_services.gateway.front import endpoints, grpc_service


class FakePrefill(PrefillServiceServicer):
    """Its vectors say how many tokens there were, and which came first."""

    def __init__(self) -> None:
        self.asked: list[prefill_pb.PrefillServiceEmbedRequest] = []
        self.refusal: grpc.StatusCode | None = None
        self.is_stuck = False
        self.size = 3
        self.has_left = asyncio.Event()
        self.has_enough = asyncio.Event()  # half of what one request has under way

    async def Embed(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        if len(self.asked) >= 16:
            self.has_enough.set()
        if self.is_stuck:
            try:
                await forever()
            finally:
                self.has_left.set()
        if self.refusal is not None:
            await context.abort(self.refusal, "at 10.1.2.3:4")
        values = [len(request.token_ids), request.token_ids[0], 1.0] + [0.0] * (self.size - 3)
        return prefill_pb.PrefillServiceEmbedResponse(values=values)

    def Prefill(self, request_iterator: Any, context: Any) -> Any:
        """Nobody asks."""
        raise NotImplementedError

    def ReadBlocks(self, request: Any, context: Any) -> Any:
        """Nobody asks."""
        raise NotImplementedError


@asynccontextmanager
async def with_prefill(b: Bench, count: int = 1) -> AsyncIterator[list[FakePrefill]]:
    """So many prefill workers, which the gateway knows of."""
    workers, servers, addresses = [FakePrefill() for _ in range(count)], [], []
    for place, worker in enumerate(workers):
        server = grpc.aio.server(options=rpc_server.SERVER_OPTIONS)
        add_PrefillServiceServicer_to_server(worker, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        addresses.append(_address(f"prefill-{place}", f"127.0.0.1:{port}"))
    b.scheduler.prefill = addresses
    await b.gateway.watch.poll()
    try:
        yield workers
    finally:
        for server in servers:
            await server.stop(None)


def _address(name: str, address: str) -> Any:
    return scheduler_pb.WorkerAddress(worker_id=name, boot_id=f"boot-of-{name}", address=address)


def unit(*values: float) -> list[float]:
    length = math.hypot(*values)
    return [value / length for value in values]


async def test_vectors_have_length_1_in_the_order_of_the_inputs(bench: MakeBench) -> None:
    async with bench() as b, with_prefill(b) as (worker,):
        texts = ["hello", "the answer is here", "x"]
        ids = [b.ids(text) for text in texts]
        # the client asks for base64 by itself, and decodes it; its types know only numbers
        answer = await b.lenient.embeddings.create(model=MODEL_NAME, input=texts)
        assert [each.index for each in answer.data] == [0, 1, 2]
        for each, tokens in zip(answer.data, ids, strict=True):
            assert each.embedding == pytest.approx(unit(len(tokens), tokens[0], 1), abs=1e-6)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        plain = await b.client.embeddings.create(model=MODEL_NAME, input=ids, encoding_format="float")
        for one, other in zip(answer.data, plain.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        single = await b.client.embeddings.create(model=MODEL_NAME, input=ids[1], encoding_format="float")
        assert single.data[0].embedding == plain.data[1].embedding
        assert worker.asked[0].prefill_boot_id == "boot-of-prefill-0"
        assert not b.decode.started


async def test_what_would_make_other_vectors_is_refused(bench: MakeBench) -> None:
    usual: dict[str, Any] = {"add_special_tokens": True, "normalize": None, "embed_dtype": "float32"}
    asked: dict[str, Any] = {"cache_salt": "mine", "truncate_prompt_tokens": 5, "dimensions": 2, "endianness": "big"}
    asked |= {"embed_dtype": "float16", "add_special_tokens": False, "normalize": False, "use_activation": False}
    async with bench() as b, with_prefill(b):
        for name, value in asked.items():
            status, error = await b.refused("/v1/embeddings", input="x", **{**usual, name: value})
            assert (status, error["param"], error["code"]) == (400, name, "unsupported_parameter")
        answer = await b.http.post("/v1/embeddings", json={"model": MODEL_NAME, "input": "x", **usual})
        assert answer.status_code == 200


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("size", [3, 50_000])
async def test_many_numbers_are_not_written_on_the_loop(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, encoding: Any, size: int
) -> None:
    writers: list[threading.Thread] = []

    def watched(*found: Any) -> bytes:
        writers.append(threading.current_thread())
        return embedding_body(*found)

    monkeypatch.setattr(endpoints, "embedding_body", watched)
    async with bench() as b, with_prefill(b) as (worker,):
        worker.size = size
        asked = {"model": MODEL_NAME, "input": ["a", "b"], "encoding_format": encoding}
        vectors = [each["embedding"] for each in (await b.http.post("/v1/embeddings", json=asked)).json()["data"]]
    read = [array("f", base64.b64decode(each)) if encoding == "base64" else each for each in vectors]
    assert [len(each) for each in read] == [size] * 2
    assert [writer is threading.main_thread() for writer in writers] == [size == 3]


@pytest.mark.parametrize("size", [3, 50_000])
async def test_nor_are_they_over_grpc(bench: MakeBench, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    writers: list[threading.Thread] = []

    def watched(**fields: Any) -> pb.Embedding:
        writers.append(threading.current_thread())
        return pb.Embedding(**fields)

    monkeypatch.setattr(grpc_service, "pb", SimpleNamespace(**{**vars(pb), "Embedding": watched}))
    async with bench() as b, with_prefill(b) as (worker,), stub_of(b) as stub:
        worker.size = size
        inputs = [pb.EmbedInput(text=each) for each in ("a", "b")]
        answer = await stub.Embed(pb.EmbedRequest(inputs=inputs), timeout=10)
    assert [len(each.values) for each in answer.embeddings] == [size] * 2
    assert [writer is threading.main_thread() for writer in writers] == [size == 3] * 2


async def test_grpc_gives_the_same_vectors(bench: MakeBench) -> None:
    async with bench() as b, with_prefill(b), stub_of(b) as stub:
        inputs = [pb.EmbedInput(text="hello"), pb.EmbedInput(token_ids=pb.TokenIds(ids=[7, 8]))]
        answer = await stub.Embed(pb.EmbedRequest(inputs=inputs), timeout=10)
        hello = b.ids("hello")
        assert list(answer.embeddings[0].values) == pytest.approx(unit(len(hello), hello[0], 1), abs=1e-6)
        assert list(answer.embeddings[1].values) == pytest.approx(unit(2, 7, 1), abs=1e-6)
        assert answer.usage.prompt_tokens == len(hello) + 2
        with pytest.raises(grpc.aio.AioRpcError, match="input"):
            await stub.Embed(pb.EmbedRequest(), timeout=10)


@pytest.mark.parametrize(
    "refusal",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ],
)
async def test_another_worker_does_what_one_cannot(
    bench: MakeBench, refusal: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(migration_timeout_seconds=0.1) as b, with_prefill(b, 2) as workers:
        workers[0].refusal = refusal
        answer = await b.lenient.embeddings.create(model=MODEL_NAME, input=["hello", "x"])
        assert len(answer.data) == 2
        workers[1].refusal = refusal
        with pytest.raises(APIStatusError) as failure:
            await b.client.embeddings.create(model=MODEL_NAME, input="hello")
        assert failure.value.status_code in (429, 500, 503)
        assert "10.1.2.3" not in str(failure.value)
        tried = {request.key.request_id: request.key.generation for worker in workers for request in worker.asked}
        assert max(tried.values()) == 1
        assert not any(record.exc_info for record in caplog.records), "a worker that fails is no bug of the gateway"


async def test_nobody_is_sooner_than_their_key_allows(bench: MakeBench, tmp_path: Path) -> None:
    secrets = {name: make_secret() for name in ("alice", "bob")}
    keys = tmp_path / "keys.json"
    entries = [ApiKey("alice", digest_of(secrets["alice"])), ApiKey("bob", digest_of(secrets["bob"]), priority=-10)]
    keys.write_text(dump_keys(entries))
    async with bench(keys=str(keys)) as b, with_prefill(b) as (worker,):
        for secret in secrets.values():
            sdk = b.lenient.copy(api_key=secret)
            await sdk.embeddings.create(model=MODEL_NAME, input="x", extra_body={"priority": -7})
        assert [request.priority for request in worker.asked] == [0, 7]


async def test_without_a_prefill_worker_it_is_a_503(bench: MakeBench) -> None:
    async with bench(migration_timeout_seconds=0.1) as b:
        b.scheduler.is_prefill_ready = False
        await b.gateway.watch.poll()
        status, _ = await b.refused("/v1/embeddings", input="hello")
        assert status == 503


async def test_a_worker_whose_pool_is_full_is_asked_where_there_is_no_other(bench: MakeBench) -> None:
    async with bench() as b, with_prefill(b, 1):
        b.scheduler.is_prefill_ready = False
        b.scheduler.reports["prefill-0"] = scheduler_pb.WorkerReport(full=True)
        await b.gateway.watch.poll()
        answer = await b.lenient.embeddings.create(model=MODEL_NAME, input=["hello"])
        assert len(answer.data) == 1


async def test_work_is_shared_and_a_client_that_leaves_is_noticed(bench: MakeBench) -> None:
    async with bench() as b, with_prefill(b, 2) as workers:
        for worker in workers:
            worker.is_stuck = True
        asking = asyncio.create_task(b.client.embeddings.create(model=MODEL_NAME, input=["hello"] * 100))
        async with asyncio.timeout(10):
            for worker in workers:
                await worker.has_enough.wait()
        assert [len(worker.asked) for worker in workers] == [16, 16], "no more than so many at a time"
        asking.cancel()
        async with asyncio.timeout(10):
            await workers[0].has_left.wait()


WRONG: list[tuple[dict[str, Any], str, int]] = [
    ({}, "input", 400),
    ({"input": []}, "input", 400),
    ({"input": ""}, "input", 400),
    ({"input": ["x", ""]}, "input", 400),
    ({"input": {"a": 1}}, "input", 400),
    ({"input": [999]}, "input", 400),
    ({"input": ["x"] * 2049}, "input", 400),
    ({"input": [[5] * CONTEXT]}, "input", 400),
    ({"input": [[5] * 300] * 1001}, "input", 400),
    ({"input": "x", "dimensions": 8}, "dimensions", 400),
    ({"input": "x", "encoding_format": "hex"}, "encoding_format", 400),
    ({"input": "x", "model": "other"}, "model", 404),
]


async def test_what_is_wrong_is_named(bench: MakeBench) -> None:
    async with bench() as b, with_prefill(b) as (worker,):
        for fields, param, status in WRONG:
            code, error = await b.refused("/v1/embeddings", **fields)
            assert (code, error["param"]) == (status, param), fields
        assert not worker.asked

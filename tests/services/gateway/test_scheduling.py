"""What a gateway tells the scheduler and the workers of a request, with the scheduler's real code between them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.services.gateway.conftest import CONTEXT, MODEL_NAME
from tests.services.gateway.fakes import FakeDecode, failing, speaking
from tests.services.scheduler.fakes import FakeWorker, Scheduler, hello, serving
from weft.errors import EngineFailed, Incompatible, Overloaded
from weft.fleet_types import Priority, RouteQuery
from weft.request import RequestKey
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2 as scheduler_pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.mesh import generation_run
from weft_services.gateway.process import running
from weft_services.scheduler import service
from weft_services.scheduler.admission import AdmissionQueue
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.fleet_state import NEVER
from weft_services.scheduler.policy import NO_AFFINITY, PlacementDecision
from weft_services.scheduler.router import Router

FULL = {"ready": False, "free_blocks": 0, "active_blocks": 100, "num_running": 1}


@dataclass(slots=True)
class Mesh:
    """A gateway, a scheduler, and one worker of both roles."""

    http: httpx.AsyncClient
    grpc_address: str
    scheduler: Scheduler
    router: Router
    worker: FakeWorker
    decode: FakeDecode
    queries: list[RouteQuery]

    async def ask(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": MODEL_NAME, "prompt": "user", **fields}
        return await self.http.post("/v1/completions", json=body, headers=headers)

    async def until_free(self) -> None:
        """Everything that was booked is given back."""
        async with asyncio.timeout(20):
            while (await self.scheduler.listed())[0].booked_requests:  # noqa: ASYNC110 - state behind the wire
                await asyncio.sleep(0.01)

    def suspect_until(self) -> float:
        return self.router.fleet.workers()[0].suspect_until


@asynccontextmanager
async def meshed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    routers: list[Router] = []
    queries: list[RouteQuery] = []
    place = Router.place

    def noted(router: Router, query: RouteQuery, *more: Any) -> PlacementDecision:
        routers.append(router)
        queries.append(query)
        return place(router, query, *more)

    monkeypatch.setattr(Router, "place", noted)
    decode = FakeDecode("both-0")
    await decode.open()
    room = AdmissionQueue(8, 4.0)
    address = scheduler_pb.WorkerAddress(worker_id="both-0", boot_id="boot-0")
    async with serving(AffinityStore("", 60), queue=room) as scheduler:
        address.address = decode.address
        said = hello("both-0", "both", worker=address, model=MODEL_NAME, max_context_tokens=CONTEXT)
        config = GatewayConfig(
            model=str(model_dir), scheduler_addr=scheduler.address, http_port=0, grpc_port=0, grace_seconds=1
        )
        async with FakeWorker(scheduler, said) as worker, running(config) as gateway:
            await gateway.watch.poll()
            async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as http:
                mesh = Mesh(http, gateway.grpc_address, scheduler, Router(1.0), worker, decode, queries)
                assert (await mesh.ask(max_tokens=1)).status_code == 200
                mesh.router = routers[0]
                queries.clear()
                decode.started.clear()
                yield mesh
    await decode.kill()


@pytest.fixture
async def mesh(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    async with meshed(model_dir, monkeypatch) as made:
        yield made


@pytest.fixture
def access_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "weft_services.gateway.front.request_record"):
        yield caplog


@pytest.mark.parametrize(
    ("headers", "fields", "priority", "level"),
    [
        ({}, {}, Priority.DEFAULT, 0),
        ({}, {"priority": -3}, Priority.INTERACTIVE, 3),
        ({}, {"priority": 10}, Priority.BATCH, -10),
        ({"x-vllm-priority": "-2"}, {"priority": 5}, Priority.INTERACTIVE, 2),
        ({"x-smg-priority": "Bulk"}, {}, Priority.BATCH, -1),
        ({"x-smg-priority": "interactive"}, {}, Priority.INTERACTIVE, 1),
        ({"x-smg-priority": "interactive"}, {"priority": 0}, Priority.DEFAULT, 0),
        ({"x-smg-priority": "system"}, {}, Priority.DEFAULT, 0),
    ],
)
async def test_a_priority_reaches_scheduler_and_engine(
    mesh: Mesh, headers: dict[str, str], fields: dict[str, int], priority: Priority, level: int
) -> None:
    assert (await mesh.ask(headers, **fields)).status_code == 200
    assert mesh.queries[0].priority is priority
    assert mesh.decode.started[0].priority == level


@pytest.mark.parametrize(
    ("headers", "fields", "field"),
    [
        ({}, {"priority": 11}, "priority"),
        ({}, {"priority": -11}, "priority"),
        ({}, {"priority": "high"}, "priority"),
        ({}, {"priority": 1.5}, "priority"),
        ({}, {"reject_if_busy": 1}, "reject_if_busy"),
        ({"x-vllm-priority": "11"}, {}, "x-vllm-priority"),
        ({"x-vllm-priority": "soon"}, {}, "x-vllm-priority"),
    ],
)
async def test_a_priority_that_is_none_is_refused_by_its_name(
    mesh: Mesh, headers: dict[str, str], fields: dict[str, Any], field: str
) -> None:
    refused = await mesh.ask(headers, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert not mesh.queries


async def test_grpc_says_the_same(mesh: Mesh) -> None:
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        stub: Any = InferenceServiceStub(channel)
        options = pb.GenerationOptions(priority=-4, reject_if_busy=True)
        pieces = [piece async for piece in stub.Generate(pb.GenerateRequest(text="user", options=options))]
        assert pieces[-1].usage.completion_tokens == 1
        assert (mesh.queries[0].priority, mesh.queries[0].reject_if_busy) == (Priority.INTERACTIVE, True)
        assert mesh.decode.started[0].priority == 4
        for request, metadata in (
            (pb.GenerateRequest(text="user", options=pb.GenerationOptions(priority=11)), ()),
            (pb.GenerateRequest(text="user"), (("x-vllm-priority", "11"),)),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="priority") as caught:
                await stub.Generate(request, metadata=metadata).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_deadline_and_tenant_are_said_and_the_key_is_not(mesh: Mesh) -> None:
    for key in ("Bearer a", "Bearer a", "Bearer b"):
        await mesh.ask({"authorization": key})
    await mesh.ask()
    first, again, other, nobody = mesh.queries
    assert first.tenant == again.tenant != other.tenant
    assert (len(first.tenant), nobody.tenant) == (16, b"")
    assert b"Bearer" not in first.tenant
    assert 0 < 600.0 - first.remaining_seconds < 30.0


async def test_the_scheduler_learns_how_long_answers_are(mesh: Mesh) -> None:
    await mesh.until_free()
    query = RouteQuery(RequestKey("another"), MODEL_NAME, 4, 100_000)
    before = mesh.router.routing_input(query, NO_AFFINITY).output_tokens
    mesh.decode.script = speaking([100] * 3)
    await mesh.ask(max_tokens=200)
    await mesh.until_free()
    assert mesh.router.routing_input(query, NO_AFFINITY).output_tokens == round(before + 0.02 * (3 - before))


async def test_who_does_not_want_to_wait_is_refused_while_others_wait(mesh: Mesh) -> None:
    await mesh.until_free()
    await mesh.worker.report(**FULL)
    async with asyncio.TaskGroup() as group:
        patient = group.create_task(mesh.ask())
        refused = await mesh.ask(reject_if_busy=True)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        await mesh.worker.report()
    assert patient.result().status_code == 200


@pytest.mark.parametrize("code", [Overloaded.code, Incompatible.code, EngineFailed.code])
async def test_only_a_real_fault_makes_a_worker_suspect(mesh: Mesh, code: int) -> None:
    mesh.decode.script = failing(code, "both-0")
    await mesh.ask(max_tokens=4)
    await mesh.until_free()
    assert (mesh.suspect_until() > NEVER) is (code == EngineFailed.code)


async def test_the_access_log_says_what_was_expected(mesh: Mesh, access_log: pytest.LogCaptureFixture) -> None:
    await mesh.until_free()
    await mesh.worker.report(**FULL)
    async with asyncio.TaskGroup() as group:
        group.create_task(mesh.ask(prompt="user " * 100))
        async with asyncio.timeout(10):
            while not mesh.queries:  # noqa: ASYNC110 - it waits for room from here on
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await mesh.worker.report()
    async with asyncio.timeout(10):
        while "waited_ms" not in access_log.text:  # noqa: ASYNC110 - the line is written behind the answer
            await asyncio.sleep(0.01)
    said = re.search(
        r"predicted_ttft_ms=(\d+) predicted_itl_ms=\d+ predicted_cached=0 waited_ms=(\d+)", access_log.text
    )
    assert said is not None, access_log.text
    assert (int(said[1]) > 0, int(said[2]) >= 50) == (True, True)


def test_a_gateway_names_no_more_failed_workers_than_a_scheduler_takes() -> None:
    assert generation_run.MAX_EXCLUDED == service.MAX_EXCLUDED

"""Workers that load their model: on the stream of fleet events."""

from __future__ import annotations

from tests.services.gateway.conftest import MODEL_NAME, MakeBench
from tests.services.gateway.test_page import events
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb


async def test_listeners_are_told_who_loads_a_served_model_and_how_far_it_is(bench: MakeBench) -> None:
    loading = pb.WorkerArrival(worker_id="decode-7", role=common_pb2.WORKER_ROLE_DECODE, model=MODEL_NAME)
    loading.phase, loading.done_bytes, loading.total_bytes, loading.since_ms = "reading weights", 40, 100, 1700
    other = pb.WorkerArrival(worker_id="decode-8", role=common_pb2.WORKER_ROLE_DECODE, model="not served here")
    async with bench() as b:
        b.scheduler.arrivals = [loading, other]
        await b.gateway.watch.poll()
        async with b.http.stream("GET", "/weft/fleet/events") as response:
            told = events(response)
            assert (await anext(told))[0] == "hello"
            _, fleet = await anext(told)
        (arrival,) = fleet["arrivals"]
        assert (arrival["worker_id"], arrival["role"], arrival["phase"]) == ("decode-7", "decode", "reading weights")
        assert (arrival["done_bytes"], arrival["total_bytes"], arrival["since_ms"]) == (40, 100, 1700)

"""Workers that load their model in `weft status`."""

from __future__ import annotations

import json

import pytest
from tests.weft.cli.test_status import shown, worker

from weft.cli.status import as_dict
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb

LOADING = pb.WorkerArrival(
    worker_id="decode-7",
    role=common_pb2.WORKER_ROLE_DECODE,
    model="weft-nano",
    phase="reading weights",
    done_bytes=43,
    total_bytes=100,
    since_ms=2900,
)


@pytest.mark.parametrize("workers", [[], [worker("decode-0")]])
@pytest.mark.parametrize("width", [80, 200])
def test_a_worker_that_loads_has_a_row_too(workers: list[pb.WorkerStatus], width: int) -> None:
    lines = shown(workers, width, [LOADING]).splitlines()
    row = next(line for line in lines if line.startswith("decode-7"))
    assert "reading weights 43%, 3 s" in row
    assert f"{len(workers)} workers, {len(workers)} ready, 1 loading" in " ".join(lines)
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(("width", "since_ms"), [(80, 120_000), (60, 2900)])
def test_nothing_is_cut_beside_a_worker_that_loads(width: int, since_ms: int) -> None:
    loading = pb.WorkerArrival()
    loading.CopyFrom(LOADING)
    loading.since_ms = since_ms
    said = shown([worker("decode-0")], width, [loading])
    assert f"reading weights 43%, {since_ms / 1000:.0f} s" in said
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= width


def test_what_is_not_counted_has_no_share_and_json_has_all() -> None:
    arrival = pb.WorkerArrival(role=common_pb2.WORKER_ROLE_DECODE, phase="tuning kernels", since_ms=12_000)
    assert "tuning kernels, 12 s" in shown([], arrivals=[arrival])
    fleet = json.loads(json.dumps(as_dict(pb.ListWorkersResponse(arrivals=[LOADING]))))
    assert fleet["totals"]["loading"] == 1
    (told,) = fleet["arrivals"]
    assert (told["worker_id"], told["role"], told["done_bytes"], told["since_ms"]) == ("decode-7", "decode", 43, 2900)

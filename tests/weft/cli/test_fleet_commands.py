"""What `weft wake` says of a worker, by what the scheduler lists right after it was asked."""

from __future__ import annotations

from typing import Any

import pytest
from tests.weft.cli.test_status import worker

from weft.cli.fleet_commands import _woken
from weft_mesh.v1 import scheduler_service_pb2 as pb


class Fleet:
    """A scheduler that does as it is asked, and lists one worker."""

    def __init__(self, report: pb.WorkerReport) -> None:
        self._listed = worker("decode-0", ready=False)
        self._listed.report.MergeFrom(report)

    async def Sleep(self, request: Any, **deadline: float) -> pb.SleepResponse:
        return pb.SleepResponse()

    async def ListWorkers(self, request: Any, **deadline: float) -> pb.ListWorkersResponse:
        return pb.ListWorkersResponse(workers=[self._listed])


@pytest.mark.parametrize(
    ("report", "loads"),
    [
        (pb.WorkerReport(asleep=True), True),
        (pb.WorkerReport(asleep=True, draining=True), True),
        (pb.WorkerReport(), True),  # it has heard of it, and is not there yet
        (pb.WorkerReport(ready=True), False),
        (pb.WorkerReport(draining=True), False),
        (pb.WorkerReport(full=True), False),
    ],
)
async def test_a_worker_that_was_not_asleep_is_not_said_to_load(report: pb.WorkerReport, loads: bool) -> None:
    request = pb.SleepRequest(worker_id="decode-0", undo=True)
    assert await _woken(Fleet(report), request) is loads

"""`weft status --watch --json` while a scheduler is away: what reads the lines goes on with the next one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tests.weft.cli.test_status import ListOnly

from weft.cli.status import status
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc


class AwayInBetween(ListOnly):
    """Answers the first call, and from the fourth one on."""

    def __init__(self) -> None:
        super().__init__([[]])
        self.num_asked = 0

    def ListWorkers(self, request: Any, context: Any) -> Any:
        self.num_asked += 1
        if self.num_asked in (2, 3):
            context.abort(grpc.StatusCode.UNAVAILABLE, "it starts anew")
        return super().ListWorkers(request, context)


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    pb_grpc.add_FleetServiceServicer_to_server(AwayInBetween(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_a_scheduler_that_is_away_is_told_of_and_waited_for(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cli.status.REFRESH_SECONDS", 0.0)
    printed: list[str] = []

    def stop_after_two(text: str, flush: bool) -> None:
        printed.append(text)
        if len(printed) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", stop_after_two)
    status(address, watch=True, as_json=True)
    assert [json.loads(text)["workers"] for text in printed] == [[], []]
    assert capsys.readouterr().err.count("it starts anew") == 2

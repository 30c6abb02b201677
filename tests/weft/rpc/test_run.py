"""How a service's process ends when it cannot start, and what its collector looks at when it has."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import weakref
from collections.abc import Iterator

import pytest

from weft.errors import BadCheckpoint, ConfigError, EngineFailed, StorageUnavailable
from weft.metrics import expose
from weft.rpc.server import NUM_YOUNG_OBJECTS, RpcServer, freeze_startup_objects, run


@pytest.mark.parametrize(
    "error", [ConfigError("WEFT_PORT='x': expected int"), BadCheckpoint("model.safetensors: short")]
)
@pytest.mark.parametrize("is_in_a_task", [False, True])
def test_what_another_start_cannot_mend_ends_with_status_2_and_one_line(
    error: Exception, is_in_a_task: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise error

    async def main() -> None:
        if not is_in_a_task:
            await fail()
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 2
    assert [record.getMessage() for record in caplog.records] == [f"cannot start: {error}"]


def test_storage_that_fails_ends_it_with_status_1_so_that_it_is_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        raise StorageUnavailable("s3://models/one: timed out")

    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 1
    assert [record.getMessage() for record in caplog.records] == ["cannot start: s3://models/one: timed out"]


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("is_for_metrics", [False, True])
def test_a_port_that_is_taken_ends_with_status_1_and_one_line(
    is_for_metrics: bool, taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        if is_for_metrics:
            expose("127.0.0.1", taken)
        await RpcServer([]).start("127.0.0.1", taken)

    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 1
    # not asyncio's, which tells of gRPC's poller and the loops of tests before
    (record,) = (each for each in caplog.records if each.name.startswith("weft"))
    assert f"cannot start: cannot listen on 127.0.0.1:{taken} for" in record.getMessage()


def test_other_failures_come_out_as_they_are() -> None:
    async def main() -> None:
        raise EngineFailed("a bug")

    with pytest.raises(EngineFailed, match="a bug"):
        run(main)


class Circle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_what_a_process_is_made_of_is_not_looked_at_for_cycles_and_what_requests_leave_is() -> None:
    threshold, made = gc.get_threshold(), [Circle() for _ in range(100)]
    try:
        freeze_startup_objects()
        assert not {id(each) for each in gc.get_objects()} & {id(each) for each in made}
        left = weakref.ref(Circle())
        kept = [[number] for number in range(2 * NUM_YOUNG_OBJECTS)]
        assert left() is None, len(kept)
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)

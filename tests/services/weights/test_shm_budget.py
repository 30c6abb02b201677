"""Several models on one node: images stay within a limit, the least recently asked for goes, nothing in use does."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from tests.services.weights.service import load
from tests.weft.weights.checkpoints import make_checkpoint, random_tensors, safetensors_bytes, write_config
from weft.errors import Overloaded
from weft.rpc.client import open_channel
from weft.rpc.server import RpcServer
from weft.weights import image as image_module
from weft.weights.checkpoint import Checkpoint, read_checkpoint
from weft.weights.image import image_name, remove_abandoned, write_image
from weft.weights.image_tensors import open_image
from weft.weights.load import Report, image_layout
from weft_mesh.v1 import weights_service_pb2_grpc as pb2_grpc
from weft_services.weights import loader as loader_module
from weft_services.weights import shm_budget
from weft_services.weights.loader import WeightLoader
from weft_services.weights.service import WeightServicer

NAMES = ("a", "b", "c")


@pytest.fixture
def models(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Three of the same size."""
    for name in NAMES:
        make_checkpoint(tmp_path / name)
    yield {name: tmp_path / name for name in NAMES}
    left = [path for name in NAMES if (path := image_of(tmp_path / name)).exists()]
    for path in left:
        path.unlink()
    assert left == []


def image_of(directory: Path) -> Path:
    return image_module.SHARED_MEMORY / image_name(read_checkpoint(directory))


def size_of(directory: Path) -> int:
    return image_layout(read_checkpoint(directory)).size_bytes


def there(models: dict[str, Path]) -> set[str]:
    """Models whose images are in shared memory."""
    return {name for name, directory in models.items() if image_of(directory).exists()}


@asynccontextmanager
async def serving(models: dict[str, Path], limit_bytes: int) -> AsyncIterator[grpc.aio.Channel]:
    rpc = RpcServer([])
    async with asyncio.TaskGroup() as tasks:
        shared = shm_budget.ShmBudget(limit_bytes)
        loaders = {name: WeightLoader(path, 1, tasks, room=shared) for name, path in models.items()}
        pb2_grpc.add_WeightServiceServicer_to_server(WeightServicer(loaders), rpc.server)
        address = await rpc.start("127.0.0.1", 0)
        try:
            async with open_channel(address) as channel:
                yield channel
        finally:
            await rpc.stop(0)
            for loader in loaders.values():
                loader.release()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for, unless a test says so."""
    monkeypatch.setattr(shm_budget, "HAND_OVER_SECONDS", 0.0)
    monkeypatch.setattr(shm_budget, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(shm_budget, "LOOK_SECONDS", 0.01)


async def test_the_one_asked_for_least_recently_goes(models: dict[str, Path]) -> None:
    async with serving(models, 2 * size_of(models["a"])) as channel:
        for name in ("a", "b", "a", "c"):
            await load(channel, name)
        assert there(models) == {"a", "c"}
        assert not (await load(channel, "a"))[-1].ready.read_from_disk
        assert (await load(channel, "b"))[-1].ready.read_from_disk
        assert there(models) == {"a", "b"}
    assert there(models) == set()


async def test_what_a_process_maps_stays(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(models, 2 * size_of(models["a"])) as channel:
        first = (await load(channel, "a"))[-1].ready
        tensors = open_image(first.shm_name, first.size_bytes)
        for name in ("b", "c", "b"):
            await load(channel, name)
            assert "a" in there(models)
        second = (await load(channel, "b"))[-1].ready
        others = open_image(second.shm_name, second.size_bytes)
        with pytest.raises(Overloaded, match=r"no room .* of 'c': .*; held: 'a' .*, 'b' "):
            await load(channel, "c")
        monkeypatch.setattr(shm_budget, "WAIT_SECONDS", 10.0)
        waiting = asyncio.create_task(load(channel, "c"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        del tensors
        await waiting
        assert there(models) == {"b", "c"}
        assert set(others) == {tensor.entry.name for tensor in read_checkpoint(models["b"]).tensors}


async def test_what_was_just_handed_out_stays(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_budget, "HAND_OVER_SECONDS", 60.0)
    async with serving(models, size_of(models["a"])) as channel:
        await load(channel, "a")
        with pytest.raises(Overloaded):
            await load(channel, "b")
        assert there(models) == {"a"}


async def test_what_a_killed_service_left_goes_when_memory_is_short(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(models["c"], tmp_path / "stranger")
    abandoned = write_image(read_checkpoint(tmp_path / "stranger"), lambda size, file: None, 1)
    os.close(abandoned.fd)  # as a killed service leaves it
    monkeypatch.setattr(shm_budget, "remove_abandoned", lambda: remove_abandoned(abandoned.path.name[:30]))
    async with serving(models, 0) as channel:
        await load(channel, "a")
        assert abandoned.path.exists()
        monkeypatch.setattr(shm_budget, "free_bytes", lambda directory: 0 if abandoned.path.exists() else 1 << 40)
        await load(channel, "b")
        assert not abandoned.path.exists()
        assert there(models) == {"a", "b"}


async def test_what_a_killed_service_left_counts_as_soon_as_it_is_held(models: dict[str, Path]) -> None:
    write_image(read_checkpoint(models["b"]), lambda size, file: None, 1).close()
    async with serving(models, size_of(models["a"])) as channel:
        await load(channel, "a")
        assert not (await load(channel, "b"))[-1].ready.read_from_disk
        assert there(models) == {"b"}


async def test_what_a_killed_service_left_does_not_go_to_make_room_for_itself(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = write_image(read_checkpoint(models["a"]), lambda size, file: None, 1)
    left.close()
    monkeypatch.setattr(shm_budget, "remove_abandoned", lambda: remove_abandoned(left.name[:30]))
    monkeypatch.setattr(shm_budget, "free_bytes", lambda directory: 1 << 40 if not left.path.exists() else 0)
    async with asyncio.TaskGroup() as tasks:
        shared = shm_budget.ShmBudget(2 * left.size_bytes - 1)
        first, second = (WeightLoader(models[name], 1, tasks, room=shared) for name in ("a", "b"))
        assert await first.fits()
        assert left.path.exists()
        events = [event async for event in first.load(is_ahead=True)]
        assert isinstance(events[-1], loader_module.LoadedWeights)
        assert events[-1].source == loader_module.MEMORY
        assert not await second.fits()
        first.release()


async def test_shared_memory_without_memory_behind_it_is_no_room(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container: the file system would take what the control group will not give."""
    monkeypatch.setattr(shm_budget, "available_bytes", lambda: size_of(models["a"]) - 1)
    async with serving(models, 0) as channel:
        with pytest.raises(Overloaded, match=rf"no room .* of 'a': \d+ free there, {size_of(models['a']) - 1} of"):
            await load(channel, "a")
        assert there(models) == set()


class Reading:
    """Somebody whose image is being made."""

    name, image, read_bytes = "b", None, 0

    def drop(self) -> None:
        raise AssertionError("nothing is held")


async def test_what_others_have_read_of_theirs_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, other = shm_budget.ShmBudget(), Reading()
    monkeypatch.setattr(shm_budget, "remove_abandoned", lambda: "")
    monkeypatch.setattr(shm_budget, "_free_bytes", lambda: 240 - other.read_bytes)
    async with shared.reserve(other, 100):
        assert await shared.fits(140)
        assert not await shared.fits(141)
        other.read_bytes = 90
        assert await shared.fits(140)
        assert not await shared.fits(141)
        other.read_bytes = 120  # more than it was promised
        assert await shared.fits(120)
        assert not await shared.fits(121)


async def test_room_that_one_has_found_is_not_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, free, lying_about = shm_budget.ShmBudget(), [0], ["left by a killed service"]

    def remove() -> str:
        if lying_about:
            free[0] = 100
        return lying_about.pop() if lying_about else ""

    monkeypatch.setattr(shm_budget, "remove_abandoned", remove)
    monkeypatch.setattr(shm_budget, "_free_bytes", lambda: free[0])
    monkeypatch.setattr(shm_budget, "WAIT_SECONDS", 0.0)

    ended = asyncio.Event()  # one of them: the other keeps its room until then

    async def take(holder: Reading) -> None:
        try:
            async with shared.reserve(holder, 100):
                await ended.wait()
        finally:
            ended.set()

    outcomes = await asyncio.gather(take(Reading()), take(Reading()), return_exceptions=True)
    assert sorted(map(type, outcomes), key=str) == [type(None), Overloaded]


async def test_what_is_promised_counts_towards_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_budget, "_free_bytes", lambda: 10_000)
    shared = shm_budget.ShmBudget(1000)
    async with shared.reserve(Reading(), 700):
        assert await shared.fits(300)
        assert not await shared.fits(301)


async def test_a_model_beyond_the_limit_is_refused_at_once_and_nothing_goes_for_it(
    models: dict[str, Path], tmp_path: Path
) -> None:
    write_config(tmp_path / "c", vocab_size=128)
    (tmp_path / "c" / "model.safetensors").write_bytes(safetensors_bytes(random_tensors(tmp_path / "c")))
    async with serving(models, limit := size_of(models["c"]) - 1) as channel:
        await load(channel, "a")
        with pytest.raises(Overloaded, match=rf"by itself larger than WEFT_WEIGHTS_SHM_BYTES={limit}"):
            await load(channel, "c")
        assert there(models) == {"a"}


async def test_the_time_to_map_begins_when_it_is_handed_out(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before it was read, which takes minutes from a slow disk."""
    monkeypatch.setattr(shm_budget, "HAND_OVER_SECONDS", 30.0)
    now = 0.0

    def slowly(checkpoint: Checkpoint, report: Report, num_threads: int, around: None) -> image_module.Image:
        nonlocal now
        now += 100
        return write_image(checkpoint, report, num_threads)

    monkeypatch.setattr(loader_module, "write_image", slowly)
    shared = shm_budget.ShmBudget(size_of(models["a"]), clock=lambda: now)
    async with asyncio.TaskGroup() as tasks:
        first, second = (WeightLoader(models[name], 1, tasks, room=shared) for name in ("a", "b"))
        async for _ in first.load():
            pass
        with pytest.raises(Overloaded, match="no room"):
            async for _ in second.load():
                pass
        assert there(models) == {"a"}
        first.release()


async def test_what_was_loaded_ahead_makes_room_at_once(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_budget, "HAND_OVER_SECONDS", 60.0)
    shared = shm_budget.ShmBudget(size_of(models["a"]))
    async with asyncio.TaskGroup() as tasks:
        first, second = (WeightLoader(models[name], 1, tasks, room=shared) for name in ("a", "b"))
        async for _ in first.load(is_ahead=True):
            pass
        assert not await second.fits()
        async for _ in second.load():
            pass
        assert there(models) == {"b"}
        second.release()

"""Images that go at the wrong moment: while another node asks what they hold, and when the service ends."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from tests.services.weights.service import MODEL, PATIENCE_SECONDS, load
from weft.cli.layout import free_ports
from weft.errors import NotFound
from weft.rpc.client import open_channel
from weft.rpc.server import RpcServer
from weft.weights import image as image_module
from weft.weights.checkpoint import Checkpoint, read_checkpoint
from weft.weights.formats import TensorEntry
from weft.weights.image import Image, ReaderWrapper, image_content, image_name, write_image
from weft.weights.load import Report
from weft_services.weights import loader as loader_module
from weft_services.weights import peers
from weft_services.weights import service as service_module
from weft_services.weights.__main__ import serve
from weft_services.weights.config import WeightsConfig


async def test_an_image_that_goes_while_it_is_looked_at_is_not_lent(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of its file may be another file's by then."""

    def then_gone(image: Image) -> tuple[tuple[TensorEntry, ...], dict[str, bytes]]:
        content = image_content(image)
        loader.release()
        return content

    monkeypatch.setattr(service_module, "image_content", then_gone)
    async with asyncio.TaskGroup() as tasks:
        loader = loader_module.WeightLoader(directory, 1, tasks)
        async for _ in loader.load():
            pass
        assert loader.image is not None
        lender, part = service_module.ImageServer(loader), service_module.TensorSlice("model.norm.weight", 0, 4)
        with pytest.raises(NotFound, match="not loaded here yet"):
            assert [data async for data in lender.read(loader.image.weights_hash, [part])] == []


async def test_weights_that_are_whole_when_the_service_ends_go_with_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the way to the other node is taken down the last byte may arrive."""
    is_read, may_end = threading.Event(), threading.Event()

    def slowly(checkpoint: Checkpoint, report: Report, num_threads: int, around: ReaderWrapper | None) -> Image:
        image = write_image(checkpoint, report, num_threads)
        is_read.set()
        assert may_end.wait(PATIENCE_SECONDS)
        return image

    async def stop(rpc: RpcServer, grace_seconds: float) -> None:
        await stop_listening(rpc, grace_seconds)
        asyncio.get_running_loop().call_later(0.1, may_end.set)

    async def close(peer: peers.WeightsPeer) -> None:
        assert await asyncio.to_thread(may_end.wait, PATIENCE_SECONDS)
        flights = {task for task in asyncio.all_tasks() if "WeightLoader._fetch" in repr(task.get_coro())}
        if flights:
            await asyncio.wait(flights)
        await close_peer(peer)

    stop_listening, close_peer = RpcServer.stop, peers.WeightsPeer.close
    monkeypatch.setattr(loader_module, "write_image", slowly)
    monkeypatch.setattr(RpcServer, "stop", stop)
    monkeypatch.setattr(peers.WeightsPeer, "close", close)
    service = asyncio.create_task(
        serve(WeightsConfig(model=str(directory), model_name=MODEL, weights_from="127.0.0.1:1"))
    )
    assert await asyncio.to_thread(is_read.wait, PATIENCE_SECONDS)
    service.cancel()
    await asyncio.wait({service})
    assert service.cancelled()


async def test_a_read_that_does_not_end_keeps_no_other_image(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops the service kills it after some seconds, and what it holds by then stays in shared memory."""
    shutil.copytree(directory, tmp_path / "other")
    held = image_module.SHARED_MEMORY / image_name(read_checkpoint(tmp_path / "other"))
    (port,), may_end, is_stuck = free_ports(1), threading.Event(), threading.Event()

    def stuck(checkpoint: Checkpoint, report: Report, num_threads: int, around: ReaderWrapper | None) -> Image:
        is_stuck.set()
        assert may_end.wait(PATIENCE_SECONDS)
        return write_image(checkpoint, report, num_threads)

    models = f"{MODEL}={directory},other={tmp_path / 'other'}"
    service = asyncio.create_task(serve(WeightsConfig(model=models, port=port)))
    async with open_channel(f"127.0.0.1:{port}") as channel:
        await load(channel, "other")
        (image_module.SHARED_MEMORY / (await load(channel))[-1].ready.shm_name).unlink()
        monkeypatch.setattr(loader_module, "write_image", stuck)
        asked = asyncio.create_task(load(channel))
        assert await asyncio.to_thread(is_stuck.wait, PATIENCE_SECONDS)
        service.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS / 2):
                while held.exists():  # noqa: ASYNC110 (the service beside this brings it about)
                    await asyncio.sleep(0.01)
        finally:
            may_end.set()
            await asyncio.wait({service})

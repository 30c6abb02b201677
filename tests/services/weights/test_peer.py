"""A second node that loads from the first: nothing from its own files, and all that is left when the first one dies."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import grpc
import pytest

from tests.services.weights.service import MODEL, PATIENCE_SECONDS, line_with, listening, load, serving, start
from tests.weft.weights.checkpoints import CONFIG, random_tensors, safetensors_bytes
from weft.errors import InvalidRequest, NotFound, Overloaded
from weft.rpc.client import cancelled_on_exit, open_channel
from weft.weights import image as image_module
from weft.weights.checkpoint import read_checkpoint
from weft.weights.image import Image, ReaderWrapper, write_image
from weft.weights.load import Report, image_layout
from weft_mesh.v1 import weights_service_pb2 as pb2
from weft_mesh.v1 import weights_service_pb2_grpc as pb2_grpc
from weft_services.weights import loader as loader_module
from weft_services.weights import peers
from weft_services.weights import service as service_module


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, Path]]:
    """The same checkpoint of 5 MB on two nodes. Nothing stays but what a killed process holds, to be found again."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    (one / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 2000, "hidden_size": 256}))
    (one / "model.safetensors").write_bytes(safetensors_bytes(random_tensors(one)))
    shutil.copytree(one, two)
    yield one, two
    for directory in (one, two):
        left = list(image_module.SHARED_MEMORY.glob(f"weft-weights-{read_checkpoint(directory).directory_id}-*"))
        for path in left:
            path.unlink()
        assert left == [] or (directory == one and "dies" in request.node.name)


def wipe(directory: Path) -> None:
    """Zeros where the weights were, but for the samples by which two nodes find that they have the same: whoever reads
    them notices."""
    path = directory / "model.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    wiped = bytearray(content[:header].ljust(len(content), b"\0"))
    for run in image_layout(read_checkpoint(directory)).samples():
        place = slice(run.pieces[0].offset, run.pieces[0].offset + run.size)
        wiped[place] = content[place]
    assert wiped.count(0) > len(content) // 2
    path.write_bytes(wiped)


@asynccontextmanager
async def first_node(directory: Path) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds the model, and its address."""
    with start(directory) as process:
        address = line_with(process, "listening at=").split("at=")[1].split()[0]
        line_with(process, "weights from files")
        yield process, address
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) in (0, -signal.SIGKILL)


async def hash_of(directory: Path) -> str:
    """As the node's own files have it."""
    async with serving(directory) as channel:
        return (await load(channel))[-1].ready.weights_hash


async def test_the_second_node_reads_from_the_first_and_not_from_its_files(nodes: tuple[Path, Path]) -> None:
    one, two = nodes
    wipe(two)
    async with first_node(one) as (_, address), serving(two, address) as channel:
        ready = (await load(channel))[-1].ready
        assert ready.source == address
        assert not ready.read_from_disk
        assert ready.weights_hash == await hash_of(one)


async def test_a_node_with_another_fine_tune_of_the_same_shape_is_passed_over(
    nodes: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Its weights must not become what these files are known by: a later start would find them."""
    one, two = nodes
    content = bytearray((two / "model.safetensors").read_bytes())
    trained = next(entry for entry in image_layout(read_checkpoint(two)).entries if "o_proj" in entry.name)
    content[trained.offset : trained.offset + trained.size_bytes] = os.urandom(trained.size_bytes)
    (two / "model.safetensors").write_bytes(content)
    async with first_node(one) as (_, address):
        async with serving(two, address) as channel:
            ready = (await load(channel))[-1].ready
            assert ready.source == "files"
        assert "peer holds other weights peer=" in caplog.text
        assert "is another one in these files" in caplog.text
        assert ready.weights_hash == await hash_of(two) != await hash_of(one)


async def test_a_node_that_lends_to_many_is_asked_until_it_is_our_turn(
    nodes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = nodes
    wipe(two)
    was_refused, numbers = asyncio.Event(), count()

    class BusyLender(service_module.ImageServer):
        async def read(self, weights_hash: str, slices: Sequence[service_module.TensorSlice]) -> AsyncIterator[bytes]:
            are_samples = next(numbers) == 0
            try:
                async for data in super().read(weights_hash, slices):
                    if not are_samples:
                        await was_refused.wait()  # until the other reading thread has come as well
                    yield data
            except Overloaded:
                was_refused.set()
                raise

    monkeypatch.setattr(service_module, "ImageServer", BusyLender)
    monkeypatch.setattr(service_module, "MAX_READS", 1)
    async with listening(one) as address:
        async with open_channel(address) as channel:
            held = (await load(channel))[-1].ready.weights_hash
        async with serving(two, address) as second:
            ready = (await load(second))[-1].ready
        assert (ready.source, ready.weights_hash) == (address, held)
        assert was_refused.is_set()
        monkeypatch.setattr(service_module, "MAX_READS", 0)
        monkeypatch.setattr(peers, "BUSY_SECONDS", 0.2)
        async with serving(two, address) as second:
            assert (await load(second))[-1].ready.source == "files"
    assert "has been busy for 0.2 s" in caplog.text


async def test_a_second_process_says_where_its_weights_are_from(nodes: tuple[Path, Path]) -> None:
    one, two = nodes
    wipe(two)
    async with first_node(one) as (_, address):
        with start(two, WEFT_WEIGHTS_FROM=address) as second:
            assert f"weights from {address} " in line_with(second, "weights from")
            second.terminate()
            assert second.wait(PATIENCE_SECONDS) == 0


def killing(process: subprocess.Popen[str], after_bytes: int) -> Callable[..., Image]:
    """`write_image` during which the process is killed."""

    def write(checkpoint: object, report: Report, num_threads: int, around: ReaderWrapper | None) -> Image:
        done = 0

        def told(size: int, file: str) -> None:
            nonlocal done
            done += size
            if done >= after_bytes and process.poll() is None:
                process.kill()
                process.wait()
            report(size, file)

        return write_image(checkpoint, told, 1, around)  # type: ignore[arg-type]

    return write


async def test_when_the_first_node_dies_half_way_the_rest_comes_from_files(
    nodes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = nodes
    async with first_node(one) as (process, address):
        monkeypatch.setattr(loader_module, "write_image", killing(process, 1_000_000))
        async with serving(two, address) as channel:
            ready = (await load(channel))[-1].ready
            assert ready.read_from_disk
        monkeypatch.undo()
        assert process.poll() is not None
    assert "reading the rest of the weights from files" in caplog.text
    assert ready.weights_hash == await hash_of(two)


async def test_a_node_with_other_weights_that_dies_leaves_nothing_of_them(
    nodes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = nodes
    wipe(two)
    async with first_node(one) as (process, address):
        monkeypatch.setattr(loader_module, "write_image", killing(process, 1_000_000))
        async with serving(two, address) as channel:
            ready = (await load(channel))[-1].ready
            assert ready.read_from_disk
        monkeypatch.undo()
    assert "peer holds other weights peer=" in caplog.text
    assert ready.weights_hash == await hash_of(two)


async def test_a_node_that_is_away_or_has_another_model_is_passed_over(
    nodes: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    one, two = nodes
    async with serving(two, "127.0.0.1:1") as channel:
        assert (await load(channel))[-1].ready.source == "files"
    (two / "model.safetensors").touch()
    (one / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 1000, "hidden_size": 256}))
    (one / "model.safetensors").write_bytes(safetensors_bytes(random_tensors(one)))
    async with first_node(one) as (_, address), serving(two, address) as channel:
        assert (await load(channel))[-1].ready.source == "files"
    assert "holds another model under the name 'tiny'" in caplog.text


async def read(channel: grpc.aio.Channel, weights_hash: str, *parts: tuple[str, int, int]) -> bytes:
    stub: pb2_grpc.WeightServiceAsyncStub = pb2_grpc.WeightServiceStub(channel)
    wanted = [pb2.TensorPart(tensor=name, first=first, size=size) for name, first, size in parts]
    request = pb2.ReadImageRequest(model=MODEL, weights_hash=weights_hash, parts=wanted)
    async with cancelled_on_exit(stub.ReadImage(request, timeout=PATIENCE_SECONDS)) as call:
        return b"".join([response.data async for response in call])


async def test_what_is_lent_is_bounded(nodes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.embed_tokens.weight"
    async with serving(nodes[0]) as channel:
        stub: pb2_grpc.WeightServiceAsyncStub = pb2_grpc.WeightServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="not loaded here yet"):
            await stub.DescribeImage(pb2.DescribeImageRequest(model=MODEL), timeout=PATIENCE_SECONDS)
        held = (await load(channel))[-1].ready.weights_hash
        assert len(await read(channel, held, (name, 3, 5), (name, 0, 7))) == 12
        with pytest.raises(NotFound, match="are not held here"):
            await read(channel, "f" * 64, (name, 0, 1))
        for part in ((name, 10**9, 1), (name, 0, 10**9), ("nonsense", 0, 1)):
            with pytest.raises(InvalidRequest, match="has no bytes"):
                await read(channel, held, part)
        with pytest.raises(InvalidRequest, match="bytes at a time"):
            await read(channel, held, *[(name, 0, 1_000_000)] * 9)
        with monkeypatch.context() as patch:
            patch.setattr(service_module, "TensorSlice", None)
            with pytest.raises(InvalidRequest, match="at most 10000 parts at a time"):
                await read(channel, held, *[(name, 0, 1)] * (service_module.MAX_PARTS + 1))
        monkeypatch.setattr(service_module, "MAX_READS", 0)
        with pytest.raises(Overloaded):
            await read(channel, held, (name, 0, 1))

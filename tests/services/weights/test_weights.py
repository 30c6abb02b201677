"""WeightService over a real channel, and as a process that is stopped, killed and started on bad input."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.weights.service import MODEL, PATIENCE_SECONDS, line_with, load, serving, start
from tests.weft.weights.checkpoints import make_checkpoint, write_config
from weft import log
from weft.errors import BadCheckpoint, NotFound, StorageUnavailable
from weft.rpc.client import cancelled_on_exit
from weft.weights import image as image_module
from weft.weights.checkpoint import Checkpoint, read_checkpoint
from weft.weights.image import image_name
from weft.weights.image_tensors import open_image
from weft.weights.load import Report
from weft_mesh.v1 import weights_service_pb2 as pb2
from weft_mesh.v1 import weights_service_pb2_grpc as pb2_grpc
from weft_services.weights import __main__ as main_module
from weft_services.weights import loader as loader_module


async def test_the_first_load_reads_and_the_next_finds(directory: Path) -> None:
    async with serving(directory) as channel:
        first = (await load(channel))[-1].ready
        second = (await load(channel))[-1].ready
        assert first.read_from_disk
        assert not second.read_from_disk
        assert (first.shm_name, first.weights_hash) == (second.shm_name, second.weights_hash)
        assert "model.norm.weight" in open_image(first.shm_name, first.size_bytes)
        assert '"LlamaForCausalLM"' in first.config_json


async def test_an_output_matrix_that_is_not_the_embedding_comes_along(directory: Path) -> None:
    write_config(directory, tie_word_embeddings=True)
    async with serving(directory) as channel:
        ready = (await load(channel))[-1].ready
        assert "lm_head.weight" in open_image(ready.shm_name, ready.size_bytes)
        assert json.loads(ready.config_json)["tie_word_embeddings"] is False


async def test_loads_at_the_same_time_share_one_reading_and_all_see_progress(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_finish = threading.Event()
    num_reads = []

    def slowly(checkpoint: Checkpoint, report: Report, num_threads: int, around: None) -> image_module.Image:
        num_reads.append(1)
        image = image_module.write_image(checkpoint, report, num_threads)
        assert may_finish.wait(PATIENCE_SECONDS)
        return image

    monkeypatch.setattr(loader_module, "write_image", slowly)
    async with serving(directory) as channel:
        stub: pb2_grpc.WeightServiceAsyncStub = pb2_grpc.WeightServiceStub(channel)

        watching = set(range(4))

        async def follow(number: int) -> list[pb2.LoadResponse]:
            responses = []
            async with cancelled_on_exit(stub.Load(pb2.LoadRequest(model=MODEL), timeout=PATIENCE_SECONDS)) as call:
                async for response in call:
                    responses.append(response)
                    if response.progress.total_bytes == response.progress.read_bytes > 0:
                        watching.discard(number)
                    if not watching:
                        may_finish.set()
            return responses

        everything = await asyncio.gather(*(follow(number) for number in range(4)))
    assert len(num_reads) == 1
    for responses in everything:
        assert responses[-1].ready.read_from_disk
        assert responses[0].progress.total_bytes == sum(
            tensor.entry.size_bytes for tensor in read_checkpoint(directory).tensors
        )


async def test_a_caller_that_leaves_does_not_end_the_reading_for_others(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_finish = threading.Event(), threading.Event()

    def slowly(checkpoint: Checkpoint, report: Report, num_threads: int, around: None) -> image_module.Image:
        began.set()
        assert may_finish.wait(PATIENCE_SECONDS)
        return image_module.write_image(checkpoint, report, num_threads)

    monkeypatch.setattr(loader_module, "write_image", slowly)
    async with serving(directory) as channel:
        leaver = asyncio.create_task(load(channel))
        assert await asyncio.to_thread(began.wait, PATIENCE_SECONDS)
        heard = asyncio.Event()
        stayer = asyncio.create_task(load(channel, heard=heard))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await heard.wait()
        leaver.cancel()
        await asyncio.wait({leaver})
        may_finish.set()
        assert (await stayer)[-1].ready.read_from_disk


async def test_a_stop_in_the_middle_of_the_reading_leaves_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_go_on = threading.Event(), threading.Event()

    def slowly(checkpoint: Checkpoint, report: Report, num_threads: int, around: None) -> image_module.Image:
        def halting(num_bytes: int, file: str) -> None:
            began.set()
            assert may_go_on.wait(PATIENCE_SECONDS)
            report(num_bytes, file)

        return image_module.write_image(checkpoint, halting, num_threads)

    async def serve() -> None:
        async with serving(directory) as channel:
            await load(channel)

    monkeypatch.setattr(loader_module, "write_image", slowly)
    service = asyncio.create_task(serve())
    assert await asyncio.to_thread(began.wait, PATIENCE_SECONDS)
    service.cancel()
    may_go_on.set()
    await asyncio.wait({service})
    assert service.cancelled()


async def test_another_model_is_not_found(directory: Path) -> None:
    async with serving(directory) as channel:
        with pytest.raises(NotFound, match="no model 'other' here"):
            await load(channel, "other")


async def test_a_bad_checkpoint_is_said_and_can_be_mended(directory: Path) -> None:
    file = directory / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1])
    async with serving(directory) as channel:
        with pytest.raises(BadCheckpoint, match=r"model\.safetensors: truncated: tensor lm_head\.weight"):
            await load(channel)
        file.write_bytes(good)
        assert (await load(channel))[-1].ready.read_from_disk


class Stumbling:
    """A loader whose storage fails so many times."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures

    async def load(self, is_ahead: bool) -> AsyncIterator[loader_module.ReadProgress]:
        yield loader_module.ReadProgress(100 << 20, 300 << 20, "model.safetensors")
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise StorageUnavailable("s3://models/tiny/model.safetensors: connection reset")


async def test_storage_that_fails_is_asked_again_until_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(main_module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(main_module, "LOG_SECONDS", 0.0)
    loader = Stumbling(3)
    with caplog.at_level("INFO"):
        await main_module._preload("tiny", loader, 0)  # type: ignore[arg-type]
    assert loader.num_failures == -1
    assert caplog.text.count("load failed, retrying model='tiny'") == 3
    found = log.PROGRESS.search(caplog.text)
    assert found is not None
    assert found.groups() == ("weights of tiny", "100", "300")


async def test_an_image_that_somebody_removed_is_read_again(directory: Path) -> None:
    async with serving(directory) as channel:
        first = (await load(channel))[-1].ready
        (image_module.SHARED_MEMORY / first.shm_name).unlink()
        assert (await load(channel))[-1].ready.read_from_disk


def test_a_killed_service_finds_its_image_again_and_a_stopped_one_leaves_nothing(directory: Path) -> None:
    path = image_module.SHARED_MEMORY / image_name(read_checkpoint(directory))
    with start(directory) as process:
        line_with(process, "weights from files")
        process.kill()
    assert path.exists()
    with start(directory) as process:
        line_with(process, "weights from memory")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    assert not path.exists()


def test_a_model_may_have_more_files_than_a_process_begins_with(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", 21)
    with start(tmp_path / "model", ("sh", "-c", 'ulimit -Sn 32; exec "$@"', "sh")) as process:
        line = next(line for line in process.stderr or () if "weights from files" in line or "anew" in line)
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0
    assert "weights from files" in line


def test_a_service_that_is_stopped_leaves_what_workers_map_to_the_next(directory: Path) -> None:
    """As in an upgrade, one process at a time: read again, it would take memory twice."""
    path = image_module.SHARED_MEMORY / image_name(read_checkpoint(directory))
    with start(directory) as process:
        line_with(process, "weights from files")
        mapped = open_image(path.name, path.stat().st_size)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    assert path.exists()
    with start(directory) as process:
        line_with(process, "weights from memory")
        mapped.clear()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    assert not path.exists()


def test_a_bad_checkpoint_ends_the_process_with_one_line_and_status_2(directory: Path) -> None:
    (directory / "config.json").unlink()
    with start(directory) as process:
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2
    assert "config.json: no such file" in errors.splitlines()[-1]
    assert "Traceback" not in errors

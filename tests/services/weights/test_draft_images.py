"""The draft model of a served model is a second image, with the checks of the first."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file

from tests.services.weights.service import MODEL, PATIENCE_SECONDS, line_with, load, start
from weft.config import shipped_model
from weft.errors import BadCheckpoint, ConfigError, NotFound
from weft.rpc.client import open_channel
from weft.weights.image_tensors import open_image
from weft_mesh.v1 import weights_service_pb2 as pb2
from weft_mesh.v1 import weights_service_pb2_grpc as pb2_grpc
from weft_services.weights.config import WeightsConfig

NANO = shipped_model() or Path()
DRAFT = f"{MODEL}.draft"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """weft-nano with its head, in a directory of its own: images are named after directories."""
    shutil.copytree(NANO, tmp_path / "nano", ignore=shutil.ignore_patterns("training.*"))
    return tmp_path / "nano"


@contextmanager
def running(model: Path, **settings: str) -> Iterator[str]:
    """The service as a process; its address."""
    with start(model, **settings) as process:
        try:
            yield line_with(process, "listening at=").partition("listening at=")[2].split()[0]
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE_SECONDS)


@asynccontextmanager
async def serving(model: Path, **settings: str) -> AsyncIterator[grpc.aio.Channel]:
    with running(model, **settings) as address:
        async with open_channel(address) as channel:
            yield channel


async def ready(channel: grpc.aio.Channel, name: str) -> pb2.LoadReady:
    return (await load(channel, name))[-1].ready


async def test_head_beside_the_model_is_a_second_image(model: Path) -> None:
    async with serving(model) as channel:
        target = await ready(channel, MODEL)
        assert target.draft_model == DRAFT
        head = await ready(channel, DRAFT)
        tensors, stored = open_image(head.shm_name, head.size_bytes), load_file(model / "draft" / "model.safetensors")
        assert tensors.keys() == stored.keys()
        assert all(torch.equal(tensors[name], stored[name]) for name in stored)
        tensors.clear()  # an image that is mapped would outlive the service
        stub: pb2_grpc.WeightServiceAsyncStub = pb2_grpc.WeightServiceStub(channel)
        described = await stub.DescribeImage(pb2.DescribeImageRequest(model=DRAFT))
    assert head.draft_model == ""
    assert described.weights_hash == head.weights_hash != target.weights_hash
    assert json.loads(head.config_json)["eagle_config"]["boundaries"] == [1, 3, 5]


async def test_head_of_another_directory_is_served_if_it_is_named(model: Path, tmp_path: Path) -> None:
    (model / "draft").rename(tmp_path / "head")
    async with serving(model, WEFT_DRAFT=str(tmp_path / "head")) as channel:
        assert (await ready(channel, MODEL)).draft_model == DRAFT
        assert (await ready(channel, DRAFT)).size_bytes > 1 << 20


@pytest.mark.parametrize("choice", ["none", "ngram"])
async def test_no_head_is_served_without_a_use(choice: str, model: Path) -> None:
    async with serving(model, WEFT_DRAFT=choice) as channel:
        assert (await ready(channel, MODEL)).draft_model == ""
        with pytest.raises(NotFound, match=f"no model '{DRAFT}' here"):
            await load(channel, DRAFT)


async def test_head_that_does_not_fit_is_refused_by_file_and_field(model: Path) -> None:
    path = model / "draft" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_hidden_size": 128}))
    async with serving(model) as channel:
        with pytest.raises(BadCheckpoint, match=r"draft/config.json: target_hidden_size: 128, but the target has 256"):
            await load(channel, DRAFT)


async def test_second_node_reads_the_head_of_the_first_one(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "second" / "nano")
    with running(model) as lender:
        async with open_channel(lender) as channel:
            first = await ready(channel, DRAFT)
        async with serving(tmp_path / "second" / "nano", WEFT_WEIGHTS_FROM=lender) as channel:
            second = await ready(channel, DRAFT)
    assert second.source == lender
    assert second.weights_hash == first.weights_hash


def test_one_head_cannot_serve_several_models() -> None:
    WeightsConfig(model="a=x,b=y", draft="auto")
    with pytest.raises(ConfigError, match=r"WEFT_DRAFT=head: one head cannot draft for several models; put each head"):
        WeightsConfig(model="a=x,b=y", draft="head")


def test_missing_hub_head_ends_the_process_with_one_line(model: Path) -> None:
    with start(model, WEFT_DRAFT="org/head", HF_HUB_OFFLINE="1", HF_HOME=str(model)) as process:
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert isinstance(process, subprocess.Popen)
    assert process.returncode == 2
    assert "org/head: the cache" in errors.splitlines()[-1]

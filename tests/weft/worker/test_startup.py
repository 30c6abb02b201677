"""Settings become an engine: sizes, and weights from a service that may be late, slow or gone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.capacity.sizes import Machine, Sizes, choose_sizes
from weft.config import read_config
from weft.engine.drafting.graph_rows import GraphRows
from weft.engine.runner import assemble
from weft.errors import BadCheckpoint, ConfigError, NotFound, Overloaded, PeerLost
from weft.request import WorkerRole
from weft.rpc.server import RpcServer
from weft.worker import group_startup, startup
from weft.worker.config import WorkerConfig
from weft.worker.fleet_client import LoadProgress
from weft.worker.startup import WeightImages, load_weights, parse_config
from weft_mesh.v1 import weights_service_pb2 as pb2
from weft_mesh.v1 import weights_service_pb2_grpc

MINIMUM = {
    "WEFT_WORKER_ID": "w",
    "WEFT_SCHEDULER_ADDR": "s:1",
    "WEFT_WEIGHTS_ADDR": "w:1",
    "WEFT_MODEL": "/models/nano",
}
FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "torch_dtype": "float32",
}
READY = pb2.LoadResponse(ready=pb2.LoadReady(shm_name="image", size_bytes=7, weights_hash="cafe"))


def config(**more: str) -> WorkerConfig:
    return read_config(WorkerConfig, {**MINIMUM, **{f"WEFT_{name}": value for name, value in more.items()}})


def arrival() -> LoadProgress:
    return LoadProgress("w", WorkerRole.DECODE, "nano")


def test_the_model_is_named_after_its_directory_unless_told() -> None:
    assert config().served_name == "nano"
    assert config(MODEL_NAME="other").served_name == "other"


def test_peers_use_the_host_unless_another_is_advertised() -> None:
    assert config(HOST="0.0.0.0", ADVERTISE_HOST="10.0.0.7").peer_host == "10.0.0.7"
    assert config().peer_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("more", "variable"),
    [
        ({"DEVICE": "cpu"}, "WEFT_DEVICE"),
        ({"DTYPE": "float16"}, "WEFT_DTYPE"),
        ({"TRANSPORT": "pigeon"}, "WEFT_TRANSPORT"),
        ({"CHUNK_TOKENS": "-1"}, "WEFT_CHUNK_TOKENS"),
        ({"MAX_SEQS": "-1"}, "WEFT_MAX_SEQS"),
        ({"NUM_BLOCKS": "-1"}, "WEFT_NUM_BLOCKS"),
        ({"CPUS": "all"}, "WEFT_CPUS"),
        ({"NICENESS": "20"}, "WEFT_NICENESS"),
        ({"NICENESS": "-1"}, "WEFT_NICENESS"),
        ({"GPU_SHARE": "0"}, "WEFT_GPU_SHARE"),
        ({"GPU_SHARE": "50"}, "WEFT_GPU_SHARE"),
        ({"HOST": "0.0.0.0"}, "WEFT_ADVERTISE_HOST"),
        ({"MODEL": ""}, "WEFT_MODEL"),
        ({"WORKER_ID": ""}, "WEFT_WORKER_ID"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(more: dict[str, str], variable: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        config(**more)


def test_workers_that_share_a_gpu_leave_each_other_their_part() -> None:
    assert startup.usable_bytes(free=90, total=100, share=1.0, held=40) == 90
    assert startup.usable_bytes(free=90, total=100, share=0.5, held=0) == 50
    # the other one has taken all of its half meanwhile, or nothing yet: that changes nothing
    assert startup.usable_bytes(free=20, total=100, share=0.5, held=30) == 20
    assert startup.usable_bytes(free=70, total=100, share=0.5, held=30) == 20


def test_what_settings_leave_open_follows_the_device() -> None:
    cpu, gpu = Machine("cpu", "float32", 16, is_resident=True), Machine("cuda", "bfloat16", 64)
    assert choose_sizes(config().wanted, has_cuda=False) == Sizes(cpu, 512, 256, 128, 64, 0)
    assert choose_sizes(config().wanted, has_cuda=True) == Sizes(gpu, 2048, 512, 512, 256, 0)
    more = {
        "CHUNK_TOKENS": "9",
        "MAX_SEQS": "7",
        "NUM_BLOCKS": "6",
        "WEIGHT_FORMAT": "packed12",
    }
    said = choose_sizes(config(DTYPE="bfloat16", **more).wanted, has_cuda=False)
    assert said == Sizes(Machine("cpu", "bfloat16", 16, is_resident=True), 9, 256, 128, 7, 6)
    assert not choose_sizes(config(WEIGHT_FORMAT="plain").wanted, has_cuda=False).machine.is_resident
    assert choose_sizes(config(WEIGHT_FORMAT="packed12").wanted, has_cuda=True).machine.is_resident


def test_the_models_config_comes_over_the_wire(tmp_path: Path) -> None:
    assert parse_config(json.dumps({**FIELDS, "eos_token_id": [3, 4]})).eos_token_ids == (3, 4)
    with pytest.raises(BadCheckpoint, match="vocab_size"):
        parse_config(json.dumps({**FIELDS, "vocab_size": -1}))


@pytest.mark.parametrize(("more", "what"), [({}, "KV of 1024 tokens"), ({"NUM_BLOCKS": "7"}, "WEFT_NUM_BLOCKS")])
def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_opened(
    more: dict[str, str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "available_bytes", lambda: 1000)
    there = pb2.LoadReady(config_json=json.dumps(FIELDS), shm_name="no such image", size_bytes=7)
    make = partial(assemble, listener=lambda output: None)
    sizes = choose_sizes(config(**more).wanted, False)
    with pytest.raises(BadCheckpoint, match=f"the model does not fit: .*{what}"):
        startup._build(config(**more), sizes, WeightImages(there), make, arrival())


async def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "available_bytes", lambda: 1000)
    for name in ("disable_malloc_trim", "set_autogroup_nice"):  # of this process, which goes on
        monkeypatch.setattr(startup, name, lambda *_: None)
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    with pytest.raises(BadCheckpoint, match="the model does not fit"):
        await startup.load_engine(config(MODEL=str(tmp_path), WEIGHTS_ADDR="nobody:1"), lambda output: None, arrival())


@pytest.mark.parametrize(
    ("cuda", "why"), [(None, "is built for CPUs only"), ("13.0", r"\(CUDA 13.0\) finds no GPU, or a driver too old")]
)
async def test_a_worker_that_is_meant_for_a_gpu_does_not_start_without(
    cuda: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "disable_malloc_trim", lambda: None)  # of this process, which goes on
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError, match=f"WEFT_DEVICE=cuda: torch {re.escape(torch.__version__)} {why}"):
        await startup.load_engine(config(DEVICE="cuda"), lambda output: None, arrival())


@pytest.mark.parametrize(
    ("more", "granted", "expected"), [({}, None, 64), ({}, 8, 8), ({}, 80, 64), ({"THREADS": "16"}, 8, 16)]
)
async def test_a_worker_computes_on_no_more_cores_than_its_container_is_granted(
    more: dict[str, str], granted: int | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "available_bytes", lambda: 1000)
    for name in ("disable_malloc_trim", "set_autogroup_nice"):  # of this process, which goes on
        monkeypatch.setattr(startup, name, lambda *_: None)
    num_threads: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", num_threads.append)
    monkeypatch.setattr(group_startup, "granted_cores", lambda: granted)
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    with pytest.raises(BadCheckpoint, match="the model does not fit"):
        await startup.load_engine(
            config(MODEL=str(tmp_path), WEIGHTS_ADDR="nobody:1", **more), lambda output: None, arrival()
        )
    assert num_threads == [expected]


@pytest.mark.parametrize(
    ("stored", "wanted", "isa", "says"),
    [
        ("float16", "auto", "avx2", "float16 checkpoint is computed in float32 .*: without loss"),
        (
            "float16",
            "bfloat16",
            "avx2",
            "float16 checkpoint is computed in bfloat16 .*: 3 bits of each weight are lost",
        ),
        ("bfloat16", "auto", "avx512_bf16", "--dtype bfloat16 .* is faster"),
        ("bfloat16", "auto", "amx", "--dtype bfloat16 .* is faster"),
        ("bfloat16", "float32", "avx512_bf16", None),
        ("bfloat16", "auto", "avx512", None),
        ("float32", "auto", "avx512_bf16", None),
    ],
)
def test_what_becomes_of_the_checkpoints_numbers_is_told_once(
    stored: str,
    wanted: str,
    isa: str,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(startup, "best_isa", lambda: isa)
    settings = config(DTYPE=wanted)
    with caplog.at_level("INFO"):
        startup._log_dtype(
            settings, choose_sizes(settings.wanted, False), parse_config(json.dumps({**FIELDS, "dtype": stored}))
        )
    assert len(caplog.messages) == (says is not None)
    assert says is None or re.search(says, caplog.messages[0])


def test_sequences_at_a_time_are_a_setting() -> None:
    model = parse_config(json.dumps(FIELDS))
    settings = config(MAX_SEQS="7")
    assert startup._limits(settings, choose_sizes(settings.wanted, False), model).max_num_seqs == 7


Answer = Callable[[pb2.LoadRequest], AsyncIterator[pb2.LoadResponse]]


@asynccontextmanager
async def start_weights(answer: Answer, port: int = 0) -> AsyncIterator[str]:
    class Servicer(weights_service_pb2_grpc.WeightServiceServicer):
        async def Load(self, request: pb2.LoadRequest, context: Any) -> AsyncIterator[pb2.LoadResponse]:
            async for response in answer(request):
                yield response

        async def DescribeImage(self, request: Any, context: Any) -> pb2.DescribeImageResponse:
            raise AssertionError("workers do not ask")

        def ReadImage(self, request: Any, context: Any) -> AsyncIterator[pb2.ReadImageResponse]:
            raise AssertionError("workers do not ask")

    rpc = RpcServer([])
    weights_service_pb2_grpc.add_WeightServiceServicer_to_server(Servicer(), rpc.server)
    try:
        yield await rpc.start("127.0.0.1", port)
    finally:
        await rpc.stop(0)


async def ready(request: pb2.LoadRequest) -> AsyncIterator[pb2.LoadResponse]:
    assert request.model == "nano"
    yield pb2.LoadResponse(progress=pb2.LoadProgress(read_bytes=1, total_bytes=7))
    yield READY


async def unknown(request: pb2.LoadRequest) -> AsyncIterator[pb2.LoadResponse]:
    raise NotFound("no such model here")
    yield READY


async def full(request: pb2.LoadRequest) -> AsyncIterator[pb2.LoadResponse]:
    raise Overloaded("no room in /dev/shm")
    yield READY


async def stalled(request: pb2.LoadRequest) -> AsyncIterator[pb2.LoadResponse]:
    await asyncio.Event().wait()
    yield READY


async def test_weights_are_announced_after_their_progress() -> None:
    told: list[tuple[int, int]] = []
    async with start_weights(ready) as address:
        assert (await load_weights(address, "nano", lambda *progress: told.append(progress))).weights_hash == "cafe"
    assert told == [(1, 7)]


async def test_a_weights_service_that_starts_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "RETRY_SECONDS", 0.05)
    async with start_weights(ready) as address:
        pass
    loading = asyncio.create_task(load_weights(address, "nano"))
    await asyncio.sleep(0)
    async with start_weights(ready, int(address.rpartition(":")[2])):
        assert (await loading).weights_hash == "cafe"


async def test_a_model_that_is_not_there_ends_the_wait_at_once() -> None:
    async with start_weights(unknown) as address:
        with pytest.raises(NotFound, match="no such model"):
            await load_weights(address, "nano")


async def test_a_weights_service_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "WEIGHTS_WAIT_SECONDS", 0.1)
    async with start_weights(stalled) as address:
        with pytest.raises(PeerLost, match="does not answer"):
            await load_weights(address, "nano")


async def test_why_there_are_no_weights_is_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "WEIGHTS_WAIT_SECONDS", 3.0)  # a busy machine takes a moment to the first answer
    monkeypatch.setattr(startup, "RETRY_SECONDS", 0.05)
    async with start_weights(full) as address:
        with pytest.raises(PeerLost, match="no room in /dev/shm"):
            await load_weights(address, "nano")


async def drafted(request: pb2.LoadRequest) -> AsyncIterator[pb2.LoadResponse]:
    name = "nano.draft" if request.model == "nano" else ""
    yield pb2.LoadResponse(ready=pb2.LoadReady(shm_name=request.model, weights_hash="cafe", draft_model=name))


@pytest.mark.parametrize(
    ("draft", "has_cuda", "expected"),
    [
        ("auto", False, "nano.draft"),
        ("mtp", False, "nano.draft"),
        ("/heads/nano", True, "nano.draft"),
        ("auto", True, None),
        ("ngram", False, None),
        ("none", False, None),
    ],
)
async def test_draft_model_is_loaded_if_the_setting_allows_it(draft: str, has_cuda: bool, expected: str | None) -> None:
    async with start_weights(drafted) as address:
        settings = config(WEIGHTS_ADDR=address, DRAFT=draft)
        images = await startup._load_images(settings, choose_sizes(settings.wanted, has_cuda), arrival())
    assert images.model.shm_name == "nano"
    assert (images.draft.shm_name if images.draft else None) == expected


async def test_missing_draft_model_is_an_error_only_if_it_is_named() -> None:
    async with start_weights(ready) as address:
        settings = config(WEIGHTS_ADDR=address)
        sizes = choose_sizes(settings.wanted, False)
        assert (await startup._load_images(settings, sizes, arrival())).draft is None
        with pytest.raises(
            ConfigError, match=r"WEFT_DRAFT=mtp: the weights service .* has no draft model of 'nano'; set"
        ):
            await startup._load_images(config(WEIGHTS_ADDR=address, DRAFT="mtp"), sizes, arrival())


@pytest.mark.parametrize(
    ("draft", "is_gpu", "follows"),
    [("auto", False, True), ("auto", True, None), ("ngram", True, False), ("none", False, None), ("/head", True, True)],
)
def test_speculator_follows_the_setting(draft: str, is_gpu: bool, follows: bool | None) -> None:
    settings = config(DRAFT=draft)
    limits = startup._limits(settings, choose_sizes(settings.wanted, is_gpu), parse_config(json.dumps(FIELDS)))
    speculator = startup.make_speculator(settings.draft, limits, is_gpu)
    assert (speculator._follows_grammars if speculator else None) == follows
    if speculator is not None:
        assert speculator._graph_rows == (GraphRows((1, 2, 4, 8), 512) if is_gpu else None)
    # Graphs of an engine that never drafts have no rows for drafts.
    assert limits.max_drafts == (0 if follows is None else 7 if is_gpu else 15)

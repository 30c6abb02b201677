"""From settings to an engine: weights from the node's weights service, sizes from the machine, and a fingerprint."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch

from weft.capacity.room import Machine, Room, available_bytes, default_num_blocks, measure_room
from weft.engine.build import build_engine
from weft.engine.config import EngineConfig
from weft.engine.core import Engine
from weft.engine.messages import StepOutput
from weft.errors import PeerLost
from weft.kv.groups import Paging
from weft.model.config import ModelConfig, read_config
from weft.model.kv_layout import block_bytes, kv_groups, layout_name
from weft.request import ModelFingerprint
from weft.rpc.client import open_channel, owned
from weft.weights.shared import open_image
from weft.worker.config import Dtype, WorkerConfig
from weft.worker.cpus import pin
from weft_mesh.v1 import weights_service_pb2, weights_service_pb2_grpc

logger = logging.getLogger(__name__)
WEIGHTS_WAIT_SECONDS = 120.0
RETRY_SECONDS = 0.5
CPU_BLOCK_TOKENS, GPU_BLOCK_TOKENS = 16, 64
# by default a pool holds so many sequences of full length, memory permitting
FULL_SEQUENCES = 32
# a worker that holds less than this of one sequence is no use
LEAST_CONTEXT_TOKENS = 1024
CPU_MAX_SEQS, GPU_MAX_SEQS = 64, 256


@dataclass(frozen=True, slots=True)
class Booted:
    """An engine that has not been started, and what to tell peers about it."""

    engine: Engine
    device: str
    fingerprint: ModelFingerprint
    engine_config: EngineConfig


async def boot(config: WorkerConfig, listener: Callable[[StepOutput], None]) -> Booted:
    """Load, map and build. Raises PeerLost when no weights service answers in time, BadCheckpoint, NotFound."""
    num_cores = pin(config.cpus) if config.cpus else 0
    if config.threads or num_cores:
        torch.set_num_threads(config.threads or num_cores)
    machine = choose_machine(config, torch.cuda.is_available())
    ready = await load_weights(config.weights_addr, config.served_name)
    return await asyncio.to_thread(_build, config, machine, ready, listener)


def choose_machine(config: WorkerConfig, has_cuda: bool) -> Machine:
    """Fill in what the settings leave open."""
    dtype = config.dtype
    if dtype is Dtype.AUTO:
        dtype = Dtype.BFLOAT16 if has_cuda else Dtype.FLOAT32
    block_tokens = config.block_tokens or (GPU_BLOCK_TOKENS if has_cuda else CPU_BLOCK_TOKENS)
    return Machine("cuda" if has_cuda else "cpu", dtype, block_tokens)


async def load_weights(address: str, model: str) -> weights_service_pb2.LoadReady:
    """Ask until the weights service is there, then follow its progress."""
    channel = open_channel(address)
    try:
        async with asyncio.timeout(WEIGHTS_WAIT_SECONDS) as patience:
            while True:
                try:
                    return await _follow_load(channel, model, patience)
                except PeerLost as error:
                    logger.info("waiting for the weights service at %s: %s", address, error)
                await asyncio.sleep(RETRY_SECONDS)
    except TimeoutError:
        raise PeerLost(f"the weights service at {address} is away or stands still") from None
    finally:
        await channel.close()


async def _follow_load(
    channel: grpc.aio.Channel, model: str, patience: asyncio.Timeout
) -> weights_service_pb2.LoadReady:
    stub = weights_service_pb2_grpc.WeightServiceStub(channel)
    loop = asyncio.get_running_loop()
    told_at = loop.time()
    async with owned(stub.Load(weights_service_pb2.LoadRequest(model=model))) as call:
        async for response in call:
            patience.reschedule(loop.time() + WEIGHTS_WAIT_SECONDS)
            if response.WhichOneof("event") == "ready":
                source = "disk" if response.ready.read_from_disk else "shared memory"
                logger.info("weights: %.1f MiB from %s", response.ready.size_bytes / 2**20, source)
                return response.ready
            if loop.time() - told_at >= 1.0:
                told_at = loop.time()
                progress = response.progress
                logger.info("weights: %d of %d MiB read", progress.read_bytes >> 20, progress.total_bytes >> 20)
    raise PeerLost("the weights service ended the call early")


def _build(
    config: WorkerConfig,
    machine: Machine,
    ready: weights_service_pb2.LoadReady,
    listener: Callable[[StepOutput], None],
) -> Booted:
    model = parse_config(ready.config_json)
    size = block_bytes(model, machine.dtype, machine.block_tokens)
    steps_ahead = int(machine.device == "cuda")
    paging = Paging(kv_groups(model).reaches, machine.block_tokens, config.chunk_tokens * (1 + steps_ahead))
    max_seqs = GPU_MAX_SEQS if machine.device == "cuda" else CPU_MAX_SEQS
    room = measure_room(model, machine, config.chunk_tokens, max_seqs, _free_bytes(machine))
    num_blocks = config.num_blocks or _num_blocks(room, paging, machine, size, model.max_positions)
    room.check(num_blocks * size, f"{num_blocks} blocks of KV (WEFT_NUM_BLOCKS)")
    engine_config = EngineConfig(
        num_blocks=num_blocks,
        block_tokens=machine.block_tokens,
        vocab_size=model.vocab_size,
        max_context_tokens=model.max_positions,
        chunk_tokens=config.chunk_tokens,
        max_num_seqs=max_seqs,
        eos_token_ids=model.eos_token_ids,
        reaches=paging.reaches,
        steps_ahead=steps_ahead,
        decode_graphs=config.cuda_graphs and machine.device == "cuda",
        pin_sealed=bool(config.kvstore_addr) and machine.device == "cpu",
    )
    engine = build_engine(
        model,
        open_image(ready.shm_name, ready.size_bytes),
        dtype=machine.dtype,
        device=machine.device,
        engine_config=engine_config,
        listener=listener,
    )
    logger.info(
        "engine: %s on %s, %d blocks of %d tokens, %d KiB each",
        *(machine.dtype, machine.device, num_blocks, machine.block_tokens, size >> 10),
    )
    fingerprint = ModelFingerprint(ready.weights_hash, machine.dtype, machine.block_tokens, size, layout_name(model))
    return Booted(engine, machine.device, fingerprint, engine_config)


def parse_config(config_json: str) -> ModelConfig:
    """The model's config as the weights service sent it."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(config_json, encoding="utf-8")
        return read_config(Path(directory))


def _num_blocks(room: Room, paging: Paging, machine: Machine, block_bytes: int, max_context_tokens: int) -> int:
    num_tokens = min(max_context_tokens, LEAST_CONTEXT_TOKENS)
    least = paging.max_pages(num_tokens)
    room.check(least * block_bytes, f"KV of {num_tokens} tokens")
    most = FULL_SEQUENCES * paging.max_pages(max_context_tokens)
    return default_num_blocks(room, machine.device == "cpu", block_bytes, least, most)


def _free_bytes(machine: Machine) -> int:
    return available_bytes() if machine.device == "cpu" else torch.cuda.mem_get_info()[0]

"""From settings to an engine: weights from the node's weights service, sizes from the machine, and a fingerprint."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import torch

from weft import log
from weft.capacity.plan import RUNTIME_BYTES
from weft.capacity.room import (
    CHUNK_TOKENS,
    Machine,
    Room,
    available_bytes,
    default_num_blocks,
    measure_room,
    measured_room,
)
from weft.engine.build import assemble
from weft.engine.config import EngineConfig
from weft.engine.core import Engine
from weft.engine.graphs import static_bytes
from weft.engine.manners import CPU_NICENESS
from weft.engine.messages import StepOutput
from weft.engine.runner import DTYPES
from weft.errors import Overloaded, PeerLost
from weft.kv.groups import Paging
from weft.model.config import ModelConfig, read_config
from weft.model.decoder import Decoder
from weft.model.kv_layout import block_bytes, kv_groups, layout_name
from weft.request import ModelFingerprint
from weft.rpc.client import open_channel, owned
from weft.weights.shared import open_image
from weft.worker.config import Dtype, WeightsForm, WorkerConfig
from weft.worker.cpus import let_sessions_pass, pin
from weft.worker.heap import keep_heap
from weft.worker.peak import free_bytes, identity_of, measure_peak, remembered
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
    keep_heap()
    num_cores = pin(config.cpus) if config.cpus else 0
    if config.threads or num_cores:
        torch.set_num_threads(config.threads or num_cores)
    machine = choose_machine(config, torch.cuda.is_available())
    if machine.device == "cpu":
        let_sessions_pass(CPU_NICENESS)
    ready = await load_weights(config.weights_addr, config.served_name)
    log.mark("weights")
    booted = await asyncio.to_thread(_build, config, machine, ready, listener)
    log.mark("engine")
    return booted


def choose_machine(config: WorkerConfig, has_cuda: bool) -> Machine:
    """Fill in what the settings leave open."""
    dtype = config.dtype
    if dtype is Dtype.AUTO:
        dtype = Dtype.BFLOAT16 if has_cuda else Dtype.FLOAT32
    block_tokens = config.block_tokens or (GPU_BLOCK_TOKENS if has_cuda else CPU_BLOCK_TOKENS)
    return Machine("cuda" if has_cuda else "cpu", dtype, block_tokens, config.weights is WeightsForm.RESIDENT)


async def load_weights(address: str, model: str) -> weights_service_pb2.LoadReady:
    """Ask until the weights service is there, then follow its progress."""
    channel = open_channel(address)
    try:
        async with asyncio.timeout(WEIGHTS_WAIT_SECONDS) as patience:
            while True:
                try:
                    return await _follow_load(channel, model, patience)
                except (PeerLost, Overloaded) as error:
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
                logger.info("weights: %.1f MiB from %s", response.ready.size_bytes / 2**20, response.ready.source)
                return response.ready
            if loop.time() - told_at >= 1.0:
                told_at = loop.time()
                progress = response.progress
                log.progress("weights", progress.read_bytes, progress.total_bytes)
    raise PeerLost("the weights service ended the call early")


def _build(
    config: WorkerConfig,
    machine: Machine,
    ready: weights_service_pb2.LoadReady,
    listener: Callable[[StepOutput], None],
) -> Booted:
    model = parse_config(ready.config_json)
    size, limits = block_bytes(model, machine.dtype, machine.block_tokens), _limits(config, machine, model)
    room = measure_room(
        model, machine, limits.chunk_tokens, limits.max_num_seqs, _free_bytes(machine, config.gpu_share)
    )
    num_blocks = _num_blocks(config, room, limits, machine, size)
    image, device = open_image(ready.shm_name, ready.size_bytes), torch.device(machine.device)
    decoder = Decoder(model, image, DTYPES[machine.dtype], device, machine.is_resident)
    log.mark("copying and packing" if machine.is_resident else "copying")
    if machine.device == "cuda":
        held = torch.cuda.memory_reserved(decoder.device) + RUNTIME_BYTES  # and what libraries have beside torch
        free = own_bytes(free_bytes(decoder.device), _total_bytes(), config.gpu_share, held)
        identity = identity_of(ready.weights_hash, limits, machine.dtype, decoder.device) | {"form": config.weights}
        peak = remembered(identity, lambda: measure_peak(decoder, limits, machine.dtype, decoder.device))
        log.mark("largest step")
        logger.info("engine: the largest step takes %d MiB", peak >> 20)
        room = measured_room(room, free, peak + static_bytes(limits, size))
        num_blocks = _num_blocks(config, room, limits, machine, size)
    engine_config = replace(limits, num_blocks=num_blocks, max_pinned=0)
    engine = assemble(decoder, machine.dtype, engine_config, listener)
    logger.info(
        "engine: %s on %s, %d blocks of %d tokens, %d KiB each",
        *(machine.dtype, machine.device, num_blocks, machine.block_tokens, size >> 10),
    )
    fingerprint = ModelFingerprint(ready.weights_hash, machine.dtype, machine.block_tokens, size, layout_name(model))
    return Booted(engine, machine.device, fingerprint, engine_config)


def _limits(config: WorkerConfig, machine: Machine, model: ModelConfig) -> EngineConfig:
    """With as many blocks as there is any use for."""
    is_gpu = machine.device == "cuda"
    chunk_tokens = config.chunk_tokens or CHUNK_TOKENS[machine.device]
    paging = Paging(kv_groups(model).reaches, machine.block_tokens, chunk_tokens * (2 if is_gpu else 1))
    return EngineConfig(
        num_blocks=FULL_SEQUENCES * paging.max_pages(model.max_positions),
        block_tokens=machine.block_tokens,
        vocab_size=model.vocab_size,
        max_context_tokens=model.max_positions,
        chunk_tokens=chunk_tokens,
        mixed_tokens=config.mixed_tokens,
        max_num_seqs=GPU_MAX_SEQS if is_gpu else CPU_MAX_SEQS,
        eos_token_ids=model.eos_token_ids,
        reaches=paging.reaches,
        steps_ahead=int(is_gpu),
        decode_graphs=config.cuda_graphs and is_gpu,
        pin_sealed=bool(config.kvstore_addr),
        niceness=0 if is_gpu else CPU_NICENESS,
    )


def parse_config(config_json: str) -> ModelConfig:
    """The model's config as the weights service sent it."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(config_json, encoding="utf-8")
        return read_config(Path(directory))


def _num_blocks(config: WorkerConfig, room: Room, limits: EngineConfig, machine: Machine, size: int) -> int:
    """What was asked for, or what there is room for. Raises BadCheckpoint where that is too little."""
    if config.num_blocks:
        room.check(config.num_blocks * size, f"{config.num_blocks} blocks of KV (WEFT_NUM_BLOCKS)")
        return config.num_blocks
    num_tokens = min(limits.max_context_tokens, LEAST_CONTEXT_TOKENS)
    least = limits.paging.max_pages(num_tokens)
    room.check(least * size, f"KV of {num_tokens} tokens")
    return default_num_blocks(room, machine.device == "cpu", size, least, limits.num_blocks)


def own_bytes(free: int, total: int, share: float, held: int) -> int:
    """Of a GPU's free bytes those that a worker may still take, where others take theirs at the same time.

    `held`: what it has already.
    """
    return free if share == 1 else min(free, int(share * total) - held)


def _total_bytes() -> int:
    return torch.cuda.mem_get_info()[1]


def _free_bytes(machine: Machine, share: float) -> int:
    return available_bytes() if machine.device == "cpu" else own_bytes(*torch.cuda.mem_get_info(), share, 0)

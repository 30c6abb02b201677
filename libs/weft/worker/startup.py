"""Builds the engine at startup: weights from the node's weights service, sizes, engine and fingerprint."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc
import torch

from weft import log
from weft.capacity.draft import DraftSize, draft_size
from weft.capacity.footprint import with_stored_dtype
from weft.capacity.host_limits import available_bytes
from weft.capacity.plan import RUNTIME_BYTES
from weft.capacity.sizes import Machine, MemoryBudget, Sizes, choose_sizes, default_num_blocks, measured_budget
from weft.engine.config import EngineConfig
from weft.engine.drafting.graph_rows import GraphRows
from weft.engine.drafting.speculator import AdaptiveSpeculator
from weft.engine.engine import Engine
from weft.engine.executor import DTYPES
from weft.engine.graph_shapes import MAX_ROWS, graph_rows, static_bytes
from weft.engine.messages import StepOutput
from weft.engine.runner import assemble
from weft.errors import ConfigError, Overloaded, PeerLost
from weft.model.config import ModelConfig, config_of, read_config
from weft.model.decoder import Decoder
from weft.model.draft import DraftModel
from weft.model.draft_layers import with_draft
from weft.model.fields import Fields
from weft.model.kv_layout import block_bytes, layout_name
from weft.model.loading import DTYPE_NAMES
from weft.options import MAX_DRAFT_TOKENS, DeviceChoice, DraftChoice, Dtype, has_draft_model
from weft.request import ModelFingerprint
from weft.rpc.client import cancelled_on_exit, open_channel
from weft.weights.image_tensors import open_image
from weft.worker.config import WorkerConfig
from weft.worker.draft_head import DraftImage, drafted_hash, load_draft, read_draft_image, scoring_prompts
from weft.worker.fleet_client import LoadProgress
from weft.worker.group import Group
from weft.worker.group_startup import check_group, start_followers, take_cores
from weft.worker.memory_profile import cached_peak, free_bytes, measure_peak, peak_identity
from weft.worker.os_tuning import disable_malloc_trim, set_autogroup_nice
from weft_kernels.native.processor import best_isa
from weft_kernels.sampling import compile_sampling
from weft_mesh.v1 import weights_service_pb2, weights_service_pb2_grpc

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
WEIGHTS_WAIT_SECONDS = 120.0
RETRY_SECONDS = 0.5
# Default pool size: this many sequences of full length, memory permitting.
FULL_SEQUENCES = 32
# Rows of one sequence that the GPU's decode kernel takes, less its last token.
GPU_DRAFTS = 7


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that has not been started, and its description for peers."""

    engine: Engine
    device: str
    fingerprint: ModelFingerprint
    engine_config: EngineConfig
    speculator: AdaptiveSpeculator | None
    group: Group | None = None


async def load_engine(
    config: WorkerConfig,
    listener: Callable[[StepOutput], None],
    progress: LoadProgress,
    clock: Callable[[], float] = time.monotonic,
) -> LoadedEngine:
    """Load weights and build the engine.

    - `progress`: updated while loading.
    - `clock`: the engine's clock.

    Raises PeerLost if no weights service answers in time, BadCheckpoint, NotFound, or ConfigError if WEFT_DEVICE
    demands a missing GPU.
    """
    disable_malloc_trim()
    take_cores(config)
    sizes = choose_sizes(config.wanted, _has_cuda(config.device))
    if sizes.machine.device == "cpu":
        set_autogroup_nice(config.niceness)
    if config.model and (config.model / "config.json").is_file():
        # Fail before the weights are read; the check that counts follows once they are loaded.
        model = read_config(config.model)
        check_group(config, sizes.machine.device, model)
        await asyncio.to_thread(check_room, model, sizes, config.gpu_share)
    progress.set_phase("reading weights")
    images = await _load_images(config, sizes, progress)
    log.startup_phase("weights")
    progress.set_phase("building the engine")
    make_engine = partial(assemble, listener=listener, clock=clock)
    group = _start_group(config, sizes.machine, images.model, clock)
    try:
        loaded = await asyncio.to_thread(_build, config, sizes, images, make_engine, progress, group)
    except BaseException:
        if group is not None:
            group.close()
        raise
    log.startup_phase("engine")
    return loaded


def _start_group(
    config: WorkerConfig, machine: Machine, image: weights_service_pb2.LoadReady, clock: Callable[[], float]
) -> Group | None:
    if config.layout.stage_gpus == 1:
        return None
    tensors = open_image(image.shm_name, image.size_bytes)
    return start_followers(config, machine, image, _stored_config(parse_config(image.config_json), tensors), clock)


def _has_cuda(wanted: DeviceChoice) -> bool:
    """Return whether CUDA is available. Raises ConfigError if WEFT_DEVICE demands it and it is missing.

    On the CPU such a worker would run slowly without any error.
    """
    if not (is_there := torch.cuda.is_available()) and wanted is DeviceChoice.CUDA:
        why = f"torch {torch.__version__} is built for CPUs only"
        if torch.version.cuda is not None:
            why = f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU, or a driver too old for it"
        raise ConfigError(f"WEFT_DEVICE={wanted}: {why}")
    return is_there


def check_room(model: ModelConfig, sizes: Sizes, gpu_share: float, draft: DraftSize | None = None) -> MemoryBudget:
    """Return available memory and the model's share. Raises BadCheckpoint if not even a small pool fits."""
    room = sizes.memory_budget(model, _free_bytes(sizes, gpu_share), draft)
    room.check(*sizes.min_pool(model))
    return room


@dataclass(frozen=True, slots=True)
class WeightImages:
    """What the weights service loaded: a model, and the draft model that WEFT_DRAFT allows, if it has one."""

    model: weights_service_pb2.LoadReady
    draft: weights_service_pb2.LoadReady | None = None


async def _load_images(config: WorkerConfig, sizes: Sizes, progress: LoadProgress) -> WeightImages:
    model = await load_weights(config.weights_addr, config.served_name, progress.set_bytes)
    is_group = config.layout.stage_gpus > 1
    if is_group or not has_draft_model(config.draft, is_gpu=sizes.machine.device == "cuda"):
        return WeightImages(model)
    if model.draft_model:
        return WeightImages(model, await load_weights(config.weights_addr, model.draft_model, progress.set_bytes))
    if config.draft != DraftChoice.AUTO:
        what = f"the weights service at {config.weights_addr} has no draft model of {config.served_name!r}"
        raise ConfigError(f"WEFT_DRAFT={config.draft}: {what}; set WEFT_DRAFT there too")
    return WeightImages(model)


async def load_weights(
    address: str, model: str, on_progress: Progress = lambda done, total: None
) -> weights_service_pb2.LoadReady:
    """Call the weights service until it answers, then follow its progress in bytes."""
    channel = open_channel(address)
    last: PeerLost | Overloaded | None = None
    try:
        async with asyncio.timeout(WEIGHTS_WAIT_SECONDS) as silence_timeout:
            while True:
                try:
                    return await _follow_load(channel, model, silence_timeout, on_progress)
                except (PeerLost, Overloaded) as error:
                    last = error
                    logger.info("waiting for weights service address=%s error=%s", address, error)
                await asyncio.sleep(RETRY_SECONDS)
    except TimeoutError:
        why = f"does not answer; last error: {last}" if last else "does not answer"
        raise PeerLost(f"the weights service at {address} {why}") from last
    finally:
        await channel.close()


async def _follow_load(
    channel: grpc.aio.Channel, model: str, silence_timeout: asyncio.Timeout, on_progress: Progress
) -> weights_service_pb2.LoadReady:
    stub = weights_service_pb2_grpc.WeightServiceStub(channel)
    loop = asyncio.get_running_loop()
    reported_at = loop.time()
    async with cancelled_on_exit(stub.Load(weights_service_pb2.LoadRequest(model=model))) as call:
        async for response in call:
            silence_timeout.reschedule(loop.time() + WEIGHTS_WAIT_SECONDS)
            if response.WhichOneof("event") == "ready":
                logger.info(
                    "weights loaded mib=%.1f source=%s", response.ready.size_bytes / 2**20, response.ready.source
                )
                return response.ready
            progress = response.progress
            on_progress(progress.read_bytes, progress.total_bytes)
            if loop.time() - reported_at >= 1.0:
                reported_at = loop.time()
                log.progress("weights", progress.read_bytes, progress.total_bytes)
    raise PeerLost("the weights service ended the Load call early")


class Models(NamedTuple):
    """The models that run in an engine's steps."""

    target: Decoder
    head: DraftModel | None


@dataclass(frozen=True, slots=True)
class _OpenImages:
    """Mapped images. `config`: of the model, with the KV of the draft model's layer."""

    config: ModelConfig
    tensors: dict[str, torch.Tensor]
    draft: DraftImage | None
    draft_size: DraftSize | None


def _stored_config(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> ModelConfig:
    return with_stored_dtype(config, ((DTYPE_NAMES.get(each.dtype, ""), each.nbytes) for each in tensors.values()))


def _open_images(images: WeightImages, machine: Machine) -> _OpenImages:
    """Raises BadCheckpoint for a draft model of another target, NotFound if an image is gone."""
    ready, tensors = images.draft, open_image(images.model.shm_name, images.model.size_bytes)
    config = _stored_config(parse_config(images.model.config_json), tensors)
    if ready is None:
        return _OpenImages(config, tensors, None, None)
    draft_tensors = open_image(ready.shm_name, ready.size_bytes)
    draft = read_draft_image(ready.config_json, draft_tensors, ready.weights_hash, config)
    size = draft_size(draft.config, machine.dtype, machine.device == "cpu")
    return _OpenImages(with_draft(config, draft.layer), tensors, draft, size)


def _build(
    config: WorkerConfig,
    sizes: Sizes,
    images: WeightImages,
    make_engine: Callable[..., Engine],
    progress: LoadProgress,
    group: Group | None = None,
) -> LoadedEngine:
    machine, device = sizes.machine, torch.device(sizes.machine.device)
    check_room(parse_config(images.model.config_json), sizes, config.gpu_share)
    opened = _open_images(images, machine)
    model, draft = opened.config, opened.draft
    size, limits = block_bytes(model, machine.dtype, machine.block_tokens), _limits(config, sizes, model)
    room = check_room(model, sizes, config.gpu_share, opened.draft_size)
    _log_dtype(config, sizes, model)
    rank = None if group is None else group.rank
    decoder = Decoder(model, opened.tensors, DTYPES[machine.dtype], device, machine.is_resident, rank=rank)
    log.startup_phase("copying and packing" if machine.is_resident else "copying")
    head, weights_hash = None, images.model.weights_hash
    if draft is not None:
        prompts = partial(scoring_prompts, config.model)
        head = load_draft(draft, decoder, machine.is_resident, config.draft_layers, prompts)
        weights_hash = drafted_hash(weights_hash, draft.weights_hash, head.boundaries)
        log.startup_phase("draft model")
    if machine.device == "cuda":
        free, peak = _profile_memory(config, Models(decoder, head), limits, machine.dtype, weights_hash, progress)
        room = measured_budget(room, free, peak + static_bytes(limits, size))
        room.check(*sizes.min_pool(model))
    least = sizes.min_pool(model)[0] // size
    num_blocks = sizes.num_blocks or default_num_blocks(room, machine.device == "cpu", size, least, limits.num_blocks)
    engine_config = replace(limits, num_blocks=num_blocks, max_pinned=0)
    speculator = make_speculator(config.draft, engine_config, is_gpu=machine.device == "cuda")
    if group is not None:
        group.await_loaded()
    engine = make_engine(decoder, machine.dtype, engine_config, speculator=speculator, head=head, followers=group)
    if group is not None:
        shared_fd = engine.pool_memory.shared_fd
        assert shared_fd is not None
        group.connect(engine_config, shared_fd)
        logger.info("group built layout=%s ranks=%d followers=%s", group.layout, group.comm.size, group.pids)
    logger.info(
        "engine built dtype=%s device=%s blocks=%d block_tokens=%d block_kib=%d",
        *(machine.dtype, machine.device, num_blocks, machine.block_tokens, size >> 10),
    )
    fingerprint = ModelFingerprint(weights_hash, machine.dtype, machine.block_tokens, size, layout_name(model))
    return LoadedEngine(engine, machine.device, fingerprint, engine_config, speculator, group)


def make_speculator(draft: str, config: EngineConfig, is_gpu: bool) -> AdaptiveSpeculator | None:
    """Return the source of drafts, or None if this worker does not speculate."""
    if not _speculates(draft, is_gpu):
        return None
    # On a CPU the same clock as that of steps, see `weft.engine.loop.StepHandle`.
    clock = time.perf_counter if is_gpu else time.thread_time
    rows = GraphRows(graph_rows(config.max_drafts), MAX_ROWS) if config.decode_graphs else None
    return AdaptiveSpeculator(config.eos_token_ids, clock, draft != DraftChoice.NGRAM, rows)


def _speculates(draft: str, is_gpu: bool) -> bool:
    return draft != DraftChoice.NONE and not (draft == DraftChoice.AUTO and is_gpu)


def _profile_memory(
    config: WorkerConfig, models: Models, limits: EngineConfig, dtype: str, weights_hash: str, progress: LoadProgress
) -> tuple[int, int]:
    """Compile kernels. Return the GPU's free bytes and the peak bytes of the largest step."""
    device, model = models.target.device, models.target.config
    progress.set_phase("measuring the largest step")
    free = free_bytes(device)  # Also releases what packing left, so that it does not count as held.
    held = torch.cuda.memory_reserved(device) + RUNTIME_BYTES  # RUNTIME_BYTES: memory of libraries outside torch.
    free = usable_bytes(free, _total_bytes(), config.gpu_share, held)
    identity = peak_identity(weights_hash, limits, dtype, device)
    # The same weights need more memory a step if more experts are active.
    identity |= {"form": config.weight_format, "layout": layout_name(model)}
    peak = cached_peak(identity, lambda: measure_peak(models.target, limits, dtype, device, models.head))
    log.startup_phase("largest step")
    progress.set_phase("compiling kernels")
    compile_sampling(model.vocab_size, device)
    log.startup_phase("sampling")
    logger.info("engine memory profiled largest_step_mib=%d", peak >> 20)
    return free, peak


def _log_dtype(config: WorkerConfig, sizes: Sizes, model: ModelConfig) -> None:
    """Log if the model is computed in another dtype than published, or could run faster in another."""
    machine = sizes.machine
    if model.dtype == "float16":
        lost = "without loss" if machine.dtype == "float32" else "3 bits of each weight are lost; float32 keeps them"
        logger.warning("float16 checkpoint is computed in %s (WEFT_DTYPE): %s", machine.dtype, lost)
    is_free = config.dtype is Dtype.AUTO and machine.device == "cpu" and model.dtype == "bfloat16"
    if is_free and best_isa() in ("avx512_bf16", "amx"):
        logger.info("computed in float32; --dtype bfloat16 (WEFT_DTYPE) is faster on this processor")


def _limits(config: WorkerConfig, sizes: Sizes, model: ModelConfig) -> EngineConfig:
    """Return the engine's limits, with the largest useful number of blocks."""
    is_gpu, paging = sizes.machine.device == "cuda", sizes.paging(model)
    return EngineConfig(
        num_blocks=FULL_SEQUENCES * paging.max_pages(model.max_positions),
        block_tokens=sizes.machine.block_tokens,
        vocab_size=model.vocab_size,
        max_context_tokens=model.max_positions,
        chunk_tokens=sizes.chunk_tokens,
        mixed_tokens=sizes.mixed_tokens,
        shared_tokens=sizes.shared_tokens,
        burst_tokens=sizes.burst_tokens,
        max_num_seqs=sizes.max_seqs,
        max_drafts=_max_drafts(config, is_gpu),
        eos_token_ids=model.eos_token_ids,
        spans=paging.spans,
        draft_group=paging.draft_group,
        steps_ahead=int(is_gpu),
        decode_graphs=is_gpu,
        pin_sealed=bool(config.kvstore_addr),
        niceness=0 if is_gpu else config.niceness,
    )


def _max_drafts(config: WorkerConfig, is_gpu: bool) -> int:
    """Return the most drafts of a step; 0 without speculation, so that graphs keep no memory for drafts."""
    if not _speculates(config.draft, is_gpu):
        return 0
    return config.draft_tokens or (GPU_DRAFTS if is_gpu else MAX_DRAFT_TOKENS)


def parse_config(config_json: str) -> ModelConfig:
    """Parse the model config that the weights service sent. Raises BadCheckpoint naming the field."""
    return config_of(Fields(Path("config.json"), json.loads(config_json)))


def usable_bytes(free: int, total: int, share: float, held: int) -> int:
    """Return the free bytes that this worker may still take of a shared GPU. `held`: bytes it already has."""
    return free if share == 1 else min(free, int(share * total) - held)


def _total_bytes() -> int:
    return torch.cuda.mem_get_info()[1]


def _free_bytes(sizes: Sizes, share: float) -> int:
    is_cpu = sizes.machine.device == "cpu"
    return available_bytes() if is_cpu else usable_bytes(*torch.cuda.mem_get_info(), share, 0)

"""Checks before the start that a mesh fits into this machine, with the arithmetic of `weft plan`.

The services themselves report what only shows later, such as memory that other programs take.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from weft.capacity.footprint import footprint, with_stored_dtype
from weft.capacity.host_limits import available_bytes
from weft.capacity.layout import GIB
from weft.capacity.sizes import Sizes, choose_sizes
from weft.cli.gpus import VISIBLE, Card, all_report_memory, cards
from weft.cli.layout import MeshOptions
from weft.config import Count, Settings
from weft.config import read_config as read_settings
from weft.errors import BadCheckpoint
from weft.model.config import ModelConfig, read_config
from weft.weights.checkpoint import Checkpoint, read_checkpoint
from weft.weights.object_store import is_remote
from weft.worker.config import SizeSettings

SHARED_MEMORY = Path("/dev/shm")
# beside weights and activations: imports, sequences that wait, grammars, what malloc keeps; on a GPU its libraries too
WORKER_BYTES, CUDA_HOST_BYTES = 3 * GIB // 2, 8 * GIB
ADVICE = "take fewer workers (--both 1), a smaller WEFT_CHUNK_TOKENS or more memory; `weft plan` shows the arithmetic"


def check_memory(options: MeshOptions, environ: Mapping[str, str]) -> dict[str, int]:
    """Return the planned anonymous memory of each worker in bytes, by name: repacked weights and activations.

    KV pools do not count: they are shared memory or GPU memory. Raises BadCheckpoint for a model that does not fit or
    is incomplete, ConfigError for an invalid setting.
    """
    said = {
        "WEFT_DTYPE": options.dtype,
        "WEFT_WEIGHT_FORMAT": options.weight_format,
        "WEFT_MAX_SEQS": str(options.max_seqs),
    }
    wanted = read_settings(SizeSettings, {**environ, **said}).wanted
    sizes = choose_sizes(wanted, bool(options.gpus) and not is_for_cpus_only())
    found = {name: _read(directory) for name, directory in options.models.items()}
    models = {name: config for name, (config, _) in found.items()}
    total = sum(size_bytes for _, size_bytes in found.values())
    images = min(total, read_settings(WeightsLimit, environ).weights_shm_bytes or total)
    there = held_bytes()
    if SHARED_MEMORY.is_dir() and images > (free := shared_memory()[0] + there):
        what = f"the weights take {_gib(images)} of shared memory, and {SHARED_MEMORY} has {_gib(free)}"
        raise BadCheckpoint(f"{what}: mount -o remount,size={images // GIB + 1}G {SHARED_MEMORY}")
    if sizes.machine.device == "cuda":
        _check_cards(options, models, sizes)
    else:
        _check_memory(options, models, sizes, images, available_bytes() + there)
    return {name: _worker_bytes(models[model], sizes) for name, model in options.workers.items()}


def _worker_bytes(model: ModelConfig, sizes: Sizes) -> int:
    if sizes.machine.device == "cuda":
        return CUDA_HOST_BYTES  # weights and activations are the GPU's
    room = sizes.memory_budget(model, 0)
    return room.weights + room.activations + WORKER_BYTES


class WeightsLimit(Settings):
    """The weights service's limit on shared memory; 0: none."""

    weights_shm_bytes: Count = 0


def shared_memory() -> tuple[int, int]:
    """Return free and total bytes of /dev/shm."""
    found = os.statvfs(SHARED_MEMORY)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def is_for_cpus_only() -> bool:
    """Return whether torch is a CPU build or missing, without importing it."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True  # without torch there is no GPU


def _check_memory(
    options: MeshOptions, models: Mapping[str, ModelConfig], sizes: Sizes, images: int, free: int
) -> None:
    """Check the host's memory: each worker has its own repacked copy of the weights."""
    needed = images
    for model in options.workers.values():
        room = sizes.memory_budget(models[model], free)
        needed += room.weights + room.activations + sizes.min_pool(models[model])[0]
    if needed > free:
        what = f"{options.num_workers} workers and the weights in shared memory ({_gib(images)})"
        names = " and ".join(models)
        raise BadCheckpoint(f"no room for {names}: {what} take {_gib(needed)}, and {_gib(free)} are free: {ADVICE}")


def _check_cards(options: MeshOptions, models: Mapping[str, ModelConfig], sizes: Sizes) -> None:
    """Check each worker on its GPU, with the share that it gets."""
    found = cards()
    if not all_report_memory(found):
        return  # unknown here; the workers check it themselves
    for index, (name, model) in enumerate(options.workers.items()):
        share = options.worker_share(index)
        card = _card(found, share[VISIBLE])
        part = float(share["WEFT_GPU_SHARE"])
        free = card.free_bytes if part == 1 else min(card.free_bytes, int(part * card.total_bytes))
        try:
            sizes.memory_budget(models[model], free).check(*sizes.min_pool(models[model]))
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{model}: {name} on {card.name}: {error}: {ADVICE}") from None


def _card(found: list[Card], name: str) -> Card:
    """By its number; one that is called otherwise may be the largest."""
    if name.isdigit() and int(name) < len(found):
        return found[int(name)]
    return max(found, key=lambda card: card.free_bytes)


def held_bytes() -> int:
    """Of images of this user's that are there already: they are used again, or go when there is no room."""
    found = 0
    for path in SHARED_MEMORY.glob("weft-weights-*"):
        with suppress(FileNotFoundError):
            about = path.stat(follow_symlinks=False)
            found += about.st_blocks * 512 if about.st_uid == os.geteuid() else 0
    return found


def _read(directory: Path) -> tuple[ModelConfig, int]:
    """What it is and its image's bytes: what files say that are here; of those that are not, what the config says."""
    if is_remote(directory):
        config = read_config(directory)
        return config, sum(each.size_bytes for each in footprint(config).values())
    checkpoint = read_checkpoint(directory)
    return stored_config(checkpoint), checkpoint.total_bytes


def stored_config(checkpoint: Checkpoint) -> ModelConfig:
    """With the dtype of its files, which workers go by, as some say another in config.json."""
    tensors = ((each.entry.dtype, each.entry.size_bytes) for each in checkpoint.tensors)
    return with_stored_dtype(read_config(checkpoint.directory), tensors)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"

"""Memory of a mesh on this machine: checked before the start with the arithmetic of `weft plan`, guarded afterwards.

The guard ends a child that takes far more memory than was planned for it, before it takes the machine. Anonymous memory
counts (heaps, stacks), of the process and its descendants: images of weights and a CPU worker's KV pool are shared
memory. A machine that runs out of memory lets the kernel choose a victim, and all others swap or lose their page cache
first. The guard reads /proc; where there is none it watches nothing.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.capacity.draft import DraftSize, draft_size
from weft.capacity.footprint import footprint, with_stored_dtype
from weft.capacity.host_limits import available_bytes
from weft.capacity.layout import GIB
from weft.capacity.sizes import Sizes, choose_sizes
from weft.cli.child import Child
from weft.cli.layout import VISIBLE, Card, MeshOptions, all_report_memory, cards
from weft.config import Count, Settings
from weft.config import read_config as read_settings
from weft.errors import BadCheckpoint
from weft.model.config import ModelConfig, read_config
from weft.model.draft_layers import with_draft
from weft.options import has_draft_model
from weft.weights.checkpoint import Checkpoint, read_checkpoint
from weft.weights.draft_checkpoint import read_draft
from weft.weights.object_store import is_remote
from weft.worker.config import SizeSettings

SHARED_MEMORY = Path("/dev/shm")
# beside weights and activations: imports, sequences that wait, grammars, what malloc keeps; on a GPU its libraries too
WORKER_BYTES, CUDA_HOST_BYTES = 3 * GIB // 2, 8 * GIB
# a rank beside the first one: imports, and what malloc keeps; its weights are part of the worker's
FOLLOWER_BYTES = GIB // 2
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
    models = {name: _with_draft(directory, options.draft, sizes) for name, directory in options.models.items()}
    total = sum(model.image_bytes for model in models.values())
    images = min(total, read_settings(WeightsLimit, environ).weights_shm_bytes or total)
    there = held_bytes()
    if SHARED_MEMORY.is_dir() and images > (free := shared_memory()[0] + there):
        what = f"the weights take {_gib(images)} of shared memory, and {SHARED_MEMORY} has {_gib(free)}"
        raise BadCheckpoint(f"{what}: mount -o remount,size={images // GIB + 1}G {SHARED_MEMORY}")
    if sizes.machine.device == "cuda":
        _check_cards(options, models, sizes)
    else:
        _check_memory(options, models, sizes, images, available_bytes() + there)
    followers = (options.tp - 1) * FOLLOWER_BYTES
    return {name: _worker_bytes(models[model], sizes) + followers for name, model in options.workers.items()}


@dataclass(frozen=True, slots=True)
class _Model:
    """`config`: with the KV of its draft model. `image_bytes`: of both."""

    config: ModelConfig
    image_bytes: int
    draft: DraftSize | None


def _worker_bytes(model: _Model, sizes: Sizes) -> int:
    if sizes.machine.device == "cuda":
        return CUDA_HOST_BYTES  # weights and activations are the GPU's
    room = sizes.memory_budget(model.config, 0, model.draft)
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


def _check_memory(options: MeshOptions, models: Mapping[str, _Model], sizes: Sizes, images: int, free: int) -> None:
    """Check the host's memory: each worker has its own repacked copy of the weights."""
    needed = images
    for model in map(models.__getitem__, options.workers.values()):
        room = sizes.memory_budget(model.config, free, model.draft)
        needed += room.weights + room.activations + sizes.min_pool(model.config)[0]
    if needed > free:
        what = f"{options.num_workers} workers and the weights in shared memory ({_gib(images)})"
        names = " and ".join(models)
        raise BadCheckpoint(f"no room for {names}: {what} take {_gib(needed)}, and {_gib(free)} are free: {ADVICE}")


def _check_cards(options: MeshOptions, models: Mapping[str, _Model], sizes: Sizes) -> None:
    """Check each worker on its GPU, with the share that it gets."""
    found = cards()
    if not all_report_memory(found):
        return  # unknown here; the workers check it themselves
    for index, (name, model) in enumerate(options.workers.items()):
        share = options.worker_share(index)
        card = _card(found, share[VISIBLE])
        part = float(share["WEFT_GPU_SHARE"])
        free = card.free_bytes if part == 1 else min(card.free_bytes, int(part * card.total_bytes))
        config, draft = models[model].config, models[model].draft
        try:
            sizes.memory_budget(config, free, draft).check(*sizes.min_pool(config))
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{model}: {name} on {card.name}: {error}: {ADVICE}") from None


def _card(found: list[Card], name: str) -> Card:
    """Return the GPU of this number, or the largest for a name that is no number."""
    if name.isdigit() and int(name) < len(found):
        return found[int(name)]
    return max(found, key=lambda card: card.free_bytes)


def held_bytes() -> int:
    """Return the bytes of this user's images in shared memory: a start uses them again or removes them."""
    found = 0
    for path in SHARED_MEMORY.glob("weft-weights-*"):
        with suppress(FileNotFoundError):
            about = path.stat(follow_symlinks=False)
            found += about.st_blocks * 512 if about.st_uid == os.geteuid() else 0
    return found


def _read(directory: Path) -> tuple[ModelConfig, int]:
    """Return a model's config and the bytes of its image, by its files or, if they are remote, by the config."""
    if is_remote(directory):
        config = read_config(directory)
        return config, sum(each.size_bytes for each in footprint(config).values())
    checkpoint = read_checkpoint(directory)
    return stored_config(checkpoint), checkpoint.total_bytes


def _with_draft(directory: Path, draft: str, sizes: Sizes) -> _Model:
    config, image_bytes = _read(directory)
    is_cpu = sizes.machine.device == "cpu"
    source = read_draft(draft, directory) if has_draft_model(draft, not is_cpu) else None
    if source is None:
        return _Model(config, image_bytes, None)
    size = draft_size(source.config, sizes.machine.dtype, is_cpu)
    return _Model(with_draft(config, size.layer), image_bytes + source.checkpoint.total_bytes, size)


def stored_config(checkpoint: Checkpoint) -> ModelConfig:
    """Return the config with the dtype of the files, which workers use; config.json may name another."""
    tensors = ((each.entry.dtype, each.entry.size_bytes) for each in checkpoint.tensors)
    return with_stored_dtype(read_config(checkpoint.directory), tensors)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


PROC = Path("/proc")
MIB = 1 << 20
PERIOD_SECONDS = 1.0
WARN_RATIO = 1.3
# beyond both a child is ended, however much memory the machine has left
HARD_RATIO, HARD_EXTRA_BYTES = 3, 4 * GIB
# with less than this left on the machine, one beyond WARN_RATIO is; no more than a tenth of all memory
LEAST_LEFT_BYTES = GIB
STOP_SECONDS = 2.0


def least_left_bytes() -> int:
    """Return the memory that a machine of this size must have left."""
    return min(LEAST_LEFT_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 10)


def anonymous_bytes(pid: int, proc: Path = PROC) -> int:
    """Return the anonymous memory of a process and its descendants; 0 for one that has ended."""
    try:
        below = (proc / str(pid) / "task" / str(pid) / "children").read_text().split()
    except OSError:
        return 0
    return own_anonymous_bytes(pid, proc) + sum(anonymous_bytes(int(child), proc) for child in below)


def own_anonymous_bytes(pid: int, proc: Path = PROC) -> int:
    """Return the anonymous memory of the process alone; 0 when it has ended."""
    try:
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return 0
    kib = next((line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")), "0")
    return int(kib) * 1024


class MemoryGuard:
    """Watches one life of a child."""

    def __init__(
        self,
        planned: int,
        say: Callable[[str], None],
        measure: Callable[[int], int] = anonymous_bytes,
        left: Callable[[], int] = available_bytes,
    ) -> None:
        """`planned`: bytes of anonymous memory expected at most; 0: not watched. `say` receives a line for the log."""
        self._planned = planned
        self._say = say
        self._measure = measure
        self._left = left
        self._has_warned = False
        self.verdict = ""  # why the child was ended

    async def watch(self, child: Child) -> None:
        """Look once a second, until cancelled or the child had to be ended."""
        while self._planned and not self.verdict:
            await asyncio.sleep(PERIOD_SECONDS)
            self.look(child.pid)
        if self.verdict:
            await child.stop(STOP_SECONDS)

    def look(self, pid: int) -> None:
        """Measure, log the first time beyond the plan, and judge."""
        used, planned = self._measure(pid), self._planned
        if used <= planned * WARN_RATIO:
            self._has_warned = False
            return
        figures = f"used_mib={used // MIB} planned_mib={planned // MIB} pid={pid}"
        if used > max(planned * HARD_RATIO, planned + HARD_EXTRA_BYTES) or self._left() < least_left_bytes():
            self.verdict = f"memory: {used // MIB} MiB taken, {planned // MIB} MiB planned"
            self._say(f"memory far beyond plan, process is ended {figures}")
        elif not self._has_warned:
            self._has_warned = True
            self._say(f"memory beyond plan {figures}")

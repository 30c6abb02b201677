"""Measures the peak memory of the largest step on the device, once, and caches it in a file.

The result replaces the estimate of `weft.capacity`.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib.metadata
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

import weft_kernels
from weft.engine.config import EngineConfig
from weft.engine.graph_shapes import graph_sizes, static_bytes
from weft.engine.messages import HiddenStateObserver, SequenceMode, SequenceSpec
from weft.engine.runner import ModelRunner
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import ScheduledChunk
from weft.errors import BadCheckpoint
from weft.kv.layer_groups import PageRange, PagingPolicy
from weft.model import decoder
from weft.model.decoder import Decoder
from weft.model.draft import DraftModel
from weft.request import RequestKey, SamplingParams
from weft.worker import hidden_state_observers
from weft.worker.hidden_state_observers import PromptLogprobReader
from weft_kernels.cache_dir import user_cache_dir

logger = logging.getLogger(__name__)
# Row counts (tokens) for which packed products are tuned, and which may be unpacked where larger ones are not.
SHORTER_CHUNKS = (256, 512)
SIZES = ("block_tokens", "chunk_tokens", "max_step_tokens", "max_num_seqs", "max_drafts", "decode_graphs")
# Enables every sampling feature that takes memory.
SAMPLING = SamplingParams(
    max_tokens=2, temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, num_logprobs=20, repetition_penalty=1.1
)


def cached_peak(identity: Mapping[str, str | int], measure: Callable[[], int]) -> int:
    """Return the bytes measured earlier for the same `identity`; otherwise measure and write the file.

    The file repeats the whole identity.
    """
    digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=10).hexdigest()
    path = user_cache_dir() / "peaks" / f"{digest}.json"
    try:
        kept = json.loads(path.read_text())
        if kept["identity"] == identity and isinstance(kept["peak_bytes"], int):
            return kept["peak_bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # Never measured, or written by another version.
    peak = measure()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"identity": identity, "peak_bytes": peak}, indent=1))
        partial.replace(path)
    except OSError as error:
        logger.warning("memory profile not cached error=%s", error)
    return peak


def peak_identity(weights_hash: str, limits: EngineConfig, dtype: str, device: torch.device) -> dict[str, str | int]:
    """Return everything that the peak depends on: model, machine, versions, and step limits."""
    name, tiles = "cpu", ""
    if device.type == "cuda":
        from weft_kernels.packed.tuning import table_of  # needs Triton

        name = torch.cuda.get_device_name(device)
        tiles = table_of(name).digest
    sizes = {name: getattr(limits, name) for name in SIZES}
    versions = {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": _version_of("triton"),
        "allocator": " ".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")),
        "sources": _sources_digest(),
        "tiles": tiles,
    }
    context = {"max_context_tokens": limits.max_context_tokens}
    return {"weights": weights_hash, "device": name, "dtype": dtype, **sizes, **context, **versions}


def measure_peak(
    model: Decoder, limits: EngineConfig, dtype: str, device: torch.device, head: DraftModel | None = None
) -> int:
    """Return bytes beyond the pool and the static memory of graphs (`static_bytes`), measured on a minimal pool.

    The first step has one token for as many sequences as graphs have. It also captures the graph with the most rows,
    which may be one for steps with drafts. The last step has a whole chunk at the end of the longest context with
    logprobs, the rest of a burst, and one token of all others. A capture first releases torch's cached memory, and its
    own memory stays. Packed matrices need shorter chunks in between: tuning decides for each row count whether a matrix
    is unpacked first.

    Raises BadCheckpoint if a step does not fit.
    """
    least = limits.paging.max_pages(min(limits.max_context_tokens, limits.chunk_tokens))
    small = replace(limits, num_blocks=least, max_pinned=0)
    meter: Meter = DeviceMeter(device) if device.type == "cuda" else ResidentMeter()
    chunk = min(limits.chunk_tokens, limits.max_context_tokens)
    one, *others = [_chunk(limits.paging, 0, 1) for _ in range(limits.max_num_seqs)]
    try:
        runner = ModelRunner(model, small, dtype, device, head)
        scorer = PromptLogprobReader((0,) * limits.max_context_tokens, 20)
        long = _chunk(limits.paging, limits.max_context_tokens - chunk, chunk, scorer)
        shorter = [each for each in SHORTER_CHUNKS if model.packed and each < chunk]
        between = [[_chunk(limits.paging, limits.max_context_tokens - each, each)] for each in shorter]
        rest = min(limits.max_step_tokens - chunk, limits.max_context_tokens)
        burst = [_chunk(limits.paging, 0, rest)] if rest > 0 else []
        most = [long, *burst, *others[len(burst) :]]
        for chunks in ([one, *others][: graph_sizes(limits.max_num_seqs)[-1]], *between, most):
            runner.launch(chunks).collect()
    except torch.OutOfMemoryError as error:
        raise BadCheckpoint(
            f"the model does not fit: beside its weights there is no room for a step of {chunk} prompt tokens "
            f"(WEFT_CHUNK_TOKENS) and {limits.max_num_seqs} sequences: {error}"
        ) from None
    size = runner.pool_memory.block_bytes
    return max(0, meter.taken() - small.num_blocks * size - static_bytes(small, size))


class AnyToken:
    """A grammar that allows every token; only its mask's memory matters."""

    failure = None

    def accept(self, token_ids: Items[int]) -> None: ...

    def rollback(self, num_tokens: int) -> None: ...

    def valid(self, token_ids: Items[int]) -> int:
        return len(token_ids)

    def forced(self) -> list[int]:
        return []

    def fill(self, words: NDArray[np.int32]) -> None:
        words.fill(-1)


def _chunk(
    paging: PagingPolicy, start: int, num_tokens: int, reader: HiddenStateObserver | None = None
) -> ScheduledChunk:
    """Return tokens of a sequence that maps all its pages to page 0; their content does not matter."""
    end = start + num_tokens
    tokens, mode = (0,) * end, SequenceMode.GENERATE
    spec = SequenceSpec(RequestKey("peak"), tokens, SAMPLING, mode, constraint=AnyToken(), observer=reader)
    firsts = [paging.first(group, start) for group in range(len(paging.spans))]
    runs = [PageRange(first, (0,) * (paging.num_blocks(end) - first)) for first in firsts]
    return ScheduledChunk(Sequence(spec, [0] * end, 0.0, page_ranges=runs), start, num_tokens, num_samples=1)


class Meter(Protocol):
    """Measures memory from its creation on."""

    def taken(self) -> int:
        """Return the peak bytes since creation."""


class DeviceMeter:
    """GPU memory reserved by torch; other processes do not disturb it."""

    def __init__(self, device: torch.device) -> None:
        free_bytes(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._device, self._before = device, torch.cuda.memory_reserved(device)

    def taken(self) -> int:
        return torch.cuda.max_memory_reserved(self._device) - self._before


class ResidentMeter:
    """Resident memory of this process."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # malloc would use its cached memory first, and that would not be counted.
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        self._before = _status("VmRSS")

    def taken(self) -> int:
        return _status("VmHWM") - self._before


def free_bytes(device: torch.device) -> int:
    """Return a GPU's free bytes after torch has released its cache."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _version_of(package: str) -> str:
    """Return a package's version without importing it; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _sources_digest() -> str:
    """Digest of all sources that a step runs: a version number misses changes between releases."""
    digest = hashlib.blake2b(
        Path(__file__).read_bytes() + Path(hidden_state_observers.__file__).read_bytes(), digest_size=10
    )
    engine = Path(decoder.__file__).parents[1]
    for root in (engine / "engine", engine / "model", engine / "kv", Path(str(weft_kernels.__file__)).parent):
        for path in sorted(each for each in root.rglob("*") if each.suffix in (".py", ".cpp", ".h")):
            digest.update(path.read_bytes())
    return digest.hexdigest()

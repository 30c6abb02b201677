"""An engine with random weights under load, through its public interface, with times from its listener.

Decode begins at any context at once: the prompts' KV counts as present, in a pool of random numbers.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from loadtest.engine.shapes import RandomWeights, Shape, weight_bytes
from weft.capacity.layout import GIB
from weft.engine.config import EngineConfig
from weft.engine.messages import FirstToken, PoolMemory, Reserved, SequenceMode, SequenceSpec, StepOutput
from weft.engine.runner import build_engine
from weft.kv.layer_groups import PagingPolicy
from weft.model.kv_layout import block_bytes, kv_groups
from weft.request import RequestKey, SamplingParams

DEADLINE_SECONDS = 300.0
RESERVE_BYTES = 6 * GIB  # of a GPU, for activations and libraries


@dataclass(frozen=True)
class Settings:
    """How the engine runs.

    `kv_gib`: 0 takes what the GPU has left. `is_resident`: F12 weights. `mixed_tokens`: prompt tokens of a step in
    which others generate, 0 for as many as in any step.
    """

    device: str
    dtype: str
    block_tokens: int
    chunk_tokens: int
    max_seqs: int
    kv_gib: float = 0.0
    is_resident: bool = False
    mixed_tokens: int = 0


@dataclass(frozen=True)
class Heard:
    """One step: its time, and the number of new tokens of each sequence that had any."""

    at: float
    tokens: dict[str, int]


class Bench:
    """One engine that measures one point after the other.

    `clock` is read on the engine's thread. For `decode` alone it may be `time.thread_time`: the work of one thread.
    """

    def __init__(self, shape: Shape, settings: Settings, clock: Callable[[], float] = time.perf_counter) -> None:
        self.config = shape.config()
        self.settings = settings
        self._names = itertools.count()
        self._heard: queue.SimpleQueue[tuple[float, StepOutput]] = queue.SimpleQueue()
        self._source = random.Random(0)
        reaches = kv_groups(self.config).spans
        self.page_bytes = block_bytes(self.config, settings.dtype, settings.block_tokens)
        limits = EngineConfig(
            num_blocks=max(1, int(self._kv_bytes()) // self.page_bytes),
            block_tokens=settings.block_tokens,
            vocab_size=self.config.vocab_size,
            max_context_tokens=self.config.max_positions,
            chunk_tokens=settings.chunk_tokens,
            mixed_tokens=settings.mixed_tokens,
            max_num_seqs=settings.max_seqs,
            max_waiting=2 * settings.max_seqs,
            spans=reaches,
            # as a worker sets them: one step ahead and replayed graphs on a GPU, the plain loop elsewhere
            steps_ahead=int(settings.device == "cuda"),
            decode_graphs=settings.device == "cuda",
        )
        self.num_blocks, self.paging = limits.num_blocks, limits.paging
        self.engine = build_engine(
            self.config,
            RandomWeights(self.config, settings.device),
            dtype=settings.dtype,
            device=settings.device,
            engine_config=limits,
            listener=lambda output: self._heard.put((clock(), output)),
            is_resident=settings.is_resident,
        )
        fill_with_noise(self.engine.pool_memory, settings)
        self.engine.start()

    def close(self) -> None:
        """Stop the engine."""
        self.engine.stop()

    def lacks(self, batch: int, tokens: int) -> str:
        """Return why `batch` sequences of `tokens` cannot run at once, or ""."""
        if batch > self.settings.max_seqs:
            return f"{batch} sequences, the engine takes {self.settings.max_seqs}"
        if tokens >= self.config.max_positions:
            return f"{tokens} tokens, the model has {self.config.max_positions} positions"
        wanted = self.kv_bytes(batch, tokens)
        if wanted > self.num_blocks * self.page_bytes:
            return f"KV of {wanted / GIB:.1f} GiB, there are {self.num_blocks * self.page_bytes / GIB:.1f}"
        return ""

    def kv_bytes(self, batch: int, tokens: int) -> int:
        """Return the most KV in whole pages; one more for each sequence that grows."""
        paging: PagingPolicy = self.paging
        return batch * (paging.max_pages(tokens) + len(paging.spans)) * self.page_bytes

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Return the seconds of each of `steps` steps in which all sequences generate a token."""
        self._claim(batch, context, steps + 2)
        full = [heard.at for heard in self._listen(batch) if len(heard.tokens) == batch]
        return [end - start for start, end in pairwise(full)]

    def prefill(self, tokens: int) -> float:
        """Return the seconds from submitting to the next token."""
        start = time.perf_counter()
        self.engine.submit(self._spec(tokens, 1))
        return self._listen(1)[-1].at - start

    def mixed(self, batch: int, context: int, prompt: int, steps: int) -> tuple[list[float], float, int]:
        """Decode while prompts arrive one after the other; return gaps between tokens, seconds, and prompts read."""
        self._claim(batch, context, steps)
        prompts: set[str] = set()
        last: dict[str, float] = {}
        gaps: list[float] = []
        num_open, num_read, started = batch, 0, time.perf_counter()
        while num_open:
            at, output = self._hear()
            for delta in output.deltas:
                name = delta.key.request_id
                if name in prompts:
                    num_read += 1
                    continue
                gaps += [at - last[name]] if name in last else []
                last[name] = at
                num_open -= delta.finish_reason is not None
            if num_open and len(prompts) == num_read:
                spec = self._spec(prompt, 1)
                prompts.add(spec.key.request_id)
                self.engine.submit(spec)
        seconds = max(last.values()) - started
        if len(prompts) > num_read:
            self._listen(1)
        return gaps, seconds, num_read

    def memory_bytes(self) -> int:
        """Return the peak so far: of torch on the GPU, else of the process."""
        if self.settings.device != "cpu":
            return int(torch.cuda.max_memory_reserved(self.settings.device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def _kv_bytes(self) -> float:
        if self.settings.device == "cpu" or self.settings.kv_gib:
            return (self.settings.kv_gib or 1.0) * GIB
        free, _ = torch.cuda.mem_get_info(self.settings.device)
        return max(free - weight_bytes(self.config) - RESERVE_BYTES, GIB)

    def _claim(self, batch: int, context: int, new_tokens: int) -> None:
        """Start sequences whose prompts count as computed, together once all have their pages."""
        for _ in range(batch):
            self.engine.submit(self._spec(context, new_tokens, wait_for_kv=True))
        reserved: list[Reserved] = []
        while len(reserved) < batch:
            reserved += self._hear()[1].reserved
        for each in reserved:
            self.engine.complete_kv(each.key, context, FirstToken(self._source.randrange(self.config.vocab_size)))

    def _spec(self, prompt: int, new_tokens: int, wait_for_kv: bool = False) -> SequenceSpec:
        name = f"bench-{next(self._names)}"
        token_ids = tuple(self._source.choices(range(self.config.vocab_size), k=prompt))
        sampling = SamplingParams(new_tokens, ignore_eos=True)
        salt = name.encode()  # hits no prefix of an earlier point
        mode = SequenceMode.GENERATE
        return SequenceSpec(RequestKey(name), token_ids, sampling, mode, salt, wait_for_kv=wait_for_kv)

    def _listen(self, num_open: int) -> list[Heard]:
        """Return the steps until `num_open` sequences have ended."""
        found = []
        while num_open:
            at, output = self._hear()
            found.append(Heard(at, {each.key.request_id: len(each.token_ids) for each in output.deltas}))
            num_open -= sum(each.finish_reason is not None for each in output.deltas)
        return found

    def _hear(self) -> tuple[float, StepOutput]:
        at, output = self._heard.get(timeout=DEADLINE_SECONDS)
        if output.failures:
            raise output.failures[0].error
        return at, output


class _Device:
    """Memory of a GPU by its address, in the form in which torch takes it from other libraries."""

    def __init__(self, memory: PoolMemory, num_items: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (memory.address, False),
            "shape": (num_items,),
            "typestr": "<f4",
            "version": 3,
        }


def fill_with_noise(memory: PoolMemory, settings: Settings) -> None:
    """Fill the pool: zeros cost less power than real numbers, and so allow a higher clock."""
    num_items = memory.block_bytes * memory.num_blocks // 4
    if settings.device == "cpu":
        raw = (ctypes.c_char * (4 * num_items)).from_address(memory.address)
        pool = torch.frombuffer(raw, dtype=torch.float32)
    else:
        pool = torch.as_tensor(_Device(memory, num_items), device=settings.device)
    values = pool if settings.dtype == "float32" else pool.view(torch.bfloat16)
    noise = torch.randn(1 << 20, device=settings.device).to(values.dtype)
    for start in range(0, len(values), len(noise)):
        part = values[start : start + len(noise)]
        part.copy_(noise[: len(part)])

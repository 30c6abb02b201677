"""A prefill worker without its door: the real engine, store client and prefix logic, asked from the same process."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.messages import SequenceMode, SequenceSpec
from weft.engine.runner import build_engine
from weft.kv.block_pool import Tier
from weft.model.config import ModelConfig, read_config
from weft.model.kv_layout import block_bytes, layout_name
from weft.request import ModelFingerprint, RequestKey, SamplingParams, WorkerRole
from weft.worker.engine_client import EngineClient, EngineEvents, EngineSequence, GrammarCompiler, StatsRecorder
from weft.worker.os_tuning import disable_malloc_trim
from weft.worker.pool_memory import open_blocks
from weft.worker.store_client import StoreClient, StorePrefix
from weft.worker.store_reader import FetchCostModel

REQUEST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a worker. `store` is the kvstore's address, empty for none."""

    model: Path
    num_blocks: int
    block_tokens: int
    store: str = ""
    dtype: str = "float32"
    chunk_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Answer:
    """Time to the first token, and how many prompt tokens were found in which tier."""

    seconds: float
    token_id: int
    tokens_by_tier: Mapping[Tier, int]


@dataclass(slots=True)
class Prefill:
    """Made by `prefilling`. One caller at a time or several."""

    engine: Engine
    client: EngineClient[EngineSequence]
    prefix: StorePrefix
    _num_asked: int = 0

    async def ask(self, token_ids: Sequence[int]) -> Answer:
        """Compute a prompt, as far as no tier has it."""
        self._num_asked += 1
        sequence = EngineSequence(RequestKey(f"load-{self._num_asked}"))
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        spec = SequenceSpec(sequence.key, tuple(token_ids), sampling, SequenceMode.PREFILL, wait_for_kv=True)
        started = time.perf_counter()
        with self.client.open(sequence):
            await self.client.submit(sequence, spec)
            async with asyncio.timeout(REQUEST_SECONDS):
                reserved = await sequence.until_reserved()
                hit = await self.prefix.fetch(token_ids, b"", reserved)
                num_ready = reserved.num_hit_tokens + hit.num_tokens
                self.engine.complete_kv(sequence.key, num_ready, num_bare_tokens=hit.num_bare_tokens)
                first = await sequence.until_first_token()
            seconds = time.perf_counter() - started
        by_tier = {Tier.POOL: reserved.num_hit_tokens, **hit.by_tier}
        return Answer(seconds, first.token_ids[0], by_tier)


def read_weights(model: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors; keep them, several workers can be built of them."""
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


@asynccontextmanager
async def prefilling(shape: Shape, weights: Mapping[str, Tensor], estimate: FetchCostModel) -> AsyncIterator[Prefill]:
    """A worker with an empty pool, for the length of a scope. `estimate` may have learned from an earlier one."""
    disable_malloc_trim()
    config = read_config(shape.model)
    engine_config = EngineConfig(
        num_blocks=shape.num_blocks,
        block_tokens=shape.block_tokens,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_positions,
        chunk_tokens=shape.chunk_tokens,
        pin_sealed=bool(shape.store),
    )
    feed = EngineEvents()
    engine = build_engine(
        config, weights, dtype=shape.dtype, device="cpu", engine_config=engine_config, listener=feed.listener
    )
    fingerprint = _fingerprint(config, shape)
    memory = open_blocks(engine.pool_memory, "cpu")
    store = StoreClient(shape.store, memory, fingerprint, engine.unpin, estimate)
    client = EngineClient[EngineSequence](engine, feed, GrammarCompiler(), WorkerRole.PREFILL, "prefill-0")
    worker = Prefill(engine, client, StorePrefix(store, engine_config.paging, StatsRecorder()))
    feed.on_computed = estimate.on_computed
    feed.on_sealed = store.offer
    await store.connect()
    engine.start()
    try:
        yield worker
    finally:
        await store.close()
        await asyncio.to_thread(engine.stop)


def _fingerprint(config: ModelConfig, shape: Shape) -> ModelFingerprint:
    name = hashlib.blake2b(str(shape.model).encode(), digest_size=8).hexdigest()
    size = block_bytes(config, shape.dtype, shape.block_tokens)
    return ModelFingerprint(name, shape.dtype, shape.block_tokens, size, layout_name(config))

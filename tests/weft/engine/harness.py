"""A real engine on a tiny model, with everything it has said; waits are for what it says, with a deadline."""

from __future__ import annotations

import ctypes
import os
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.weft.tiny_llama import Tiny
from weft.engine.config import EngineConfig
from weft.engine.drafting.drafter import Speculator
from weft.engine.engine import Engine
from weft.engine.executor import DTYPES
from weft.engine.messages import (
    EngineLoad,
    FirstToken,
    PromptCounts,
    PromptProgress,
    Reserved,
    SequenceFailed,
    SequenceMode,
    SequenceSpec,
    StepOutput,
)
from weft.engine.runner import assemble
from weft.kv.block_pool import FullBlock
from weft.kv.layer_groups import PageRange
from weft.model.decoder import Decoder
from weft.model.draft import DraftModel
from weft.model.kv_layout import draft_group, kv_groups
from weft.request import NO_DRAFTS, DraftCounts, FinishReason, PositionLogprobs, RequestKey, SamplingParams

DEADLINE_SECONDS = 30.0
# where engines run whose test names no device: "cuda" for tests that look at no byte of the pool themselves
DEVICE = os.environ.get("WEFT_TEST_DEVICE", "cpu")


@dataclass
class Heard:
    """What the engine said about one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    counts: PromptCounts | None = None
    reason: FinishReason | None = None
    reserved: Reserved | None = None
    progress: list[PromptProgress] = field(default_factory=list)
    failure: SequenceFailed | None = None
    drafts: DraftCounts = NO_DRAFTS

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were cached; known with the first token."""
        assert self.counts is not None
        return self.counts.num_cached_tokens


class Driver:
    """Submits, listens, and knows when to stop waiting."""

    steps_ahead = 0

    def __init__(
        self,
        tiny: Tiny,
        dtype: str = "float32",
        device: str = DEVICE,
        speculator: Speculator | None = None,
        make_head: Callable[[Decoder], DraftModel] | None = None,
        **limits: Any,
    ) -> None:
        """`make_head`: a draft model for `tiny`, whose config has its layer."""
        settings: dict[str, Any] = {"num_blocks": 64, "block_tokens": 16, "chunk_tokens": 64}
        settings["spans"] = kv_groups(tiny.config).spans
        settings["steps_ahead"] = self.steps_ahead
        settings["draft_group"] = draft_group(tiny.config) if make_head else None
        settings |= {"vocab_size": tiny.config.vocab_size, "max_context_tokens": tiny.config.max_positions}
        self.config = EngineConfig(**{**settings, "eos_token_ids": tiny.config.eos_token_ids, **limits})
        self.tiny = tiny
        self.heard: dict[RequestKey, Heard] = {}
        self.sealed: list[FullBlock] = []
        # what a test does at a step's end, on the engine's own thread: before the next step, whatever else runs
        self.react: Callable[[StepOutput], None] = lambda output: None
        self.load = EngineLoad(free_blocks=self.config.num_blocks)
        self._outputs: queue.Queue[StepOutput] = queue.Queue()
        self.engine = self._build(dtype, device, speculator, make_head)

    def _build(
        self, dtype: str, device: str, speculator: Speculator | None, make_head: Callable[[Decoder], DraftModel] | None
    ) -> Engine:
        model = Decoder(self.tiny.config, self.tiny.weights, DTYPES[dtype], torch.device(device))
        head = None if make_head is None else make_head(model)
        return assemble(model, dtype, self.config, self._listen, speculator=speculator, head=head)

    def __enter__(self) -> Driver:
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()
        assert not self.engine.is_alive

    def submit(self, name: str, prompt: list[int], num_tokens: int = 1, **changes: Any) -> RequestKey:
        """`changes` are fields of SequenceSpec or of SamplingParams."""
        spec = self.specify(name, prompt, num_tokens, **changes)
        self.engine.submit(spec)
        return spec.key

    def specify(self, name: str, prompt: list[int], num_tokens: int = 1, **changes: Any) -> SequenceSpec:
        """The same, to be submitted by whoever asked."""
        key = RequestKey(name, changes.pop("generation", 0))
        fields = {name: changes.pop(name) for name in list(changes) if name in SequenceSpec.__slots__}
        sampling = SamplingParams(num_tokens, **{"ignore_eos": True, **changes})
        spec: dict[str, Any] = {"mode": SequenceMode.GENERATE, **fields}
        self.heard[key] = Heard()
        return SequenceSpec(key, tuple(prompt), sampling, **spec)

    def generate(self, prompt: list[int], num_tokens: int, name: str = "one", **changes: Any) -> Heard:
        """Submit and wait for the end."""
        key = self.submit(name, prompt, num_tokens, **changes)
        return self.wait_end(key)

    def wait_end(self, key: RequestKey) -> Heard:
        """Everything about a sequence that has ended well."""
        heard = self.heard[key]
        self.wait(lambda: heard.reason is not None or heard.failure is not None)
        assert heard.failure is None
        return heard

    def wait_reserved(self, key: RequestKey) -> Reserved:
        """The blocks of a sequence that waits for KV."""
        heard = self.heard[key]
        self.wait(lambda: heard.reserved is not None)
        assert heard.reserved is not None
        return heard.reserved

    def wait(self, condition: Callable[[], bool]) -> None:
        """Listen until it is so."""
        while not condition():
            self.wait_step()

    def wait_step(self) -> None:
        """Listen to what the next step says."""
        self._hear(self._outputs.get(timeout=DEADLINE_SECONDS))

    def pool(self) -> torch.Tensor:
        """The bytes of all blocks as float32, a row for each."""
        memory = self.engine.pool_memory
        raw = (ctypes.c_char * (memory.num_blocks * memory.block_bytes)).from_address(memory.address)
        return torch.frombuffer(raw, dtype=torch.float32).view(memory.num_blocks, -1)

    def assert_all_blocks_are_back(self) -> None:
        """Nothing runs, and every block is free or cached."""
        self.wait(lambda: self.load.active_tokens == 0 and self.load.active_blocks == 0)
        assert self.load.free_blocks + self.load.cached_blocks == self.config.num_blocks
        assert (self.load.num_running, self.load.num_waiting, self.load.queued_prefill_tokens) == (0, 0, 0)

    def _listen(self, output: StepOutput) -> None:
        self._outputs.put(output)
        self.react(output)

    def _hear(self, output: StepOutput) -> None:
        self.load = output.load
        load = output.load
        if not output.failures:
            total = load.free_blocks + load.cached_blocks + load.active_blocks + load.quarantined_blocks
            assert total == self.config.num_blocks
        self.sealed += output.sealed
        for reserved in output.reserved:
            self.heard[reserved.key].reserved = reserved
        for progress in output.progress:
            self.heard[progress.key].progress.append(progress)
        for failure in output.failures:
            self.heard[failure.key].failure = failure
        for delta in output.deltas:
            heard = self.heard[delta.key]
            assert heard.reason is None, "a token after the end"
            assert (delta.prompt is not None) == (not heard.tokens), "counts come with the first token"
            heard.tokens += delta.token_ids
            heard.logprobs += delta.logprobs
            heard.counts = delta.prompt or heard.counts
            heard.reason = delta.finish_reason
            heard.drafts += delta.drafts


def hand_over(source: Driver, lent: tuple[PageRange, ...], target: Driver, reserved: Reserved, num_tokens: int) -> int:
    """What a hand-off of a prompt does: of each group, the pages that a token behind it looks at; returns how many."""
    paging, num_pages = target.engine.paging, 0
    num_hit = reserved.num_hit_tokens // paging.block_tokens
    for group, (theirs, ours) in enumerate(zip(lent, reserved.page_ranges, strict=True)):
        needed = paging.needed_blocks(group, num_hit, num_tokens, num_tokens)
        placed = paging.remap(group, ours, num_hit, paging.retention_point(num_tokens, num_tokens))
        places = placed.within(needed.start, needed.stop).blocks
        copy_blocks(source, theirs.within(needed.start, needed.stop).blocks, target, places)
        num_pages += len(needed)
    return num_pages


def copy_blocks(source: Driver, blocks: tuple[int, ...], target: Driver, into: tuple[int, ...]) -> None:
    """What a transfer does: bytes of one engine's blocks into another's."""
    if DEVICE != "cpu":
        pytest.skip("copies blocks in the host's memory")
    theirs, ours = source.engine.pool_memory, target.engine.pool_memory
    for block, place in zip(blocks, into, strict=True):
        ctypes.memmove(
            ours.address + place * ours.block_bytes, theirs.address + block * theirs.block_bytes, ours.block_bytes
        )


def prefill(driver: Driver, name: str, prompt: list[int], **changes: Any) -> tuple[FirstToken, tuple[PageRange, ...]]:
    """Run a prefill sequence to its token; its blocks stay held."""
    key = driver.submit(name, prompt, mode=SequenceMode.PREFILL, **changes)
    heard = driver.heard[key]
    driver.wait(lambda: bool(heard.tokens))
    logprobs = heard.logprobs[0] if heard.logprobs else None
    return FirstToken(heard.tokens[0], logprobs), heard.progress[-1].page_ranges


def handed_off(
    source: Driver, target: Driver, prompt: list[int], num_tokens: int, name: str = "a", **changes: Any
) -> Heard:
    """A sequence of `target` whose prompt `source` computes, to its end."""
    key = target.submit(name, prompt, num_tokens, wait_for_kv=True, **changes)
    reserved = target.wait_reserved(key)
    first, lent = prefill(source, name, prompt, is_bare=reserved.is_bare, **changes)
    hand_over(source, lent, target, reserved, len(prompt))
    counts = source.heard[key].counts
    assert counts is not None
    source.engine.release(key)
    target.engine.complete_kv(key, len(prompt), first, num_bare_tokens=counts.num_bare_tokens)
    return target.wait_end(key)

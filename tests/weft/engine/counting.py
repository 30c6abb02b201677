"""A runner that only counts: its KV is a function of the text, and its device as slow as it can be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from weft.engine.config import EngineConfig
from weft.engine.messages import PoolMemory
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import SampledToken, ScheduledChunk
from weft.kv.layer_groups import AttentionSpan, PageRange
from weft.request import RequestKey

CONFIG = EngineConfig(
    num_blocks=9,
    block_tokens=4,
    vocab_size=100,
    max_context_tokens=40,
    chunk_tokens=6,
    max_num_seqs=4,
    pin_sealed=True,
    max_pinned=3,
)
# windows and chunks that are smaller and larger than a block, and a chunk that no block ends with
WINDOWS = replace(
    CONFIG,
    num_blocks=45,
    mixed_tokens=4,
    spans=(
        AttentionSpan(),
        AttentionSpan(window=3),
        AttentionSpan(chunk=6),
        AttentionSpan(window=9),
        AttentionSpan(chunk=16),
    ),
)
BOUNDED = replace(
    CONFIG, num_blocks=20, spans=(AttentionSpan(window=5), AttentionSpan(window=5), AttentionSpan(chunk=7))
)


def next_token(tokens: Items[int]) -> int:
    """A text that depends on everything before it."""
    return (sum((place + 1) * token for place, token in enumerate(tokens)) * 7 + 3) % 100


class CountingRunner:
    """Keeps what was written into which slot, and checks that a sequence reads its own KV, and all that it sees."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.pool_memory = PoolMemory(0, 1, config.num_blocks)
        self.chunks: list[tuple[RequestKey, int]] = []
        self.steps: list[list[int]] = []
        self.under_way: deque[Counted] = deque()
        self.last: dict[Sequence, int] = {}

    def write(self, group: int, run: PageRange, tokens: Items[int], places: range) -> None:
        """KV of a position is a function of all tokens up to it, and another one in each group."""
        for place in places:
            page = run.page(place // 4)
            assert page is not None, "no page to write to"
            self.slots[page, place % 4] = (group, *tokens[: place + 1])

    def check(self, group: int, run: PageRange, tokens: Items[int], seen: range) -> None:
        """What lies where a token looks is what was written for it."""
        for place in seen:
            page = run.page(place // 4)
            assert page is not None, "a page that is looked at is gone"
            assert self.slots[page, place % 4] == (group, *tokens[: place + 1]), "somebody else's KV"

    def launch(self, chunks: Items[ScheduledChunk]) -> Counted:
        """Note what a device would be given."""
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        generating = [chunk for chunk in chunks if chunk.is_decode]
        pieces = [chunk.num_tokens for chunk in chunks if chunk.num_tokens > 1 and not chunk.drafts]
        alone, shared = self.config.prompt_budgets(is_mixed=bool(generating))
        assert sum(pieces) <= (alone if generating else self.config.max_step_tokens)
        if any(chunk.sequence.is_prefill for chunk in chunks):
            assert sum(pieces) <= max([*pieces, shared])
        assert all(each <= self.config.chunk_tokens for each in pieces)
        assert all(chunk.num_tokens >= 1 for chunk in chunks)
        for group, reach in enumerate(self.config.spans):
            most = 2 * self.config.paging.max_pages_per_step(group)
            held = [len(chunk.sequence.page_ranges[group].blocks) for chunk in chunks]
            assert not reach.width or max(held) <= most, "more pages than two windows and a step"
        noted = [(each, list(each.sequence.page_ranges), list(each.sequence.token_ids)) for each in chunks]
        self.steps.append([chunk.num_tokens for chunk in chunks])
        self.chunks += [(chunk.sequence.spec.key, chunk.num_tokens) for chunk in chunks]
        self.under_way.append(Counted(self, noted))
        return self.under_way[-1]


@dataclass
class Counted:
    """One step, as it was when it was launched."""

    runner: CountingRunner
    chunks: list[tuple[ScheduledChunk, list[PageRange], list[int]]]  # with pages and tokens
    sampled: list[tuple[SampledToken, ...]] | None = None
    work_seconds: float | None = None

    def collect(self) -> list[tuple[SampledToken, ...]]:
        """Compute the step only now: the device is as slow as it can be."""
        while self.sampled is None:
            self.runner.under_way.popleft().compute()
        return self.sampled

    def compute(self) -> None:
        """Write, then read everything back."""
        runner, last = self.runner, self.runner.last
        runner.last, self.sampled = {}, []
        for chunk, runs, text in self.chunks:
            if chunk.start == len(text):
                text.append(last[chunk.sequence])
            text += chunk.draft_ids
            for group, run in enumerate(runs):
                runner.write(group, run, text, range(chunk.start, chunk.start + chunk.num_tokens))
        for chunk, runs, text in self.chunks:
            end = chunk.start + chunk.num_tokens
            for group, run in enumerate(runs):
                for position in range(chunk.start, end):
                    runner.check(group, run, text, range(runner.config.spans[group].first(position), position + 1))
            assert chunk.num_samples == (end == len(text)) + len(chunk.drafts)
            tokens = [next_token(text[:end]) for end in range(len(text) - chunk.num_samples + 1, len(text) + 1)]
            if tokens:
                runner.last[chunk.sequence] = tokens[-1]
            self.sampled.append(tuple(SampledToken(token) for token in tokens))

"""Size limits and scheduling options of the engine."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from weft.kv.layer_groups import AttentionSpan, PagingPolicy
from weft.options import MAX_NICENESS


def set_thread_niceness(niceness: int) -> None:
    """Set the niceness of the calling thread and of the threads that it starts later.

    Only Linux has niceness per thread; elsewhere nothing happens.
    """
    if niceness and sys.platform == "linux":
        os.nice(niceness)  # on Linux this changes only the calling thread


MAX_PINNED_SHARE = 8  # at most one block in 8 is pinned for copying
MIN_PINNED = 64


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. Blocks are counted in blocks, all other sizes in tokens or sequences.

    - `chunk_tokens`: maximum tokens of one prompt in one step.
    - `mixed_tokens`: maximum prompt tokens of a step that also decodes. 0 means `chunk_tokens`.
    - `shared_tokens`: maximum prompt tokens of a step with several prompts and no decoding sequence. 0 means
      `mixed_tokens`. One longer chunk runs alone.
    - `burst_tokens`: maximum prompt tokens of a step that computes a burst (see `weft.engine.wait_queue`), but at
      least `chunk_tokens`.
    - `max_drafts`: maximum drafts of one sequence in one step; 0 if the engine never drafts.
    - `max_waiting`: maximum sequences that wait for admission.
    - `steps_ahead`: 1 plans and launches a step while the previous one runs, 0 after it. The tokens are the same.
    - `decode_graphs`: replay steps in which every sequence decodes; see `weft.engine.graphs`.
    - `pin_sealed`: report full blocks for copying, with at most `max_pinned` reports unanswered. `max_pinned` 0 means
      an eighth of the pool, at least 64.
    - `niceness`: of the engine's thread and its compute threads, 0 to 19. On cores shared with event loops, the loops
      then run first.
    - `draft_group`: the group of layers with pages that also hold the KV of a draft model's layer; None without one.
    - `spans`: attention span of each group of layers. A block is a page: one group's layers, `block_tokens` tokens.
    - `paging`, `context_tokens`: derived. `context_tokens` bounds prompt plus generated tokens of one sequence by the
      model's context and by the pool.
    """

    num_blocks: int
    block_tokens: int
    vocab_size: int
    max_context_tokens: int
    chunk_tokens: int = 512
    mixed_tokens: int = 0
    shared_tokens: int = 0
    burst_tokens: int = 0
    max_num_seqs: int = 64
    max_drafts: int = 7
    max_waiting: int = 8192
    steps_ahead: int = 0
    decode_graphs: bool = False
    eos_token_ids: tuple[int, ...] = ()
    pin_sealed: bool = False
    max_pinned: int = 0
    niceness: int = 0
    draft_group: int | None = None
    spans: tuple[AttentionSpan, ...] = (AttentionSpan(),)
    paging: PagingPolicy = field(init=False)
    context_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        names = "num_blocks block_tokens vocab_size chunk_tokens max_num_seqs max_waiting"
        for name in names.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.mixed_tokens < 0:
            raise ValueError(f"mixed_tokens must not be negative, but is {self.mixed_tokens}")
        if self.steps_ahead not in (0, 1):
            raise ValueError(f"steps_ahead must be 0 or 1, not {self.steps_ahead}")
        if not 0 <= self.niceness <= MAX_NICENESS:
            raise ValueError(f"niceness must be 0 to {MAX_NICENESS}, not {self.niceness}")
        if self.max_context_tokens < 2:
            raise ValueError(f"max_context_tokens must be at least 2, not {self.max_context_tokens}")
        # With a step in flight, the next one is planned before the pages of the first are released.
        chunk_tokens = self.chunk_tokens * (1 + self.steps_ahead)
        paging = PagingPolicy(self.spans, self.block_tokens, chunk_tokens, self.draft_group)
        object.__setattr__(self, "paging", paging)
        object.__setattr__(self, "max_pinned", self.max_pinned or max(MIN_PINNED, self.num_blocks // MAX_PINNED_SHARE))
        object.__setattr__(self, "context_tokens", paging.max_sequence_tokens(self.num_blocks, self.max_context_tokens))

    @property
    def has_draft_graphs(self) -> bool:
        """True if passes of a draft model replay graphs too."""
        return self.decode_graphs and self.has_draft_layer and self.max_drafts > 0

    @property
    def has_draft_layer(self) -> bool:
        """True if a draft model has its KV in the pages."""
        return self.draft_group is not None

    @property
    def max_step_tokens(self) -> int:
        """Maximum prompt tokens of any step."""
        return max(self.burst_tokens, self.chunk_tokens)

    def prompt_budgets(self, is_mixed: bool) -> tuple[int, int]:
        """Return the maximum prompt tokens of a step with one prompt, and with several; `is_mixed`: it also decodes."""
        mixed = min(self.mixed_tokens or self.chunk_tokens, self.chunk_tokens)
        return (mixed, mixed) if is_mixed else (self.chunk_tokens, min(self.shared_tokens or mixed, self.chunk_tokens))

"""The engine's limits. Knows nothing of the model but its vocabulary, its end tokens and its context."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.engine.manners import MAX_NICENESS
from weft.kv.layer_groups import Paging, Reach

MAX_PINNED_SHARE = 8  # one in so many blocks
MIN_PINNED = 64


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds of one engine; blocks are counted in blocks, everything else in tokens or sequences.

    `chunk_tokens`: of a prompt, computed in one step at most. `mixed_tokens`: maximum prompt tokens of a step that also
    generates (0: `chunk_tokens`). `shared_tokens`: maximum prompt tokens of a step with several prompts and no
    generating sequence (0: `mixed_tokens`); one longer chunk runs alone. `burst_tokens`: maximum prompt tokens of a
    step that computes a burst, see `weft.engine.burst`, but not less than a chunk. `max_waiting`: sequences not yet
    admitted.
    `pin_sealed`: report full blocks for copying, at most `max_pinned` of them unanswered at a time
    (0: an eighth of the pool, 64 at least).
    `reaches`: how far back each group of layers looks; blocks are pages, one for each group and `block_tokens` tokens.
    `steps_ahead`: 1 plans and launches a step while the one before runs, 0 after it; the tokens are the same.
    `decode_graphs`: steps in which everybody generates are replayed, see `weft.engine.graphs`.
    `niceness`: of the engine's thread and those that compute for it, 0 to 19: where steps run on everybody's cores, who
    only has to answer goes before them.
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
    max_waiting: int = 8192
    steps_ahead: int = 0
    decode_graphs: bool = False
    eos_token_ids: tuple[int, ...] = ()
    pin_sealed: bool = False
    max_pinned: int = 0
    niceness: int = 0
    reaches: tuple[Reach, ...] = (Reach(),)
    paging: Paging = field(init=False)
    # prompt and generated tokens of one sequence at most: the model's context, or all the pool can hold
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
        # a step is planned beside the one under way, whose pages cannot have gone back yet
        paging = Paging(self.reaches, self.block_tokens, self.chunk_tokens * (1 + self.steps_ahead))
        object.__setattr__(self, "paging", paging)
        object.__setattr__(self, "max_pinned", self.max_pinned or max(MIN_PINNED, self.num_blocks // MAX_PINNED_SHARE))
        object.__setattr__(self, "context_tokens", paging.longest(self.num_blocks, self.max_context_tokens))

    @property
    def max_step_tokens(self) -> int:
        """Prompt tokens of any step at most."""
        return max(self.burst_tokens, self.chunk_tokens)

    def prompt_budgets(self, is_mixed: bool) -> tuple[int, int]:
        """Maximum prompt tokens of a step with one prompt, and with several. `is_mixed`: sequences generate in it."""
        mixed = min(self.mixed_tokens or self.chunk_tokens, self.chunk_tokens)
        return (mixed, mixed) if is_mixed else (self.chunk_tokens, min(self.shared_tokens or mixed, self.chunk_tokens))

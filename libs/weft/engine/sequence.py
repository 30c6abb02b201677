"""A sequence inside the engine: all of its state as data, and what follows from it. Knows no pool and no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from weft.engine.messages import PromptCounts, SequenceMode, SequenceSpec
from weft.engine.token_history import TokenHistory
from weft.kv.block_keys import block_key, reusable_blocks, root_key
from weft.kv.layer_groups import PageRange
from weft.request import FinishReason


class SequenceState(Enum):
    """waiting -> (reserved ->) running -> (held, for prefill only ->) ended; preemption leads back to waiting."""

    WAITING = auto()
    RESERVED = auto()  # holds blocks that somebody else fills
    RUNNING = auto()
    HELD = auto()  # a finished prefill whose blocks are being read
    ENDED = auto()  # forgotten, but for a step under way that still writes its blocks


@dataclass(slots=True, eq=False)
class Sequence:
    """`token_ids` is prompt plus generated; KV is final for the first `num_computed` of them.

    `runs`: its pages, one run a group of layers.
    A step under way adds to `num_launched` at once and to `num_computed` when it is done; between the two lies what it
    computes. `num_expected` tokens come of it that are still on the device.
    `keys` and `num_sealed` count leading blocks: keys known so far, and blocks that were matched or published.
    """

    spec: SequenceSpec
    token_ids: list[int]
    submitted_at: float
    state: SequenceState = SequenceState.WAITING
    page_ranges: list[PageRange] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_sealed: int = 0
    num_computed: int = 0
    num_launched: int = 0
    num_expected: int = 0
    last_token_pending: bool = False  # the token expected is its last, whichever it is
    num_cached: int = 0
    has_received_kv: bool = False
    admitted_at: float | None = None
    started_at: float = 0.0  # when the step that computed the end of its prompt was planned, or its KV arrived
    compute_seconds: float = 0.0
    history: TokenHistory | None = None
    queue_key: tuple[float, int] = (0.0, 0)  # see `weft.engine.wait_queue`; given when the planner takes it in

    @property
    def num_prompt(self) -> int:
        """Prompt tokens, resumed ones included."""
        return len(self.spec.token_ids)

    @property
    def num_tokens(self) -> int:
        """Those under way included."""
        return len(self.token_ids) + self.num_expected

    @property
    def num_pending(self) -> int:
        """Tokens for steps to come. At least 1 while the sequence goes on: the last one gives logits."""
        return 0 if self.last_token_pending else self.num_tokens - self.num_launched

    @property
    def is_prefilling(self) -> bool:
        """It goes on as far as it has pages. A prefill does so to its last token: nobody makes way for it."""
        return self.num_pending > (0 if self.is_prefill else 1)

    @property
    def is_decoding(self) -> bool:
        """It goes on by one token in every step."""
        return self.num_pending == 1 and not self.is_prefill

    @property
    def has_step_in_flight(self) -> bool:
        """A step computes on it, and writes its blocks."""
        return self.num_launched > self.num_computed

    def set_computed(self, num_tokens: int) -> None:
        """The KV of so many leading tokens is there, by whatever way."""
        assert not self.has_step_in_flight
        self.num_computed = self.num_launched = num_tokens

    @property
    def num_generated(self) -> int:
        """Generated tokens, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt + self.spec.resumed_tokens

    @property
    def num_preceding(self) -> int:
        """Of a token that a step under way samples: tokens generated before it."""
        return self.num_generated + self.num_expected - 1

    @property
    def needs_host_tokens(self) -> bool:
        """Each token must be known to the host before the next one can be sampled."""
        return self.spec.sampling.has_penalties or self.spec.constraint is not None

    @property
    def ignores_eos(self) -> bool:
        """It goes on behind an end token: where a grammar has come to its end, nothing can."""
        return self.spec.sampling.ignore_eos and self.spec.constraint is None

    @property
    def is_prefill(self) -> bool:
        """Ends after one token, and its blocks may be read by a peer before that: never preempted."""
        return self.spec.mode is SequenceMode.PREFILL

    @property
    def has_emitted(self) -> bool:
        """The first token is out."""
        return len(self.token_ids) > self.num_prompt

    @property
    def has_observer(self) -> bool:
        """Somebody still wants the hidden states of its prompt."""
        return self.spec.observer is not None and not self.has_emitted

    def key(self, index: int, block_tokens: int) -> bytes:
        """The key of full block `index`."""
        while len(self.keys) <= index:
            parent = self.keys[-1] if self.keys else root_key(self.spec.cache_salt)
            start = len(self.keys) * block_tokens
            self.keys.append(block_key(parent, self.token_ids[start : start + block_tokens]))
        return self.keys[index]

    def reusable_keys(self, block_tokens: int) -> list[bytes]:
        """The keys under which a cache may hold leading blocks; at least one token is left to compute."""
        if self.has_observer:
            return []  # blocks hold no hidden states
        count = reusable_blocks(len(self.token_ids), block_tokens)
        if count:
            self.key(count - 1, block_tokens)
        return self.keys[:count]

    def num_reusable(self, block_tokens: int) -> int:
        """Prompt tokens that whoever has the same prompt may take from a cache."""
        return reusable_blocks(self.num_prompt, block_tokens) * block_tokens

    def end_with(self, token_id: int, eos_token_ids: tuple[int, ...], context_tokens: int) -> FinishReason | None:
        """Why the sequence ends when `token_id` comes next; None when it goes on."""
        sampling = self.spec.sampling
        if token_id in sampling.stop_token_ids or (not self.ignores_eos and token_id in eos_token_ids):
            return FinishReason.STOP
        if self.num_generated + 1 >= sampling.max_tokens or len(self.token_ids) + 1 >= context_tokens:
            return FinishReason.LENGTH
        return None

    def expect_tokens(self, context_tokens: int) -> None:
        """A step under way will give one more token."""
        self.num_expected += 1
        is_full = self.num_tokens >= context_tokens
        is_long = self.num_generated + self.num_expected >= self.spec.sampling.max_tokens
        self.last_token_pending = self.is_prefill or is_full or is_long

    def prompt_counts(self) -> PromptCounts:
        """What the prompt cost, as sent with the first token."""
        queue_seconds = (self.admitted_at or self.submitted_at) - self.submitted_at
        return PromptCounts(self.num_cached, round(queue_seconds * 1000), round(self.compute_seconds * 1000))

"""A sequence inside the engine: its state, and what follows from it. No pool, no torch."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from weft.engine.messages import Constraint, PromptCounts, SequenceMode, SequenceSpec
from weft.kv.block_pool import block_key, reusable_blocks, root_key
from weft.kv.layer_groups import PageRange
from weft.request import FinishReason


class TokenHistory:
    """Tokens that a sequence has seen, for penalties, and the state of its grammar.

    Both depend only on the sequence's tokens: rebuilt elsewhere from prompt and generated tokens, they are the same.
    Follows one sequence forward. Both methods must be called with ascending ends.

    With `counts_prompt` penalties count the `num_prompt` prompt tokens too, otherwise only generated ones.
    """

    def __init__(self, num_prompt: int, counts_prompt: bool, constraint: Constraint | None) -> None:
        self.constraint = constraint
        self._num_prompt = num_prompt
        self._num_seen = 0 if counts_prompt else num_prompt
        self._num_accepted = num_prompt
        self._places: dict[int, int] = {}
        self._token_ids = array("q")  # each token once
        self._counts = array("f")  # how often the token at the same place was generated

    def count(
        self, token_ids: Items[int], end: int, drafts: Items[int] = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the distinct tokens of `token_ids[:end]` and `drafts`, and how often each was generated.

        Drafts count as generated in this result only.
        """
        for position in range(self._num_seen, end):
            self._note(token_ids[position], position >= self._num_prompt)
        self._num_seen = max(self._num_seen, end)
        ids, counts = np.array(self._token_ids, dtype=np.int64), np.array(self._counts, dtype=np.float32)
        if not drafts:
            return ids, counts
        fresh: list[int] = []
        for token in drafts:
            if token in self._places:
                counts[self._places[token]] += 1
            else:
                fresh.append(token)
        extra = Counter(fresh)
        return np.append(ids, list(extra)).astype(np.int64), np.append(counts, list(extra.values())).astype(np.float32)

    def advance(self, token_ids: Items[int], end: int) -> Constraint:
        """Return the constraint after it has accepted the generated tokens of `token_ids[:end]`."""
        assert self.constraint is not None
        if self._num_accepted < end:
            self.constraint.accept(token_ids[self._num_accepted : end])
            self._num_accepted = end
        return self.constraint

    def _note(self, token_id: int, is_generated: bool) -> None:
        place = self._places.get(token_id)
        if place is None:
            self._places[token_id] = place = len(self._token_ids)
            self._token_ids.append(token_id)
            self._counts.append(0.0)
        self._counts[place] += is_generated


class SequenceState(Enum):
    """waiting -> [reserved ->] running -> [held, for prefill only ->] ended. Preemption leads back to waiting."""

    WAITING = auto()
    RESERVED = auto()  # holds blocks that a peer or a store fills
    RUNNING = auto()
    HELD = auto()  # a finished prefill; a peer reads its blocks
    ENDED = auto()  # removed; a step in flight may still write its blocks


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence.

    - `token_ids`: prompt plus generated tokens. KV is final for the first `num_computed` of them.
    - `num_launched`: tokens computed or in flight; a step adds to it when it is launched, and to `num_computed` when it
      is done. `num_expected`: tokens that steps in flight sample.
    - `page_ranges`: its pages, one range for each group of layers.
    - `keys`: keys of leading full blocks, as far as computed. `num_sealed`: leading blocks matched or published.
    - `is_bare`: its rows do not fill the draft layer. `num_bare`: slots before it may lack draft KV, and the draft
      model does not see them.
    - `queue_key`: see `weft.engine.wait_queue`; assigned when the scheduler adds the sequence.
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
    last_token_pending: bool = False  # the expected token is the last one, for any id
    num_cached: int = 0
    is_bare: bool = False
    num_bare: int = 0
    has_received_kv: bool = False
    admitted_at: float | None = None
    started_at: float = 0.0  # when the step with the end of its prompt was scheduled, or its KV arrived
    compute_seconds: float = 0.0
    history: TokenHistory | None = None
    queue_key: tuple[float, int] = (0.0, 0)

    @property
    def num_prompt(self) -> int:
        """Prompt tokens, including resumed ones."""
        return len(self.spec.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens, including the expected ones."""
        return len(self.token_ids) + self.num_expected

    @property
    def num_pending(self) -> int:
        """Tokens for later steps. At least 1 while the sequence continues, because the last one gives the logits."""
        return 0 if self.last_token_pending else len(self.token_ids) + self.num_expected - self.num_launched

    @property
    def is_prefilling(self) -> bool:
        """True if the next chunk is as long as budget and pages allow.

        A prefill-only sequence stays in this state to its last token, because no sequence is preempted for it.
        """
        return self.num_pending > (0 if self.is_prefill else 1)

    @property
    def is_decoding(self) -> bool:
        """True if it computes one token in every step."""
        return self.num_pending == 1 and not self.is_prefill

    @property
    def has_step_in_flight(self) -> bool:
        """True while a step computes on it and writes its blocks."""
        return self.num_launched > self.num_computed

    def set_computed(self, num_tokens: int) -> None:
        """Set the number of leading tokens that have KV, whether computed, cached or received."""
        assert not self.has_step_in_flight
        self.num_computed = self.num_launched = num_tokens

    @property
    def num_generated(self) -> int:
        """Generated tokens, including those of earlier attempts."""
        return len(self.token_ids) - self.num_prompt + self.spec.resumed_tokens

    def num_generated_before(self, position: int) -> int:
        """Return the number of generated tokens before `position`, which may be in flight itself."""
        return position - self.num_prompt + self.spec.resumed_tokens

    @property
    def needs_host_tokens(self) -> bool:
        """True if the host must know each token before the next one can be sampled."""
        return self.spec.sampling.has_penalties or self.spec.constraint is not None

    @property
    def ignores_eos(self) -> bool:
        """True if it continues after an end token. A finished grammar allows nothing more, so it ends the sequence."""
        return self.spec.sampling.ignore_eos and self.spec.constraint is None

    @property
    def is_prefill(self) -> bool:
        """True if it ends after one token. A peer may read its blocks before that, so it is never preempted."""
        return self.spec.mode is SequenceMode.PREFILL

    @property
    def has_emitted(self) -> bool:
        """True once the first token has been sampled or received."""
        return len(self.token_ids) > self.num_prompt

    @property
    def has_observer(self) -> bool:
        """True while an observer still needs this prompt's hidden states."""
        return self.spec.observer is not None and not self.has_emitted

    def key(self, index: int, block_tokens: int) -> bytes:
        """Return the key of full block `index`."""
        while len(self.keys) <= index:
            parent = self.keys[-1] if self.keys else root_key(self.spec.cache_salt)
            start = len(self.keys) * block_tokens
            self.keys.append(block_key(parent, self.token_ids[start : start + block_tokens]))
        return self.keys[index]

    def reusable_keys(self, block_tokens: int) -> list[bytes]:
        """Return the keys of leading blocks that a cache may hold. At least one token is left to compute."""
        if self.has_observer:
            return []  # blocks hold no hidden states
        count = reusable_blocks(len(self.token_ids), block_tokens)
        if count:
            self.key(count - 1, block_tokens)
        return self.keys[:count]

    def num_reusable(self, block_tokens: int) -> int:
        """Return the prompt tokens that another sequence with the same prompt may take from a cache."""
        return reusable_blocks(self.num_prompt, block_tokens) * block_tokens

    def end_with(
        self, token_id: int, eos_token_ids: tuple[int, ...], context_tokens: int, num_ahead: int = 0
    ) -> FinishReason | None:
        """Return why the sequence ends with `token_id` next; None if it continues.

        `num_ahead`: tokens before it that are not appended yet.
        """
        sampling = self.spec.sampling
        if token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not self.ignores_eos):
            return FinishReason.STOP
        num_tokens = len(self.token_ids) + num_ahead + 1
        if num_tokens >= context_tokens or self.num_generated_before(num_tokens) >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def num_tokens_left(self, context_tokens: int) -> int:
        """Return how many more tokens `max_tokens` and the context allow."""
        return min(self.spec.sampling.max_tokens - self.num_generated, context_tokens - len(self.token_ids))

    def expect_tokens(self, count: int, context_tokens: int) -> None:
        """Record that a launched step samples `count` tokens."""
        self.num_expected += count
        num_tokens = self.num_tokens
        is_long = self.num_generated_before(num_tokens) >= self.spec.sampling.max_tokens
        self.last_token_pending = is_long or num_tokens >= context_tokens or self.is_prefill

    def token_history(self) -> TokenHistory:
        """Return the sequence's history. It is created on first use, because most sequences need none."""
        if self.history is None:
            spec = self.spec
            num_prompt = self.num_prompt - spec.resumed_tokens
            self.history = TokenHistory(num_prompt, spec.sampling.repetition_penalty != 1.0, spec.constraint)
        return self.history

    def prompt_counts(self) -> PromptCounts:
        """Return the cost of the prompt, as sent with the first token."""
        queue_seconds = (self.admitted_at or self.submitted_at) - self.submitted_at
        queue_ms, compute_ms = round(queue_seconds * 1000), round(self.compute_seconds * 1000)
        return PromptCounts(self.num_cached, queue_ms, compute_ms, min(self.num_bare, self.num_prompt))

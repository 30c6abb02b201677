"""Request values that all services share: ids, stages, sampling parameters, usage.

Stages of a request's life:

    received -> routed -> reserved -> prefilling -> transferring -> decoding -> finished
        \\_________\\__________\\___________\\_____________\\____________\\-> failed
                                                                       \\-> cancelled

received      the gateway has validated, rendered and tokenized it
routed        the scheduler has named its workers and booked its tokens
reserved      the decode worker holds blocks for its prompt
prefilling    the prompt is being computed (on the prefill worker, or on the decode worker itself)
transferring  the prompt is computed and its first token sent; its last blocks are in transfer
decoding      tokens come out
finished, failed, cancelled   terminal: exactly one of them, exactly once
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum


def new_id() -> str:
    """Return 32 random hexadecimal digits."""
    return os.urandom(16).hex()


def new_seed() -> int:
    """Return a random integer of 63 bits."""
    return int.from_bytes(os.urandom(8)) >> 1


class RequestStage(StrEnum):
    """The stage of a request; the value is the label in metrics and logs."""

    RECEIVED = "received"
    ROUTED = "routed"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """True if no stage follows this one."""
        return self in _TERMINAL


_TERMINAL = frozenset((RequestStage.FINISHED, RequestStage.FAILED, RequestStage.CANCELLED))


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's terms. Engines report STOP or LENGTH; only the gateway reports TOOL_CALLS."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """One attempt at one request. Services ignore messages with an older generation."""

    request_id: str
    generation: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}.{self.generation}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of an answer in llguidance's syntax, for the tokenizer.json with this hash."""

    text: str
    tokenizer_hash: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled. Temperature 0 is greedy; `num_logprobs` None returns no logprobs.

    `seed`, the absolute position and the token key the noise. Penalties, `min_tokens` and `grammar` depend only on
    prompt and generated tokens. So a sequence that migrates keeps its text.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the logits."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request speculates; it never changes the text.

    - `is_enabled`: False generates one token in each step.
    - `prediction`: tokens that the client expects in the answer, such as a file before an edit.
    """

    is_enabled: bool = True
    prediction: tuple[int, ...] = ()


SPECULATE = Speculation()


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Draft tokens that were verified, those of them that were accepted, and both of the client's prediction alone."""

    verified: int = 0
    accepted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.verified + other.verified,
            self.accepted + other.accepted,
            self.predicted + other.predicted,
            self.predicted_accepted + other.predicted_accepted,
        )


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the shared store may keep a request's KV.

    - `idle_seconds`: time without use; 0 keeps it as long as there is room.
    - `memory_only`: never write it to disk.
    """

    idle_seconds: int = 0
    memory_only: bool = False


KEEP = Retention()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and ln p under the unscaled distribution."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token's logprob and the best alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of consecutive prompt tokens from position `start`.

    - `chosen`: ln p of each prompt token.
    - `ranks`: its rank at that position; 1 is the most likely token.
    - `top_ids`, `top`: the best `num_top` alternatives of each position, best first, flattened.
    """

    start: int
    chosen: tuple[float, ...]
    ranks: tuple[int, ...]
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()
    num_top: int = 0


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """Cost of a prompt, counted by the worker that computed it. Times in milliseconds.

    - `failed_worker_id`: a prefill worker that was lost on the way.
    - `*_us`: microseconds in each stage on the decode worker before decoding.
    """

    cached_tokens: int = 0
    store_tokens: int = 0
    transferred_bytes: int = 0
    queue_ms: int = 0
    compute_ms: int = 0
    exposed_transfer_ms: int = 0
    prefill_worker_id: str = ""
    failed_worker_id: str = ""
    routed_us: int = 0
    reserved_us: int = 0
    prefilling_us: int = 0
    transferring_us: int = 0


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Properties that two workers must share before they exchange blocks."""

    weights_hash: str
    kv_dtype: str
    block_tokens: int
    block_bytes: int
    layout: str

    def difference(self, other: ModelFingerprint) -> str | None:
        """Describe the first field that differs; None if all match."""
        for name in ("weights_hash", "kv_dtype", "block_tokens", "block_bytes", "layout"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine} here, {theirs} there"
        return None


class WorkerRole(StrEnum):
    """The role of a worker in the mesh."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def can(self, role: WorkerRole) -> bool:
        """True if a worker of this role accepts work of that role."""
        return self in (role, WorkerRole.BOTH)


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """How peers reach a worker; `boot_id` changes at every start of its process."""

    worker_id: str
    boot_id: str
    address: str

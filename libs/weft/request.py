"""What every service means by a request: frozen values, no wire, no text, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words. Engines say STOP or LENGTH; TOOL_CALLS is the gateway's to tell."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """One attempt at one request. Messages with an older generation are late and change nothing."""

    request_id: str
    generation: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}.{self.generation}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match, in llguidance's own form, for the tokenizer.json with this hash."""

    text: str
    tokenizer_hash: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Temperature 0 is greedy; `num_logprobs` None means no logprobs at all.

    `seed` keys the noise together with the absolute position, and everything that looks back (penalties, `min_tokens`,
    `grammar`) is a function of prompt and generated tokens, so a sequence that moves keeps its text.
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
        """Do tokens seen so far count."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the shared store may keep what a request computes: so many seconds without use, 0 for as long as it has
    room; `memory_only`: never on disk."""

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
    """Of consecutive prompt tokens from position `start` on: ln p of each where it stands, and its rank there (1: the
    likeliest); and the best `num_top` in its place, best first, those of one position after those of the other."""

    start: int
    chosen: tuple[float, ...]
    ranks: tuple[int, ...]
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()
    num_top: int = 0


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """What a prompt cost, as counted by the worker that computed it. Times in milliseconds.

    `failed_worker_id` names a prefill worker that was lost on the way. `*_us`: microseconds in each stage on the decode
    worker before it generated.
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
    """What two workers must share before blocks move between them."""

    weights_hash: str
    kv_dtype: str
    block_tokens: int
    block_bytes: int
    layout: str

    def difference(self, other: ModelFingerprint) -> str | None:
        """The first field that differs, as text for people; None when they match."""
        for name in ("weights_hash", "kv_dtype", "block_tokens", "block_bytes", "layout"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine} here, {theirs} there"
        return None


class WorkerRole(StrEnum):
    """What a worker does in the mesh."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def can(self, role: WorkerRole) -> bool:
        """Does a worker of this role take work of that one."""
        return self in (role, WorkerRole.BOTH)


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A worker as peers reach it; `boot_id` changes at every start of its process."""

    worker_id: str
    boot_id: str
    address: str

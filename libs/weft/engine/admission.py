"""Which sequences the engine can run at all. Knows limits, not load."""

from __future__ import annotations

from weft.engine.config import EngineConfig
from weft.engine.messages import SequenceMode, SequenceSpec
from weft.errors import InvalidRequest


def check(spec: SequenceSpec, config: EngineConfig) -> None:
    """Raise InvalidRequest for what could never run here, or would take the others down with it."""
    num_tokens = len(spec.token_ids)
    if not num_tokens:
        raise InvalidRequest("the prompt is empty", "prompt")
    if not (min(spec.token_ids) >= 0 and max(spec.token_ids) < config.vocab_size):
        raise InvalidRequest(f"token ids must be between 0 and {config.vocab_size - 1}", "prompt")
    if num_tokens + 1 > config.context_tokens:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens, and the context has room for {config.context_tokens - 1}",
            "prompt",
            "context_length_exceeded",
        )
    if spec.sampling.num_logprobs is not None and spec.sampling.num_logprobs < 0:
        raise InvalidRequest("the number of logprobs must not be negative", "logprobs")
    if spec.mode is SequenceMode.GENERATE and spec.sampling.max_tokens <= spec.resumed_tokens:
        raise InvalidRequest("max_tokens leaves nothing to generate", "max_tokens")

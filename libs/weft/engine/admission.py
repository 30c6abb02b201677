"""Which sequences the engine can run at all. Knows limits, not load."""

from __future__ import annotations

from weft.engine.config import EngineConfig
from weft.engine.messages import SequenceMode, SequenceSpec
from weft.engine.waiting import MAX_PRIORITY
from weft.errors import InvalidRequest
from weft.request import SamplingParams


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
    _check_sampling(spec.sampling, config.vocab_size)
    if not 0 <= spec.resumed_tokens < num_tokens:
        raise InvalidRequest("more tokens are resumed than there are", "resumed_tokens")
    if abs(spec.priority) > MAX_PRIORITY:
        raise InvalidRequest(f"the priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", "priority")
    if spec.reader is not None and spec.wait_for_kv:
        raise InvalidRequest("hidden states are those of a prompt that is computed here, and whole", "reader")
    if spec.mode is SequenceMode.GENERATE and spec.sampling.max_tokens <= spec.resumed_tokens:
        raise InvalidRequest("max_tokens leaves nothing to generate", "max_tokens")


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    if sampling.num_logprobs is not None and sampling.num_logprobs < 0:
        raise InvalidRequest("the number of logprobs must not be negative", "logprobs")
    if any(not 0 <= token < vocab_size for token, _ in sampling.logit_bias):
        raise InvalidRequest(f"token ids must be between 0 and {vocab_size - 1}", "logit_bias")
    if sampling.min_tokens and any(token >= vocab_size for token in sampling.stop_token_ids):
        raise InvalidRequest(f"token ids must be between 0 and {vocab_size - 1}", "stop_token_ids")
    if not sampling.repetition_penalty > 0:
        raise InvalidRequest("the repetition penalty must be above 0", "repetition_penalty")

"""Span attributes of a request: OpenTelemetry's conventions for generative AI, and a few of our own.

They never contain prompts or answers.
"""

from __future__ import annotations

from typing import Any

from weft_services.gateway.dialects.choices import Usage
from weft_services.gateway.generation import Generation
from weft_services.gateway.mesh.generation_run import GenerationRun

PROVIDER = "weft"
OTHERS = {
    "completions": "text_completion",
    "grpc.generate": "text_completion",
    "embeddings": "embeddings",
    "grpc.embed": "embeddings",
}


def operation(endpoint: str) -> str:
    """Return gen_ai.operation.name of an endpoint."""
    return OTHERS.get(endpoint, "chat")


def begun(endpoint: str) -> dict[str, Any]:
    """Return attributes that are known before the body is read."""
    return {
        "gen_ai.operation.name": operation(endpoint),
        "gen_ai.provider.name": PROVIDER,
        "weft.endpoint": endpoint,
    }


def request(generation: Generation) -> dict[str, Any]:
    """Return the sampling parameters that the client set."""
    return {
        "gen_ai.request.max_tokens": generation.max_tokens,
        "gen_ai.request.temperature": generation.temperature,
        "gen_ai.request.top_p": generation.top_p,
        "gen_ai.request.top_k": generation.top_k,
        "gen_ai.request.seed": generation.seed,
        "gen_ai.request.frequency_penalty": generation.frequency_penalty or None,
        "gen_ai.request.presence_penalty": generation.presence_penalty or None,
        "gen_ai.request.choice.count": generation.n if generation.n > 1 else None,
        "gen_ai.request.stop_sequences": generation.stop,
        "gen_ai.request.stream": generation.stream,
    }


def response(run: GenerationRun, usage: Usage, first_token_seconds: float | None) -> dict[str, Any]:
    """Return attributes of the answer."""
    return {
        "gen_ai.response.model": run.prepared.generation.model,
        "gen_ai.response.finish_reasons": run.finish_reasons,
        "gen_ai.response.time_to_first_chunk": first_token_seconds,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "weft.request.id": run.request_id,
        "weft.prefill.worker": run.worst_prompt.prefill_worker_id,
        "weft.decode.worker": run.decode_id,
        "weft.attempts": run.num_attempts,
    }

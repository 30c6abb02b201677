"""Timing of one answer as JSON, for requests with `x-weft-timeline: 1`; docs/reference/clients.md lists the fields.

Every number is measured: by this gateway's clock, or by the workers' and told with the first token.
"""

from __future__ import annotations

from typing import Any

import orjson

from weft_services.gateway.mesh.generation_run import GenerationRun

HEADER = b"x-weft-timeline"


def timeline(
    run: GenerationRun, elapsed_ms: dict[str, float], received_at: float, worst_gap_ms: float
) -> dict[str, Any]:
    """`elapsed_ms`: when things were reached, since the request came; `received_at`: seconds since the epoch."""
    prompt, forecast = run.worst_prompt, run.forecast
    return {
        "id": run.request_id,
        "received_at": round(received_at, 3),
        "elapsed_ms": elapsed_ms,
        "workers": {"prefill": prompt.prefill_worker_id, "decode": run.decode_id},
        "num_attempts": run.num_attempts,
        "route": {
            "waited_ms": forecast.waited_ms if forecast else 0,
            "predicted_ttft_ms": forecast.ttft_ms if forecast else 0,
            "predicted_cached_tokens": forecast.cached_tokens if forecast else 0,
        },
        "decode_stages_ms": {
            "routed": prompt.routed_us / 1000,
            "reserved": prompt.reserved_us / 1000,
            "prefilling": prompt.prefilling_us / 1000,
            "transferring": prompt.transferring_us / 1000,
        },
        "prefill": {"queue_ms": prompt.queue_ms, "compute_ms": prompt.compute_ms},
        "transfer": {"bytes": prompt.transferred_bytes, "exposed_ms": prompt.exposed_transfer_ms},
        "tokens": {
            "prompt": run.prepared.num_prompt_tokens,
            "cached": run.num_cached_tokens,
            "from_store": prompt.store_tokens,
            "completion": run.num_completion_tokens,
        },
        "itl_ms": _itl_ms(run, elapsed_ms, worst_gap_ms),
    }


def event(fields: dict[str, Any]) -> bytes:
    """As one frame of a stream: a chunk without choices, which SDKs that read every frame as a chunk pass over."""
    data = orjson.dumps({"object": "weft.timeline", "choices": [], **fields})
    return b"event: weft.timeline\ndata: " + data + b"\n\n"


def response_header(fields: dict[str, Any]) -> tuple[bytes, bytes]:
    """For an answer in one piece."""
    return HEADER, orjson.dumps(fields)


def _itl_ms(run: GenerationRun, elapsed_ms: dict[str, float], worst_gap_ms: float) -> dict[str, float]:
    """Between tokens of a choice, the mean over all choices; and the longest wait for a next batch of them."""
    count = run.num_completion_tokens - len(run.prepared.sequences)
    span = elapsed_ms.get("last_token", 0.0) - elapsed_ms.get("first_token", 0.0)
    mean = span * len(run.prepared.sequences) / count if count > 0 else 0.0
    return {"mean": round(mean, 3), "worst": round(worst_gap_ms, 3)}

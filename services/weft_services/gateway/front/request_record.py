"""What the gateway records of a request: an access-log line, metrics, a span and a timeline.

A listener opens an access-log entry and writes it when the request ends. Modules in between add what they learn about
the request with `note`. Nothing recorded contains prompts or answers.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import Any

import orjson
from prometheus_client import Histogram

from weft import metrics, trace
from weft.request import RequestStage
from weft_services.gateway.access.authentication import current_principal
from weft_services.gateway.dialects.answers import Usage
from weft_services.gateway.generation import Generation
from weft_services.gateway.mesh.choice_text import ChoiceUpdate
from weft_services.gateway.mesh.generation_run import GenerationRun

logger = logging.getLogger(__name__)
MAX_CHARS = 200
PLAIN = re.compile(rf'[^\s"=\\]{{1,{MAX_CHARS}}}', re.ASCII)


class AccessLogEntry:
    """A log line under construction."""

    def __init__(self, method: str, path: str) -> None:
        self._began = time.monotonic()
        self._request_fields = {"method": method, "path": path}
        self._pairs: dict[str, Any] = {}
        self._level = logging.INFO

    def note(self, pairs: dict[str, Any], level: int = logging.INFO) -> None:
        """Add or replace fields; empty values are left out."""
        self._pairs |= {name: value for name, value in pairs.items() if value not in (None, "")}
        self._level = max(self._level, level)

    def fail(self, error: Exception) -> None:
        """Record the error unless an earlier one is recorded."""
        self._pairs.setdefault("error", f"{type(error).__name__}: {error}")

    def write(self, status: int | str) -> None:
        if not logger.isEnabledFor(self._level):
            return
        ends = {"total_ms": round((time.monotonic() - self._began) * 1000)}
        pairs = {**self._request_fields, "status": status, **ends, **self._pairs}
        logger.log(self._level, "%s", " ".join(f"{name}={_quoted(value)}" for name, value in pairs.items()))


_current: ContextVar[AccessLogEntry | None] = ContextVar("entry", default=None)


def open_entry(method: str, path: str) -> AccessLogEntry:
    """Open the entry of the current task's request."""
    entry = AccessLogEntry(method, path)
    _current.set(entry)
    return entry


def is_logged(level: int) -> bool:
    """Return whether a line of that level is written, so that callers can skip building it."""
    return logger.isEnabledFor(level)


def note(pairs: dict[str, Any], level: int = logging.INFO) -> None:
    """Add fields to the current request's line, if it has one."""
    if (entry := _current.get()) is not None:
        entry.note(pairs, level)


def note_error(error: Exception) -> None:
    """Record an error of the current request. The first one wins because it is closest to the cause."""
    if (entry := _current.get()) is not None:
        entry.fail(error)


def _quoted(value: Any) -> str:
    """Quote the value unless it reads back as one word. Paths and errors contain client input."""
    text = str(value)
    return text if PLAIN.fullmatch(text) else json.dumps(text[:MAX_CHARS])


# gen_ai.operation.name of endpoints that do not chat.
_OPERATIONS = {
    "completions": "text_completion",
    "grpc.generate": "text_completion",
    "embeddings": "embeddings",
    "grpc.embed": "embeddings",
}


def _operation(endpoint: str) -> str:
    return _OPERATIONS.get(endpoint, "chat")


def _request_attributes(generation: Generation) -> dict[str, Any]:
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


def _response_attributes(run: GenerationRun, usage: Usage, first_token_seconds: float | None) -> dict[str, Any]:
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
        "weft.drafted_tokens": usage.drafts.verified,
        "weft.accepted_tokens": usage.drafts.accepted,
    }


REJECTED = "rejected"  # outcome of a request that failed below 500, before placement; not a stage
HEADER = b"x-weft-timeline"


class ApiEndpoint(StrEnum):
    """Names of endpoints in metrics, spans and the access log."""

    CHAT = "chat.completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    GRPC_CHAT = "grpc.chat"
    GRPC_GENERATE = "grpc.generate"
    GRPC_EMBED = "grpc.embed"


class RequestRecord:
    """Opened when a request arrives, closed once when it ends."""

    def __init__(self, endpoint: ApiEndpoint, traceparent: str = "") -> None:
        """`traceparent`: the client's own trace, which this span continues."""
        self._endpoint = endpoint
        self._span = trace.start_span(_operation(endpoint), traceparent)
        if self._span is not None:
            self._span.set({"gen_ai.operation.name": _operation(endpoint), "gen_ai.provider.name": "weft"})
            self._span.set({"weft.endpoint": endpoint})
        self._model = ""
        self._between_tokens: Histogram
        self._received = time.monotonic()
        self._received_at = time.time()
        self._stages: dict[str, float] = {}
        self._last_token: float | None = None
        self._worst_gap = 0.0
        self._run: GenerationRun | None = None
        self._principal = current_principal.get()
        self.finish_reasons: Sequence[str] = ()  # where they differ from the workers', which know no tool calls
        self.prompt_tokens = 0  # of a request that is answered without a run
        self._is_closed = False

    def mark_stage(self, stage: str) -> None:
        """Note the time of a stage: prepared, routed or first_token."""
        self._stages[stage] = now = time.monotonic()
        if stage == RequestStage.ROUTED:
            metrics.STAGE_SECONDS.labels(RequestStage.RECEIVED).observe(now - self._received)

    def attach_run(self, run: GenerationRun) -> None:
        """Count the tokens of this run."""
        self._run = run
        self.set_model(run.prepared.model.name)
        if self._span is not None:
            self._span.set(_request_attributes(run.prepared.generation))

    def set_model(self, model: str) -> None:
        """Set the served model. Unknown names never become a label."""
        self._model = model
        self._between_tokens = metrics.ITL.labels(model)
        if self._span is not None:
            self._span.rename(f"{_operation(self._endpoint)} {model}")
            self._span.set({"gen_ai.request.model": model})

    def on_pieces(self, pieces: Sequence[ChoiceUpdate]) -> None:
        """Observe the latency of new tokens. Tokens of one batch share the time since the last batch."""
        index, of_choice, count = -1, 0, 0
        for piece in pieces:  # Pieces of one choice are adjacent.
            of_choice = len(piece.token_ids) + (of_choice if piece.index == index else 0)
            index, count = piece.index, max(count, of_choice)
        if not count:
            return
        now = time.monotonic()
        if self._last_token is None:
            self.mark_stage("first_token")
            metrics.TTFT.labels(self._model).observe(now - self._received)
        else:
            self._between_tokens.observe((now - self._last_token) / count)
            self._worst_gap = max(self._worst_gap, now - self._last_token)
        self._last_token = now

    def usage(self) -> Usage:
        """Return the token counts so far."""
        if self._run is None:
            return Usage(self.prompt_tokens, 0, 0)
        run = self._run
        return Usage(
            run.prepared.num_prompt_tokens, run.num_completion_tokens, run.num_cached_tokens, drafts=run.drafts
        )

    def timeline(self) -> dict[str, Any]:
        """Return the timeline for a client that asks for it. Needs at least one token."""
        assert self._run is not None
        moments = {**self._stages, "last_token": self._last_token or self._received, "end": time.monotonic()}
        elapsed = {name: round((moment - self._received) * 1000, 3) for name, moment in moments.items()}
        return timeline(self._run, elapsed, self._received_at, self._worst_gap * 1000)

    def close(self, outcome: RequestStage | str, error: Exception | None = None) -> None:
        """Count and log the request; later calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        usage = self.usage()
        self._principal.charge(tokens=usage.completion_tokens)
        now = time.monotonic()
        if self._span is not None:
            self._end_span(self._span, str(outcome), usage, error)
        metrics.REQUESTS.labels(self._endpoint, str(outcome), self._model).inc()
        if outcome == RequestStage.FINISHED:  # rejections take almost no time and would lower the latency
            metrics.E2E.labels(self._model).observe(now - self._received)
        # Skip prompts that were never computed: they would distort the cache hit rate. Embeddings have no first token.
        is_computed = self._last_token is not None or (self._run is None and outcome == RequestStage.FINISHED)
        if self._model and is_computed:
            metrics.PROMPT_TOKENS.labels(self._model).inc(usage.prompt_tokens)
            metrics.CACHED_TOKENS.labels(self._model).inc(usage.cached_tokens)
            metrics.COMPLETION_TOKENS.labels(self._model).inc(usage.completion_tokens)
        level = logging.WARNING if outcome == RequestStage.FAILED else logging.INFO
        if is_logged(level):
            note(self._log_fields(str(outcome), usage, error), level)

    def _end_span(self, span: trace.Span, outcome: str, usage: Usage, error: Exception | None) -> None:
        began = round(self._received_at * 1e9)
        moments = {name: began + round((moment - self._received) * 1e9) for name, moment in self._stages.items()}
        if routed := moments.get(RequestStage.ROUTED):
            span.child(RequestStage.RECEIVED.value, began, moments.get("prepared", routed))
        span.set({"weft.outcome": outcome})
        if self._run is not None:
            first = self._stages.get("first_token")
            span.set(_response_attributes(self._run, usage, first - self._received if first else None))
            span.set({"gen_ai.response.finish_reasons": self.finish_reasons})
        elif self.prompt_tokens:
            span.set({"gen_ai.response.model": self._model, "gen_ai.usage.input_tokens": self.prompt_tokens})
        if error is not None and outcome == RequestStage.FAILED:
            span.fail(error)
        elif error is not None:
            span.set({"error.type": type(error).__name__})
        span.end()

    def _log_fields(self, outcome: str, usage: Usage, error: Exception | None) -> dict[str, Any]:
        """Return the fields of the access log."""
        pairs: dict[str, Any] = {"endpoint": self._endpoint, "outcome": outcome, "model": self._model}
        pairs |= {f"{stage}_ms": round((moment - self._received) * 1000) for stage, moment in self._stages.items()}
        if self._run is not None:
            prompt = self._run.worst_prompt
            pairs |= {"id": self._run.request_id, "prefill": prompt.prefill_worker_id, "decode": self._run.decode_id}
            pairs |= {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens}
            pairs |= {"completion": usage.completion_tokens, "attempts": self._run.num_attempts}
            if usage.drafts.verified:
                pairs |= {"drafted": usage.drafts.verified, "accepted": usage.drafts.accepted}
            pairs |= {"queue_ms": prompt.queue_ms, "compute_ms": prompt.compute_ms}
            pairs |= {"transfer_ms": prompt.exposed_transfer_ms, "transfer_bytes": prompt.transferred_bytes}
            if (forecast := self._run.forecast) is not None:  # its times count from placement
                pairs |= {"predicted_ttft_ms": forecast.ttft_ms, "predicted_itl_ms": forecast.itl_ms}
                pairs |= {"predicted_cached": forecast.cached_tokens, "waited_ms": forecast.waited_ms}
        elif self.prompt_tokens:
            pairs["prompt"] = self.prompt_tokens
        pairs["trace"] = self._span.trace_id if self._span is not None else ""
        pairs["error"] = f"{type(error).__name__}: {error}" if error is not None else ""
        return pairs


def init_series(models: Iterable[str]) -> None:
    """Create all series at zero when the process starts.

    Rates and graphs need a value before the first request and before the first failure.
    """
    models = tuple(models)
    for endpoint in ApiEndpoint:
        for model in ("", *models):
            metrics.REQUESTS.labels(endpoint, RequestStage.FAILED.value, model)
    for model in models:
        for latency in (metrics.TTFT, metrics.ITL, metrics.E2E):
            latency.labels(model)
        for tokens in (metrics.PROMPT_TOKENS, metrics.CACHED_TOKENS, metrics.COMPLETION_TOKENS):
            tokens.labels(model)


def timeline(
    run: GenerationRun, elapsed_ms: dict[str, float], received_at: float, worst_gap_ms: float
) -> dict[str, Any]:
    """Return the timeline of one answer as JSON fields; docs/reference/clients.md describes them.

    All values are measured, by this gateway's clock or by the workers'. `elapsed_ms`: time from arrival to each stage.
    `received_at`: seconds since the epoch.
    """
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
            "drafted": run.drafts.verified,
            "accepted": run.drafts.accepted,
        },
        "itl_ms": _itl_ms(run, elapsed_ms, worst_gap_ms),
    }


def event(fields: dict[str, Any]) -> bytes:
    """Encode the timeline as a stream frame. SDKs skip it as a chunk with empty `choices`."""
    data = orjson.dumps({"object": "weft.timeline", "choices": [], **fields})
    return b"event: weft.timeline\ndata: " + data + b"\n\n"


def response_header(fields: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the timeline as a header of a whole answer."""
    return HEADER, orjson.dumps(fields)


def _itl_ms(run: GenerationRun, elapsed_ms: dict[str, float], worst_gap_ms: float) -> dict[str, float]:
    """Return the mean gap between tokens over all choices, and the longest gap between batches."""
    count = run.num_completion_tokens - len(run.prepared.sequences)
    span = elapsed_ms.get("last_token", 0.0) - elapsed_ms.get("first_token", 0.0)
    mean = span * len(run.prepared.sequences) / count if count > 0 else 0.0
    return {"mean": round(mean, 3), "worst": round(worst_gap_ms, 3)}

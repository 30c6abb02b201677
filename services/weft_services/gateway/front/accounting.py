"""One client request's times and counts: metrics as they happen, its part of the access log and its span at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from weft import metrics, trace
from weft.metrics import cached_labels
from weft.request_stage import RequestStage
from weft_services.gateway.access.visitor import visitor
from weft_services.gateway.dialects.frames import Usage
from weft_services.gateway.front import genai
from weft_services.gateway.front.access_log import is_logged, note
from weft_services.gateway.front.timeline import timeline
from weft_services.gateway.mesh.generation_run import GenerationRun
from weft_services.gateway.mesh.scheduler_types import Forecast
from weft_services.gateway.mesh.sequence_runner import ChoiceUpdate

REJECTED = "rejected"  # by a status below 500, before it was placed; not a stage of life
# what requests are counted by, as accounts are opened
ENDPOINTS = (
    *("chat.completions", "completions", "responses", "messages", "embeddings"),
    *("grpc.chat", "grpc.generate", "grpc.embed"),
)


class Account:
    """Opened when a request arrives, closed once when it ends."""

    def __init__(self, endpoint: str, traceparent: str = "") -> None:
        """`traceparent`: of the client's own trace, which goes on here."""
        self._endpoint = endpoint
        self._span = trace.start_span(genai.operation(endpoint), traceparent)
        if self._span is not None:
            self._span.set(genai.begun(endpoint))
        self._model = ""
        self._between_tokens: metrics.SingleThreadSeries
        self._received = time.monotonic()
        self._received_at = time.time()
        self._stages: dict[str, float] = {}
        self._last_token: float | None = None
        self._worst_gap = 0.0
        self._run: GenerationRun | None = None
        self._visitor = visitor.get()
        self.finish_reasons: Sequence[str] = ()  # where the workers' are not all: they know of no tool calls
        self.prompt_tokens = 0  # of a request that is answered without a run
        self._is_closed = False

    def reached(self, stage: str) -> None:
        """Note when a stage was reached: prepared, routed, first_token."""
        self._stages[stage] = now = time.monotonic()
        if stage == RequestStage.ROUTED:
            cached_labels(metrics.STAGE_SECONDS, RequestStage.RECEIVED).observe(now - self._received)

    def watch(self, run: GenerationRun) -> None:
        """The run whose counts go into the books."""
        self._run = run
        self.about(run.prepared.model.name)
        if self._span is not None:
            self._span.set(genai.request(run.prepared.generation))

    def about(self, model: str) -> None:
        """Which of the served models is meant; nothing but their names becomes a label."""
        self._model = model
        self._between_tokens = metrics.ITL.of(model)
        if self._span is not None:
            self._span.rename(f"{genai.operation(self._endpoint)} {model}")
            self._span.set({"gen_ai.request.model": model})

    def tokens(self, pieces: Sequence[ChoiceUpdate]) -> None:
        """Latency of what has just arrived; tokens of one batch share the time since the last one."""
        count = 0
        for piece in pieces:
            count = max(count, len(piece.token_ids))
        if not count:
            return
        now = time.monotonic()
        if self._last_token is None:
            self.reached("first_token")
            metrics.TTFT.of(self._model).observe(now - self._received)
        else:
            self._between_tokens.observe((now - self._last_token) / count)
            self._worst_gap = max(self._worst_gap, now - self._last_token)
        self._last_token = now

    def usage(self) -> Usage:
        """Token counts so far."""
        if self._run is None:
            return Usage(self.prompt_tokens, 0, 0)
        run = self._run
        return Usage(run.prepared.num_prompt_tokens, run.num_completion_tokens, run.num_cached_tokens)

    def timeline(self) -> dict[str, Any]:
        """Where the time went, for a client that asks; once tokens have come."""
        assert self._run is not None
        moments = {**self._stages, "last_token": self._last_token or self._received, "end": time.monotonic()}
        elapsed = {name: round((moment - self._received) * 1000, 3) for name, moment in moments.items()}
        return timeline(self._run, elapsed, self._received_at, self._worst_gap * 1000)

    def close(self, outcome: RequestStage | str, error: Exception | None = None) -> None:
        """Count and log; later calls change nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        usage = self.usage()
        self._visitor.charge(tokens=usage.completion_tokens)
        now = time.monotonic()
        if self._span is not None:
            self._end(self._span, str(outcome), usage, error)
        cached_labels(metrics.REQUESTS, self._endpoint, str(outcome), self._model).inc()
        if outcome == RequestStage.FINISHED:  # refusals take no time, and would make everything look quick
            metrics.E2E.of(self._model).observe(now - self._received)
        # a prompt that nobody took would hide what caches do; embeddings have no first token
        is_computed = self._last_token is not None or (self._run is None and outcome == RequestStage.FINISHED)
        if self._model and is_computed:
            cached_labels(metrics.PROMPT_TOKENS, self._model).inc(usage.prompt_tokens)
            cached_labels(metrics.CACHED_TOKENS, self._model).inc(usage.cached_tokens)
            cached_labels(metrics.COMPLETION_TOKENS, self._model).inc(usage.completion_tokens)
        level = logging.WARNING if outcome == RequestStage.FAILED else logging.INFO
        if is_logged(level):
            note(self._told(str(outcome), usage, error), level)

    def _end(self, span: trace.Span, outcome: str, usage: Usage, error: Exception | None) -> None:
        began = round(self._received_at * 1e9)
        moments = {name: began + round((moment - self._received) * 1e9) for name, moment in self._stages.items()}
        if routed := moments.get(RequestStage.ROUTED):
            span.child(RequestStage.RECEIVED.value, began, moments.get("prepared", routed))
        span.set({"weft.outcome": outcome})
        if self._run is not None:
            first = self._stages.get("first_token")
            span.set(genai.response(self._run, usage, first - self._received if first else None))
            span.set({"gen_ai.response.finish_reasons": self.finish_reasons})
        elif self.prompt_tokens:
            span.set({"gen_ai.response.model": self._model, "gen_ai.usage.input_tokens": self.prompt_tokens})
        if error is not None and outcome == RequestStage.FAILED:
            span.fail(error)
        elif error is not None:
            span.set({"error.type": type(error).__name__})
        span.end()

    def _told(self, outcome: str, usage: Usage, error: Exception | None) -> dict[str, Any]:
        """For the access log."""
        pairs: dict[str, Any] = {"endpoint": self._endpoint, "outcome": outcome, "model": self._model}
        pairs |= {f"{stage}_ms": self._since(moment) for stage, moment in self._stages.items()}
        if self._run is not None:
            prompt = self._run.worst_prompt
            pairs |= {"id": self._run.request_id, "prefill": prompt.prefill_worker_id, "decode": self._run.decode_id}
            pairs |= {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens}
            pairs |= {"completion": usage.completion_tokens, "attempts": self._run.num_attempts}
            pairs |= {"queue_ms": prompt.queue_ms, "compute_ms": prompt.compute_ms}
            pairs |= {"transfer_ms": prompt.exposed_transfer_ms, "transfer_bytes": prompt.transferred_bytes}
            pairs |= _forecast_pairs(self._run.forecast)
        elif self.prompt_tokens:
            pairs["prompt"] = self.prompt_tokens
        pairs["trace"] = self._span.trace_id if self._span is not None else ""
        pairs["error"] = f"{type(error).__name__}: {error}" if error is not None else ""
        return pairs

    def _since(self, moment: float) -> int:
        return round((moment - self._received) * 1000)


def _forecast_pairs(forecast: Forecast | None) -> dict[str, int]:
    """Beside what came of it: first_token_ms is counted from the request's arrival, the forecast from its placement."""
    if forecast is None:
        return {}
    return {
        "predicted_ttft_ms": forecast.ttft_ms,
        "predicted_itl_ms": forecast.itl_ms,
        "predicted_cached": forecast.cached_tokens,
        "waited_ms": forecast.waited_ms,
    }


def expect(models: Iterable[str]) -> None:
    """So that graphs begin at zero with the process, and not with a model's first request; nor with its first failure,
    which no rate would show: of a series that begins with it there is nothing earlier to compare."""
    models = tuple(models)
    for endpoint in ENDPOINTS:
        for model in ("", *models):
            metrics.REQUESTS.labels(endpoint, RequestStage.FAILED.value, model)
    for model in models:
        for latency in (metrics.TTFT, metrics.ITL, metrics.E2E):
            latency.of(model)
        for tokens in (metrics.PROMPT_TOKENS, metrics.CACHED_TOKENS, metrics.COMPLETION_TOKENS):
            cached_labels(tokens, model)

"""Distributed tracing: propagates W3C trace context and exports spans by OTLP.

Off unless OTEL_EXPORTER_OTLP_ENDPOINT is set. Then nothing of OpenTelemetry is imported, and each call costs one look
at a variable.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from weft.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
TRACEPARENT = "traceparent"
# A collector that does not answer must not delay process exit.
EXPORT_SECONDS = 2.0
# As between services (weft.rpc.client): gRPC's retries may take all memory.
NO_RETRIES: Any = (("grpc.enable_retries", 0),)  # The library's types allow strings only.
Attributes = Mapping[str, Any]

_tracer: Tracer | None = None
_provider: TracerProvider | None = None
_current: ContextVar[Span | None] = ContextVar("span", default=None)


class Span:
    """A started span; call `end` exactly once."""

    def __init__(self, inner: OtelSpan) -> None:
        self._inner = inner

    @property
    def traceparent(self) -> str:
        """W3C traceparent header of this span."""
        context = self._inner.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    @property
    def trace_id(self) -> str:
        """Trace id in hex, for searching the trace."""
        return f"{self._inner.get_span_context().trace_id:032x}"

    def rename(self, name: str) -> None:
        """Replace the name once the request is known better."""
        self._inner.update_name(name)

    def set(self, attributes: Attributes) -> None:
        """Set attributes; None and empty values are left out."""
        self._inner.set_attributes({key: value for key, value in attributes.items() if value not in (None, "", (), [])})

    def event(self, name: str, attributes: Attributes) -> None:
        """Record an event at the current time."""
        self._inner.add_event(name, dict(attributes))

    def child(self, name: str, start_ns: int, end_ns: int) -> None:
        """Record a finished child span; times in nanoseconds since the epoch."""
        assert _tracer is not None
        _tracer.start_span(name, self.context(), start_time=start_ns).end(max(end_ns, start_ns))

    def fail(self, error: BaseException) -> None:
        """Mark the span as failed."""
        from opentelemetry.trace import StatusCode

        self._inner.set_status(StatusCode.ERROR, str(error))
        self._inner.set_attribute("error.type", type(error).__name__)

    def end(self) -> None:
        self._inner.end()

    def context(self) -> Context:
        """Return the OpenTelemetry context of this span."""
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self._inner)


def setup(service: str, instance: str = "") -> None:
    """Enable tracing if configured. Call once before serving. Raises ConfigError if the libraries are missing."""
    global _tracer, _provider
    if not any(os.environ.get(name) for name in ENDPOINTS) or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"{ENDPOINTS[0]} is set, but {error.name} is not installed") from error
    resource = Resource.create({"service.name": f"weft-{service}", "service.instance.id": instance or service})
    _provider = TracerProvider(resource=resource)
    _provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_SECONDS, channel_options=NO_RETRIES))
    )
    _tracer = _provider.get_tracer("weft")


def shutdown() -> None:
    """Export pending spans and disable tracing. The provider also exports at process exit."""
    global _tracer, _provider
    if _provider is not None:
        _provider.shutdown()
    _tracer = _provider = None


def incoming(metadata: Iterable[tuple[str | bytes, str | bytes]] | None) -> str:
    """Return the trace context from gRPC metadata or HTTP headers; empty without one or while tracing is off."""
    if _tracer is None:
        return ""
    for name, value in metadata or ():
        if name in (TRACEPARENT, TRACEPARENT.encode()):
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""


def outgoing() -> tuple[tuple[str, str], ...] | None:
    """Return the metadata for a call on behalf of the current span."""
    parent = traceparent()
    return ((TRACEPARENT, parent),) if parent else None


def traceparent() -> str:
    """Return the current span's traceparent; empty without one."""
    span = _current.get() if _tracer is not None else None
    return span.traceparent if span is not None else ""


def start_span(name: str, parent: str = "") -> Span | None:
    """Start a server span and make it current for this task; None while tracing is off.

    Without a valid `parent` it starts a new trace.
    """
    if _tracer is None:
        return None
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({TRACEPARENT: parent})
    span = Span(_tracer.start_span(name, context, SpanKind.SERVER))
    _current.set(span)
    return span


def server_span(name: str, parent: str) -> AbstractContextManager[Span | None]:
    """Return a context with a span for a peer's call if the peer traces it; current inside the block."""
    span = start_span(name, parent) if parent else None
    return nullcontext() if span is None else _until_ended(span)


@contextmanager
def _until_ended(span: Span) -> Iterator[Span]:
    try:
        yield span
    except asyncio.CancelledError:
        span.event("cancelled", {})
        raise
    except Exception as error:
        span.fail(error)
        raise
    finally:
        span.end()


@contextmanager
def child_span(name: str) -> Iterator[Span | None]:
    """Start a child of the current span, current inside the block; None without a current span."""
    outer = _current.get() if _tracer is not None else None
    if outer is None or _tracer is None:
        yield None
        return
    span = Span(_tracer.start_span(name, outer.context()))
    token = _current.set(span)
    try:
        yield span
    finally:
        _current.reset(token)
        span.end()

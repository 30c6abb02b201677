"""An OTLP collector of a few lines: takes spans over gRPC, as OpenTelemetry's own protocol has them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Collector(TraceServiceServicer):
    """Listens inside its block."""

    def __init__(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._taken: list[tuple[str, Any]] = []

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop(0).wait()

    def Export(self, request: Any, context: Any) -> Any:
        """Takes a batch."""
        for resource in request.resource_spans:
            service = self.attributes(resource.resource)["service.name"].removeprefix("weft-")
            self._taken += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()

    def spans(self, service: str, name: str = "") -> list[Any]:
        """Those of a service so far, by when they began."""
        found = [span for owner, span in self._taken if owner == service and name in ("", span.name)]
        return sorted(found, key=lambda span: int(span.start_time_unix_nano))

    def span(self, service: str, name: str) -> Any:
        """The only one of that name."""
        (found,) = self.spans(service, name)
        return found

    def services(self, trace_id: bytes) -> set[str]:
        """Who has a part in a trace."""
        return {owner for owner, span in self._taken if span.trace_id == trace_id}

    @staticmethod
    def attributes(holder: Any) -> dict[str, Any]:
        """Of a span or a resource."""
        return {pair.key: _value(pair.value) for pair in holder.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

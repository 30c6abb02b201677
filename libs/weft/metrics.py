"""Every metric of the mesh by name, in one place, so that names and labels agree over the processes.

A process uses those that fit its role; each has its own registry and exposes it on its own private port.
Labels never carry users, sessions, request ids or a client's own strings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, product
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from weft.config import CannotListen

REGISTRY = CollectorRegistry()
MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@cache
def labelled(metric: MetricT, *labels: str) -> MetricT:
    """Of these labels; the library looks for it under a lock, and writes each label anew."""
    return metric.labels(*labels)


def from_zero(metric: Counter | Histogram, *values: Iterable[str]) -> None:
    """Have its series from the process's start on, one for each choice of a value of every label. Of a series that
    begins with its first event no rate tells that one: there is nothing earlier to compare."""
    for labels in product(*values):
        metric.labels(*labels)


class LoopSeries:
    """Of a LoopHistogram, for one value of its label."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus reads them: they hold what lies below them too."""
        names = (*map(floatToGoString, self._bounds), "+Inf")
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


class LoopHistogram(Collector):
    """For what one thread alone observes, once a token or a request: a tenth of what the library's histogram takes."""

    def __init__(
        self, name: str, documentation: str, label: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._documentation = name, documentation
        self._labelnames = (label,)
        self._bounds = tuple(buckets)
        self._series: dict[str, LoopSeries] = {}
        registry.register(self)

    def of(self, value: str) -> LoopSeries:
        """Those of one value of the label; to be kept by who observes."""
        if value not in self._series:
            self._series[value] = LoopSeries(self._bounds)
        return self._series[value]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """All of them."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for value, series in list(self._series.items()):
            family.add_metric([value], series.buckets, series.sum)
        yield family


# gateway
# a model is one that is served, or empty where it was not clear which
REQUESTS = Counter("weft_requests", "Requests by endpoint and end", ["endpoint", "outcome", "model"], registry=REGISTRY)
IN_FLIGHT = Gauge("weft_requests_in_flight", "Requests being served", registry=REGISTRY)
PROMPT_TOKENS = Counter("weft_prompt_tokens", "Prompt tokens of answers that began", ["model"], registry=REGISTRY)
CACHED_TOKENS = Counter("weft_cached_prompt_tokens", "Prompt tokens served from a cache", ["model"], registry=REGISTRY)
COMPLETION_TOKENS = Counter("weft_completion_tokens", "Tokens sent to clients", ["model"], registry=REGISTRY)
TTFT = LoopHistogram(
    "weft_time_to_first_token_seconds", "Received to first token", "model", buckets=LATENCY_BUCKETS, registry=REGISTRY
)
ITL = LoopHistogram(
    "weft_inter_token_latency_seconds", "Between two tokens", "model", buckets=LATENCY_BUCKETS, registry=REGISTRY
)
E2E = LoopHistogram(
    "weft_request_duration_seconds",
    "Received to end, of those that finished",
    "model",
    buckets=LATENCY_BUCKETS,
    registry=REGISTRY,
)
SEQUENCE_MIGRATIONS = Counter(
    "weft_sequence_migrations", "Sequences taken to another worker: lost, full, failed", ["cause"], registry=REGISTRY
)

# scheduler; gateways count a full fleet's refusals that they know of in PLACEMENTS
WORKERS = Gauge("weft_workers", "Live workers", ["role"], registry=REGISTRY)
READY_WORKERS = Gauge(
    "weft_ready_workers", "Workers that take requests, by what they can do", ["model", "role"], registry=REGISTRY
)
BOOKED_TOKENS = Gauge("weft_booked_tokens", "Tokens booked on workers", ["role"], registry=REGISTRY)
BOOKED_REQUESTS = Gauge("weft_booked_requests", "Requests booked on workers", registry=REGISTRY)
ROLE_CHANGE_TIMEOUTS = Counter(
    "weft_role_change_timeouts", "Roles that workers were asked for and did not play", registry=REGISTRY
)
WAITING_REQUESTS = Gauge("weft_requests_waiting", "Requests that wait for room", registry=REGISTRY)
OVER_SLO = Counter(
    "weft_requests_over_slo", "Requests that came when the expected wait or ITL was over target", registry=REGISTRY
)
KVSTORE_LOCATES = Counter(
    "weft_kvstore_locates", "Questions to kvstore, by what came of them", ["outcome"], registry=REGISTRY
)
PLACEMENTS = Counter("weft_placements", "Placements by reason or refusal", ["outcome"], registry=REGISTRY)

# every service, for the stages of weft.request_stage that it sees
STAGE_SECONDS = Histogram(
    "weft_request_stage_seconds",
    "Time that requests spent in a stage of their life",
    ["stage"],
    buckets=LATENCY_BUCKETS,
    registry=REGISTRY,
)

# every process; the second of gateway, scheduler and workers
ANONYMOUS_BYTES = Gauge("weft_anonymous_memory_bytes", "Anonymous memory of this process", registry=REGISTRY)
STALLED_SECONDS = Counter(
    "weft_process_stalled_seconds", "Time in which this process was stopped or got no processor time", registry=REGISTRY
)

# workers
STEPS = Counter("weft_engine_steps", "Engine steps", registry=REGISTRY)
STEP_SECONDS = Histogram(
    "weft_engine_step_seconds", "Duration of an engine step", buckets=LATENCY_BUCKETS, registry=REGISTRY
)
ENGINE_TOKENS = Counter("weft_engine_tokens", "Tokens by kind: prompt, generated", ["kind"], registry=REGISTRY)
SEQUENCES = Gauge("weft_sequences", "Sequences by state", ["state"], registry=REGISTRY)
BLOCKS = Gauge("weft_kv_blocks", "Blocks by state", ["state"], registry=REGISTRY)
PREFIX_QUERIES = Counter("weft_prefix_cache_query_tokens", "Prompt tokens looked up", registry=REGISTRY)
PREFIX_HITS = Counter(
    "weft_prefix_cache_hit_tokens", "Prompt tokens found, by tier: pool, dram, nvme", ["tier"], registry=REGISTRY
)
TRANSFER_BYTES = Counter(
    "weft_kv_transfer_bytes", "Bytes of blocks pulled from prefill", ["transport"], registry=REGISTRY
)
TRANSFER_SECONDS = Histogram(
    "weft_kv_transfer_seconds",
    "Duration of a pull",
    ["transport"],
    buckets=LATENCY_BUCKETS,
    registry=REGISTRY,
)
TRANSFER_FAILURES = Counter(
    "weft_kv_transfer_failures", "Hand-offs thrown away, by reason", ["reason"], registry=REGISTRY
)
OVERDUE_BLOCKS = Gauge(
    "weft_kv_overdue_blocks", "Quarantined blocks whose pull should have ended long ago", registry=REGISTRY
)
LEASES = Counter(
    "weft_kv_leases", "Leases by end: returned, cancelled, expired, broken, stalled", ["end"], registry=REGISTRY
)
EXPOSED_SECONDS = Histogram(
    "weft_kv_exposed_transfer_seconds",
    "From the last chunk's announcement to the last block checked: transfer that computing did not hide",
    buckets=LATENCY_BUCKETS,
    registry=REGISTRY,
)
LOCAL_PREFILL_PENDING_TOKENS = Gauge(
    "weft_local_prefill_pending_tokens",
    "Prompt tokens that decode computes now, as a hand-off failed",
    registry=REGISTRY,
)
STORE_BLOCKS = Counter(
    "weft_kv_store_blocks", "Blocks by outcome: put, got, failed, skipped", ["outcome"], registry=REGISTRY
)
TIER_FETCH_BYTES = Counter(
    "weft_kv_tier_fetch_bytes", "Bytes of blocks fetched from a tier", ["tier"], registry=REGISTRY
)
TIER_FETCH_SECONDS = Histogram(
    "weft_kv_tier_fetch_seconds",
    "Duration of one batch fetched from a tier",
    ["tier"],
    buckets=LATENCY_BUCKETS,
    registry=REGISTRY,
)
TIER_DECISIONS = Counter(
    "weft_kv_tier_decisions",
    "Blocks found in the store, by what was estimated to be quicker: fetch, compute",
    ["tier", "decision"],
    registry=REGISTRY,
)

# kvstore
TIER_BLOCKS = Gauge("weft_kv_tier_blocks", "Blocks in a tier, as far as kvstore knows", ["tier"], registry=REGISTRY)
TIER_BYTES_USED = Gauge("weft_kv_tier_used_bytes", "Bytes that a tier takes", ["tier"], registry=REGISTRY)
TIER_MOVES = Counter(
    "weft_kv_tier_moves", "Blocks moved: spilled to disk, loaded from it, lost on the way", ["move"], registry=REGISTRY
)
TIER_EVICTIONS = Counter(
    "weft_kv_tier_evictions",
    "Blocks dropped, by reason: room, expired, quota, damaged, replaced, gone",
    ["tier", "reason"],
    registry=REGISTRY,
)
DISK_FAILURES = Counter(
    "weft_kv_disk_failures",
    "Failures of the disk tier: open (served without it), scan (a segment that cannot be read at the start), write",
    ["what"],
    registry=REGISTRY,
)
INDEX_BLOCKS = Gauge("weft_kv_index_blocks", "Blocks in the index of workers' pools", registry=REGISTRY)
INDEX_RESYNCS = Counter("weft_kv_index_resyncs", "Workers told to begin anew with a snapshot", registry=REGISTRY)


def _anonymous_bytes() -> float:
    """0 where there is no Linux."""
    try:
        with open("/proc/self/status") as status:
            return next((1024.0 * int(line.split()[1]) for line in status if line.startswith("RssAnon:")), 0.0)
    except OSError:
        return 0.0


ANONYMOUS_BYTES.set_function(_anonymous_bytes)


def expose(host: str, port: int) -> int:
    """Serve /metrics from a thread of its own; returns the port (0 asks for a free one). Raises CannotListen."""
    try:
        server, _ = start_http_server(port, host, registry=REGISTRY)
    except (OSError, UnicodeError) as error:  # the latter of what cannot be a name
        why = getattr(error, "strerror", None) or error
        raise CannotListen(f"cannot listen on {host}:{port} for metrics (WEFT_METRICS_PORT): {why}") from error
    return int(server.server_port)

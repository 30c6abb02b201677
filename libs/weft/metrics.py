"""All metrics of the mesh by name, so that names and labels agree between processes.

Each process has its own registry, uses the metrics of its role and exposes them on a private port. Labels never carry
users, sessions, request ids or strings from clients.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from weft.errors import BindError

REGISTRY = CollectorRegistry()

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def init_series(metric: Counter | Histogram, *values: Iterable[str]) -> None:
    """Create a series for every combination of label values at process start.

    Prometheus computes no rate for the first event of a series that starts with it.
    """
    for labels in product(*values):
        metric.labels(*labels)


# gateway
# `model` is a served model, or empty if the request named none.
REQUESTS = Counter("weft_requests", "Requests by endpoint and end", ["endpoint", "outcome", "model"], registry=REGISTRY)
IN_FLIGHT = Gauge("weft_requests_in_flight", "Requests being served", registry=REGISTRY)
PROMPT_TOKENS = Counter("weft_prompt_tokens", "Prompt tokens of answers that began", ["model"], registry=REGISTRY)
CACHED_TOKENS = Counter("weft_cached_prompt_tokens", "Prompt tokens served from a cache", ["model"], registry=REGISTRY)
COMPLETION_TOKENS = Counter("weft_completion_tokens", "Tokens sent to clients", ["model"], registry=REGISTRY)
TTFT = Histogram(
    "weft_time_to_first_token_seconds", "Received to first token", ["model"], buckets=LATENCY_BUCKETS, registry=REGISTRY
)
ITL = Histogram(
    "weft_inter_token_latency_seconds", "Between two tokens", ["model"], buckets=LATENCY_BUCKETS, registry=REGISTRY
)
E2E = Histogram(
    "weft_request_duration_seconds",
    "Received to end, of those that finished",
    ["model"],
    buckets=LATENCY_BUCKETS,
    registry=REGISTRY,
)
SEQUENCE_MIGRATIONS = Counter(
    "weft_sequence_migrations", "Sequences taken to another worker: lost, full, failed", ["cause"], registry=REGISTRY
)

# Scheduler. Gateways also count rejections from their own cache in ROUTES.
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

# Every service, for the stages of weft.request that it sees.
STAGE_SECONDS = Histogram(
    "weft_request_stage_seconds",
    "Time that requests spent in a stage of their life",
    ["stage"],
    buckets=LATENCY_BUCKETS,
    registry=REGISTRY,
)

# Every process. STALLED_SECONDS: gateway, scheduler and workers only.
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
GROUP_RANKS = Gauge("weft_group_ranks", "Processes that compute the model together", registry=REGISTRY)
GROUP_FRAME_BYTES = Counter("weft_group_frame_bytes", "Bytes of frames sent to each of them", registry=REGISTRY)
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
OVERDUE_BLOCKS = Gauge("weft_kv_overdue_blocks", "Quarantined blocks of overdue pulls", registry=REGISTRY)
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
    "Prompt tokens that decode computes now, after a KV transfer failed",
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
INDEX_RESYNCS = Counter("weft_kv_index_resyncs", "Workers asked for a new snapshot", registry=REGISTRY)


def _anonymous_bytes() -> float:
    """Return RssAnon of this process; 0 without /proc."""
    try:
        with open("/proc/self/status") as status:
            return next((1024.0 * int(line.split()[1]) for line in status if line.startswith("RssAnon:")), 0.0)
    except OSError:
        return 0.0


ANONYMOUS_BYTES.set_function(_anonymous_bytes)


def expose(host: str, port: int) -> int:
    """Serve /metrics from a thread and return the port (0 picks a free one). Raises BindError."""
    try:
        server, _ = start_http_server(port, host, registry=REGISTRY)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host cannot be a name.
        why = getattr(error, "strerror", None) or error
        raise BindError(f"cannot listen on {host}:{port} for metrics (WEFT_METRICS_PORT): {why}") from error
    return int(server.server_port)

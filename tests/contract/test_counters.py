"""What a service counts is there at 0 before it happens: of a series that begins with its first event no rate tells
that one. What is counted by model or transport is there as soon as a service has been told of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SERIES = """
import importlib, json, sys
importlib.import_module(f"weft_services.{sys.argv[1]}.__main__")
from weft.metrics import REGISTRY
found = [each for family in REGISTRY.collect() for each in family.samples if each.name.endswith("_total")]
json.dump([[each.name, each.value, *each.labels.values()] for each in found if each.labels], sys.stdout)
"""
SOURCES = {"grammar", "prediction", "copy", "head"}
WORKERS = {
    "weft_spec_drafts_total": SOURCES,
    "weft_spec_draft_tokens_total": SOURCES,
    "weft_spec_accepted_tokens_total": SOURCES,
    "weft_spec_off_seconds_total": {"cost", "loss", "sample"},
    "weft_engine_tokens_total": {"prompt", "generated"},
    "weft_prefix_cache_hit_tokens_total": {"pool", "dram", "nvme"},
    "weft_kv_store_blocks_total": {"put", "got", "failed", "skipped"},
    "weft_kv_tier_fetch_bytes_total": {"dram", "nvme"},
    "weft_kv_tier_decisions_total": {"dram fetch", "dram compute", "nvme fetch", "nvme compute"},
}
DRAM, NVME = {"dram room", "dram expired", "dram quota", "dram gone"}, {"nvme room", "nvme expired", "nvme quota"}
REFUSED = {"late", "overloaded", "unavailable", "unknown_model", "invalid", "cancelled", "failed"}
COUNTED = {
    "gateway": {"weft_sequence_migrations_total": {"lost", "full", "failed"}, "weft_placements_total": {"overloaded"}},
    "scheduler": {
        "weft_placements_total": {"session", "load", *REFUSED},
        "weft_kvstore_locates_total": {"answered", "late", "failed"},
    },
    "prefill": WORKERS | {"weft_kv_leases_total": {"returned", "cancelled", "expired", "broken", "stalled"}},
    "decode": WORKERS,
    "kvstore": {
        "weft_kv_tier_moves_total": {"spilled", "promoted", "lost"},
        "weft_kv_tier_evictions_total": {*DRAM, *NVME, "nvme damaged", "nvme replaced"},
        "weft_kv_disk_failures_total": {"open", "scan", "write"},
    },
}


@pytest.mark.parametrize("service", COUNTED)
def test_a_service_counts_from_zero_on(service: str) -> None:
    run = subprocess.run([sys.executable, "-c", SERIES, service], capture_output=True, text=True, check=True)
    found: dict[str, set[str]] = {}
    for name, value, *labels in json.loads(run.stdout):
        assert value == 0
        found.setdefault(name, set()).add(" ".join(labels))
    assert found == COUNTED[service]

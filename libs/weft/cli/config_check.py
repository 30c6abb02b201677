"""Checks the settings of each process of a mesh with that service's own Config class, before any process starts."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from weft.api_keys import VALKEY_SCHEMES, BadKeys
from weft.cli.child import ChildSpec
from weft.cli.key_store import read_keys
from weft.config import read_config
from weft.errors import ConfigError

# Not the scheduler: its Config takes ten times as long to import as the others together, and it starts first.
CLASSES = {
    "weft_services.kvstore": ("weft_services.kvstore.config", "KvStoreConfig"),
    "weft_services.weights": ("weft_services.weights.config", "WeightsConfig"),
    "weft_services.worker": ("weft.worker.config", "WorkerConfig"),
    "weft_services.gateway": ("weft_services.gateway.config", "GatewayConfig"),
}


def check_settings(specs: Iterable[ChildSpec]) -> None:
    """Raise ConfigError naming the variable, or BadCheckpoint for an unknown tool format."""
    for spec in specs:
        module = spec.command[-1]
        if module in CLASSES:
            config = read_config(_load(*CLASSES[module]), spec.environ)
            if module == "weft_services.gateway":
                _check_gateway(config)


def _check_gateway(gateway: Any) -> None:
    """Check tool formats, certificate and key file, as the gateway does at its start. Keys in Valkey are not read."""
    if gateway.tool_format != "auto":
        choose = _load("weft_services.gateway.text.tool_formats", "choose_format")
        for chosen in gateway.tool_formats.values():
            choose(chosen, "")
    if gateway.tls_cert is not None:
        _load("weft_services.gateway.front.certificate", "Certificate")(gateway.tls_cert, gateway.tls_key)
    if gateway.keys and not gateway.keys.startswith(VALKEY_SCHEMES):
        try:
            read_keys(gateway.keys)
        except (BadKeys, OSError) as error:
            raise ConfigError(f"WEFT_KEYS: {error}") from error


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)

"""What a worker's settings come to."""

from __future__ import annotations

import pytest

from weft.config import read_config
from weft.errors import ConfigError
from weft.worker.config import WorkerConfig


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WEFT_LEASE_SECONDS", "0.5"),
        ("WEFT_LEASE_SECONDS", "nan"),
        ("WEFT_LEASE_SECONDS", "inf"),
        ("WEFT_LEASE_SECONDS", "5000000"),  # milliseconds have 32 bits on the wire
        ("WEFT_GRACE_SECONDS", "-1"),
        ("WEFT_GRACE_SECONDS", "nan"),
        ("WEFT_GRACE_SECONDS", "inf"),
    ],
)
def test_seconds_that_cannot_be_are_refused_by_name(variable: str, value: str) -> None:
    needed = {
        "WEFT_WORKER_ID": "decode-0",
        "WEFT_SCHEDULER_ADDR": "127.0.0.1:1",
        "WEFT_WEIGHTS_ADDR": "127.0.0.1:2",
        "WEFT_MODEL_NAME": "weft-nano",
    }
    read_config(WorkerConfig, needed)
    with pytest.raises(ConfigError, match=f"{variable}='?{value}'?: expected"):
        read_config(WorkerConfig, {**needed, variable: value})


@pytest.mark.parametrize(
    ("host", "advertised", "expected"),
    [
        ("127.0.0.1", "", "127.0.0.1:7004"),
        ("0.0.0.0", "decode-1", "decode-1:7004"),
        ("::1", "", "[::1]:7004"),
        ("::", "fd00::12", "[fd00::12]:7004"),
        ("::", "[fd00::12]", "[fd00::12]:7004"),
    ],
)
def test_peers_are_told_an_address_that_they_can_call(host: str, advertised: str, expected: str) -> None:
    config = WorkerConfig(
        worker_id="decode-0",
        scheduler_addr="a:1",
        weights_addr="b:2",
        model_name="weft-nano",
        host=host,
        advertise_host=advertised,
    )
    assert config.peer_address("7004") == expected

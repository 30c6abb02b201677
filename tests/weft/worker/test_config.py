"""What a worker's settings come to."""

from __future__ import annotations

import pytest

from weft.worker.config import Checksums, MooncakeProtocol, WorkerConfig


@pytest.mark.parametrize(
    ("choice", "transport", "protocol", "has_checksums"),
    [
        (Checksums.AUTO, "mooncake", MooncakeProtocol.TCP, True),
        (Checksums.AUTO, "mooncake_rdma", MooncakeProtocol.RDMA, False),
        # blocks go by TCP, whatever Mooncake would have spoken
        (Checksums.AUTO, "grpc", MooncakeProtocol.RDMA, True),
        (Checksums.ON, "mooncake_rdma", MooncakeProtocol.RDMA, True),
        (Checksums.OFF, "mooncake", MooncakeProtocol.TCP, False),
        (Checksums.OFF, "grpc", MooncakeProtocol.TCP, False),
    ],
)
def test_blocks_have_checksums_where_the_network_does_not_check_for_itself(
    choice: Checksums, transport: str, protocol: MooncakeProtocol, has_checksums: bool
) -> None:
    config = WorkerConfig(
        "decode-0",
        scheduler_addr="127.0.0.1:1",
        weights_addr="127.0.0.1:2",
        model_name="weft-nano",
        mooncake_protocol=protocol,
        kv_checksums=choice,
    )
    assert config.has_checksums(transport) is has_checksums

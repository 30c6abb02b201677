"""What of a machine each worker of a mesh gets, and where its parts listen."""

from __future__ import annotations

import dataclasses
import socket

import pytest
from tests.weft.cli.test_mesh import AT, ONE

from weft.cli import layout as module
from weft.cli.layout import (
    INTERNAL_PORTS,
    MeshOptions,
    PortTaken,
    check_listen_address,
    check_port,
    free_ports,
    pick_addresses,
    reachable,
)
from weft.cli.mesh import mesh_specs


@pytest.mark.parametrize(("cores", "workers", "threads"), [(2, 2, 1), (1, 2, 1), (8, 2, 4), (16, 3, 5)])
def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int, workers: int, threads: int) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: list(range(cores)))
    assert MeshOptions(ONE, num_prefill=1, num_decode=workers - 1).worker_threads == threads
    assert MeshOptions(ONE, threads=3).worker_threads == 3


def test_workers_share_what_a_container_is_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: list(range(64)))
    monkeypatch.setattr(module, "granted_cores", lambda: 8)
    assert MeshOptions(ONE, num_prefill=1, num_decode=1).worker_threads == 4
    assert MeshOptions(ONE, num_prefill=1, num_decode=1, threads=16).worker_threads == 16


@pytest.mark.parametrize(
    ("cores", "threads", "expected"),
    [
        ([0, 1, 2, 3, 4, 5], 0, ["0,1", "2,3", "4,5"]),
        ([4, 5, 6, 7, 9, 11, 12], 0, ["4,5", "6,7", "9,11"]),
        ([0, 1, 2, 3, 4, 5], 1, ["0,1", "2,3", "4,5"]),
        ([0, 1, 2, 3, 4, 5], 3, [""] * 3),
        ([0, 1, 2, 3], 0, [""] * 3),
    ],
)
def test_worker_has_own_cores_if_two_are_left_for_each(
    monkeypatch: pytest.MonkeyPatch, cores: list[int], threads: int, expected: list[str]
) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: cores)
    workers = [spec for spec in mesh_specs(MeshOptions(ONE, num_decode=2, threads=threads), AT) if "-" in spec.name]
    assert [spec.environ["WEFT_CPUS"] for spec in workers] == expected


def test_internal_ports_are_free_and_below_ephemeral_range() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert set(ports) <= set(INTERNAL_PORTS)
    for port in ports:
        check_port("127.0.0.1", port, "--port")


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortTaken, match="--port"):
            check_port("127.0.0.1", taken.getsockname()[1], "--port")


@pytest.mark.parametrize("host", ["192.0.2.1", "[::1]"])
def test_foreign_host_is_reported_by_the_host_flag(host: str) -> None:
    with pytest.raises(PortTaken, match="choose another with --host"):
        check_port(host, 8000, "--port")
    with pytest.raises(PortTaken, match="choose another with --weights-listen"):
        check_listen_address("192.0.2.1:8000", "--weights-listen")


def test_the_port_of_the_lender_of_weights_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, lender = free_ports(3)
    options = MeshOptions(ONE, port=first, grpc_port=second, weights_listen=f"127.0.0.1:{lender}")
    with monkeypatch.context() as patch:
        drawn: list[object] = []

        def draw(count: int, spoken_for: object) -> list[int]:
            drawn.append(spoken_for)
            return free_ports(count)

        patch.setattr(module, "free_ports", draw)
        assert pick_addresses(options).weights == f"127.0.0.1:{lender}"
    assert drawn == [{first: "--port", second: "--grpc-port", lender: "--weights-listen"}]
    for port, flag in ((first, "--port"), (second, "--grpc-port")):
        with pytest.raises(PortTaken, match=f"{flag} and --weights-listen are both {port}"):
            pick_addresses(dataclasses.replace(options, weights_listen=f"127.0.0.1:{port}"))
    with pytest.raises(PortTaken, match=f"--port and --grpc-port are both {first}"):
        pick_addresses(dataclasses.replace(options, grpc_port=first))


def test_addresses_of_ipv6_can_be_listened_on_and_called() -> None:
    try:
        taken = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this system has no IPv6")
    port = taken.getsockname()[1]
    with taken, pytest.raises(PortTaken, match="--port"):
        check_port("::1", port, "--port")
    check_port("::1", port, "--port")
    assert check_listen_address(f"[::1]:{port}", "--metrics") == f"[::1]:{port}"
    assert (reachable("::"), reachable("::1"), reachable("0.0.0.0")) == ("[::1]", "[::1]", "127.0.0.1")

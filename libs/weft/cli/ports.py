"""Ports and addresses on this machine: which are free, which can be bound, and how to reach a listener."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection

from weft.addresses import MAX_PORT

LOOPBACK = "127.0.0.1"
# below the range that the kernel hands out to connections, so that a restarted child finds its port free;
# above the one that Mooncake picks from
INTERNAL_PORTS = range(18_000, 32_000)


class PortTaken(Exception):
    """A port that the user asked for is in use."""


def check_port(host: str, port: int, flag: str, host_flag: str = "--host") -> None:
    """Raise PortTaken, naming the flag to change, unless the port can be bound."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                flag = host_flag  # the host is unknown or not of this machine: no other port would help
            raise PortTaken(f"cannot listen on {host}:{port} ({reason}); choose another with {flag}") from error


def free_ports(count: int, spoken_for: Collection[int] = ()) -> list[int]:
    """Return `count` free loopback ports from INTERNAL_PORTS, none of them in `spoken_for`."""
    held: list[socket.socket] = []
    try:
        for port in random.sample(INTERNAL_PORTS, len(INTERNAL_PORTS)):
            if len(held) == count:
                break
            if port in spoken_for:
                continue
            probe = socket.socket()
            held.append(probe)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                held.pop().close()
        return [probe.getsockname()[1] for probe in held]
    finally:
        for probe in held:
            probe.close()


def check_listen_address(listen: str, flag: str) -> str:
    """Return the address that reaches a listener at HOST:PORT from this machine. Raises PortTaken."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise PortTaken(f"{flag} {listen}: expected HOST:PORT with a port of 1 to {MAX_PORT}")
    bare = bare_host(host)
    check_port(bare, int(port), flag, host_flag=flag)
    return f"{reachable(bare)}:{port}"


def bare_host(host: str) -> str:
    """Remove the brackets of an IPv6 address."""
    return host.removeprefix("[").removesuffix("]")


def reachable(host: str) -> str:
    """The address to call on this machine for a listener bound to host."""
    if host in ("0.0.0.0", ""):
        return LOOPBACK
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host

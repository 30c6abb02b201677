"""Addresses on this machine: what can be listened on, what nobody listens on yet, and how a listener is called."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection

from weft.config import MAX_PORT

LOOPBACK = "127.0.0.1"
# below the range that the kernel hands out to connections, so that a restarted child finds its port free;
# above the one that Mooncake picks from
INTERNAL_PORTS = range(18_000, 32_000)


class PortTaken(Exception):
    """A port that the user asked for is in use."""


def check_port(host: str, port: int, flag: str, host_flag: str = "--host") -> None:
    """Raises PortTaken, saying which flag chooses another, unless the port can be listened on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                flag = host_flag  # it is no host's, or another one's: no port helps
            raise PortTaken(f"cannot listen on {host}:{port} ({reason}); choose another with {flag}") from error


def free_ports(count: int, spoken_for: Collection[int] = ()) -> list[int]:
    """Different loopback ports that nobody listens on, from INTERNAL_PORTS; none that somebody is about to."""
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
    """Where a listener at HOST:PORT is called on this machine. Raises PortTaken when it cannot be."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise PortTaken(f"{flag} {listen}: expected HOST:PORT, and a port of 1 to {MAX_PORT}")
    bare = bare_host(host)
    check_port(bare, int(port), flag, host_flag=flag)
    return f"{reachable(bare)}:{port}"


def bare_host(host: str) -> str:
    """An IPv6 address without the brackets that it has before a port."""
    return host.removeprefix("[").removesuffix("]")


def reachable(host: str) -> str:
    """The address to call on this machine for a listener bound to host."""
    if host in ("0.0.0.0", ""):
        return LOOPBACK
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host

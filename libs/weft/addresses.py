"""Checks of hosts, ports and URLs that users set. Imports no library, so that the command line starts fast."""

from __future__ import annotations

import ipaddress
import re

from weft.errors import ConfigError

# Hosts to listen on; peers cannot call them.
WILDCARD_HOSTS = ("0.0.0.0", "::")
MAX_PORT = 65_535


def check_addresses(name: str, addresses: str) -> None:
    """Check the ports of comma-separated peer addresses. Raises ConfigError.

    gRPC would use the lower 16 bits of a larger number and call another service there.
    """
    for address in addresses.split(","):
        _, colon, port = address.strip().rpartition(":")
        if colon and port.isdecimal() and not 0 < float(port) <= MAX_PORT:
            raise ConfigError(f"{name}={address.strip()!r}: expected a port of 1 to {MAX_PORT}")


def redact_credentials(url: str) -> str:
    """Replace the credentials of a URL by ***, also those in its query, which Valkey clients accept."""
    return re.sub(r"//.*@", "//***@", re.sub(r"([?&](?:username|password)=)[^&]*", r"\1***", url))


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`. Any name other than localhost counts as remote.

    IPv6 addresses may stand in brackets, as compose requires before a port.
    """
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"

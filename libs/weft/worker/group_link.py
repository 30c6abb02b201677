"""Messages between the leader of a group and one follower: bytes with their length before them, over a socket pair.

Frames go one way. A second socket carries a sign of life a second from the follower; when either process ends, the
system closes both, which is the fastest notice of its death.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from weft.errors import PeerLost

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 256 << 20
# A follower that takes no bytes for so long does not run.
SEND_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class MessageSocket:
    """One end of a stream socket that carries whole messages."""

    stream: socket.socket

    def send(self, data: bytes) -> None:
        """Send a message. Raises PeerLost if the other end is gone or takes nothing."""
        try:
            self.stream.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise PeerLost(f"cannot send {len(data)} bytes to a rank: {error or 'it does not read'}") from error

    def receive(self) -> bytes | None:
        """Wait for a message; None if the other end has closed. Raises PeerLost for one that is cut or too long."""
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise PeerLost(f"a rank announced a message of {length} bytes")
        body = self._exactly(length)
        if body is None:
            raise PeerLost("a rank closed the connection inside a message")
        return body

    def _exactly(self, count: int) -> bytes | None:
        """Return `count` bytes, or None if the other end closed before them."""
        data = bytearray()
        while len(data) < count:
            try:
                piece = self.stream.recv(count - len(data))
            except OSError as error:
                raise PeerLost(f"cannot receive from a rank: {error}") from error
            if not piece:
                if data:
                    raise PeerLost("a rank closed the connection inside a message")
                return None
            data += piece
        return bytes(data)

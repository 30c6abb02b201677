"""Answers to HTTP/1.0, which knows no chunks: uvicorn makes them of all that has no length, whoever asks. Here they are
taken apart again, and the end of the connection is that of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

HEAD, CHUNKED = b"HTTP/1.1 ", b"transfer-encoding: chunked\r\n"
Bytes = bytes | bytearray | memoryview


class Unframed(asyncio.Transport):
    """In place of the transport of one exchange, which writes a head and then, at most, one chunk and the end."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._is_chunked = False

    def write(self, data: Bytes) -> None:
        """The same without what is there for chunks."""
        data = bytes(data)
        if self._is_chunked:
            size, _, rest = data.partition(b"\r\n")
            data = rest[: int(size or b"0", 16)]
        elif data.startswith(HEAD) and CHUNKED in data:
            self._is_chunked = True
            data = data.replace(CHUNKED, b"", 1)
        self._transport.write(data)

    def writelines(self, list_of_data: Iterable[Bytes]) -> None:
        """One after another."""
        for data in list_of_data:
            self.write(data)

    def close(self) -> None:
        """What was written is written."""
        self._transport.close()

    def is_closing(self) -> bool:
        """As the transport says."""
        return self._transport.is_closing()

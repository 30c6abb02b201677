"""The head of an answer goes out with what follows it in the same turn of the loop: one call of the system's and one
packet, where uvicorn makes two, and the client is woken once."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Cork(asyncio.Transport):
    """In place of the transport of one exchange. Where nothing follows, the head is held no longer than that turn."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._cycle = cycle
        self._transport = cycle.transport
        self._loop = loop
        self._head: bytes | bytearray | memoryview | None = None
        self._is_out = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """What comes before the head, as a word to go on with a body does, is no part of the answer."""
        if self._is_out or not self._cycle.response_started:
            self._transport.write(data)
        elif self._head is None:
            self._head = data
            self._loop.call_soon(self._let_go)
        else:
            self._is_out, head, self._head = True, self._head, None
            self._transport.writelines((head, data))

    def close(self) -> None:
        """After what is held."""
        self._let_go()
        self._transport.close()

    def is_closing(self) -> bool:
        """As the transport says."""
        return self._transport.is_closing()

    def _let_go(self) -> None:
        if self._head is not None:
            self._is_out, head, self._head = True, self._head, None
            if not self._transport.is_closing():
                self._transport.write(head)

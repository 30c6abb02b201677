"""Stores answers of the Responses API in Valkey, shared by all gateways, each readable by its owner alone.

A stored answer includes all items that led to it, so that continuing it takes one lookup. It expires, earlier if Valkey
runs full. A failed write is only logged: the answer itself is valid.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import Any, Self

import orjson
from redis.asyncio import Redis

from weft.errors import PeerLost
from weft.rpc.valkey import Valkey
from weft_services.gateway.dialects.responses_requests import PreviousResponse

logger = logging.getLogger(__name__)
FOUND = "responses are stored again"
LOST = "responses are not stored"
# The longest time a client waits for its answer to be stored. A megabyte takes a few milliseconds.
DEADLINE_SECONDS = 0.5
# Few operations at a time, so that large ones meet the deadline; each waits up to QUEUE_SECONDS for its turn, so that
# one tenant's burst does not fail the others.
MAX_CONCURRENT, QUEUE_SECONDS = 4, 5.0
MAX_RECORD_BYTES = 16 * 1024 * 1024
# Allowed record size: data outside the prompt, such as thoughts, is charged to no limit but takes shared memory.
BASE_RECORD_BYTES, BYTES_PER_TOKEN = 64 * 1024, 64
TOKENS_PER_LOGPROB = 2
_NAME = re.compile(r"resp_[0-9a-f]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer with the items that led to it.

    `num_earlier_generated`: tokens generated for these items. Old thoughts are stored too, though most templates leave
    them out of prompts.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    num_earlier_generated: int = 0

    @property
    def earlier(self) -> PreviousResponse:
        """The state from which a request continues. Logprobs belong to the old answer alone."""
        items = (*self.items, *map(_without_logprobs, self.response["output"]))
        num_generated = self.num_earlier_generated + self.response["usage"]["output_tokens"]
        return PreviousResponse(self.response["id"], items, num_generated)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, the answer and earlier answers; each logprob entry counts as TOKENS_PER_LOGPROB."""
        # Logprobs are JSON already, so count positions times the alternatives that were requested.
        num_positions = sum(len(part["logprobs"]) for item in self.response["output"] for part in _parts(item))
        num_logprobs = num_positions * (1 + int(self.response["top_logprobs"]))
        num_own = int(self.response["usage"]["total_tokens"])
        return num_own + self.num_earlier_generated + TOKENS_PER_LOGPROB * num_logprobs

    @property
    def record(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def read(cls, record: bytes) -> Self:
        return cls(**orjson.loads(record))


class ResponseStore:
    """Reads and writes records in Valkey. `owner` is the digest of a tenant; no other tenant finds the record.

    Records may be large, so callers parse and serialize them outside the event loop.
    """

    def __init__(self, redis_url: str, seconds: float) -> None:
        self._valkey = Valkey(
            redis_url,
            FOUND,
            LOST,
            deadline_seconds=DEADLINE_SECONDS,
            turn_seconds=QUEUE_SECONDS,
            at_once=MAX_CONCURRENT,
        )
        self._milliseconds = math.ceil(seconds * 1000)

    async def load(self, owner: bytes, name: str) -> bytes | None:
        """Return the record, or None if it does not exist or has expired. Raises PeerLost."""
        if not _NAME.fullmatch(name):
            return None
        key = _key(owner, name)

        async def read(redis: Redis) -> list[Any]:
            return list(await redis.mget(key))

        if (found := await self._valkey.call(read)) is None:
            raise PeerLost("stored responses cannot be read now")
        record: bytes | None = found[0]
        return record

    async def store(self, owner: bytes, name: str, record: bytes, num_tokens: int) -> None:
        """Store a record until it expires. `num_tokens`: the tokens of its answer and prompt, which bound its size."""
        if len(record) > min(MAX_RECORD_BYTES, BASE_RECORD_BYTES + BYTES_PER_TOKEN * num_tokens):
            logger.warning("response not stored, too large id=%s bytes=%d", name, len(record))
            return
        key, milliseconds = _key(owner, name), self._milliseconds

        async def write(redis: Redis) -> bool:
            return bool(await redis.set(key, record, px=milliseconds))

        await self._valkey.call(write)

    async def delete(self, owner: bytes, name: str) -> bool:
        """Delete a record; return whether it existed. Raises PeerLost."""
        if not _NAME.fullmatch(name):
            return False
        key = _key(owner, name)

        async def delete(redis: Redis) -> int:
            return int(await redis.delete(key))

        if (count := await self._valkey.call(delete)) is None:
            raise PeerLost("stored responses cannot be deleted now")
        return count > 0

    async def close(self) -> None:
        await self._valkey.close()


def _key(owner: bytes, name: str) -> str:
    return f"weft:response:{owner.hex()}:{name}"


def _parts(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the text parts with their logprobs."""
    return item["content"] if item["type"] == "message" else []


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    parts = [{**part, "logprobs": []} for part in _parts(item)]
    return {**item, "content": parts} if parts else item

"""Answers of the Responses API that clients may come back to: in Valkey, for every gateway, each for its owner alone.

An answer is kept with all items that led to it, so that going on from it takes one look. It is there for a while, and
for less where Valkey runs full. What cannot be kept is only said in the log: the answer itself is right.
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
from weft_services.gateway.dialects.responses_requests import Earlier

logger = logging.getLogger(__name__)
FOUND = "answers are kept again"
LOST = "answers are not kept"
# a client waits so long at most for its answer to be kept; a megabyte takes some milliseconds
DEADLINE_SECONDS = 0.5
# few at a time, so that long ones keep to it, and this long for a turn: one tenant's many are no failure for all
AT_ONCE, TURN_SECONDS = 4, 5.0
MAX_RECORD_BYTES = 16 * 1024 * 1024
# what is no part of a prompt, such as thoughts, is charged to nobody, but takes room that is others' as well
USUAL_BYTES, BYTES_A_TOKEN = 64 * 1024, 64
TOKENS_A_LOGPROB = 2
_NAME = re.compile(r"resp_[0-9a-f]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer, the items that led to it, and how many tokens were generated for them: old thoughts are kept, though
    most templates leave them out of prompts."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    num_earlier_generated: int = 0

    @property
    def earlier(self) -> Earlier:
        """To go on from. Logprobs were of that answer alone."""
        items = (*self.items, *map(_without_logprobs, self.response["output"]))
        num_generated = self.num_earlier_generated + self.response["usage"]["output_tokens"]
        return Earlier(self.response["id"], items, num_generated)

    @property
    def num_tokens(self) -> int:
        """Of its prompt, of its text and of those before it. What it tells of tokens that might have stood there weighs
        as some."""
        # logprobs are JSON already, so that none can be looked into; each has as many beside it as were asked for
        num_positions = sum(len(part["logprobs"]) for item in self.response["output"] for part in _parts(item))
        num_logprobs = num_positions * (1 + int(self.response["top_logprobs"]))
        num_own = int(self.response["usage"]["total_tokens"])
        return num_own + self.num_earlier_generated + TOKENS_A_LOGPROB * num_logprobs

    @property
    def record(self) -> bytes:
        """As it is kept."""
        return orjson.dumps(self)

    @classmethod
    def read(cls, record: bytes) -> Self:
        """From its record."""
        return cls(**orjson.loads(record))


class KeptAnswers:
    """Their records, which may be long: who reads or writes one does so beside the loop. `owner` is the digest of a
    tenant; nobody finds what is another's."""

    def __init__(self, redis_url: str, seconds: float) -> None:
        self._valkey = Valkey(
            redis_url, FOUND, LOST, deadline_seconds=DEADLINE_SECONDS, turn_seconds=TURN_SECONDS, at_once=AT_ONCE
        )
        self._milliseconds = math.ceil(seconds * 1000)

    async def find(self, owner: bytes, name: str) -> bytes | None:
        """None: there is none, or no more. Raises PeerLost."""
        if not _NAME.fullmatch(name):
            return None
        key = _key(owner, name)

        async def read(redis: Redis) -> list[Any]:
            return list(await redis.mget(key))

        if (found := await self._valkey.call(read)) is None:
            raise PeerLost("kept answers cannot be read now")
        record: bytes | None = found[0]
        return record

    async def keep(self, owner: bytes, name: str, record: bytes, num_tokens: int) -> None:
        """For as long as answers are kept. `num_tokens`: its own."""
        if len(record) > min(MAX_RECORD_BYTES, USUAL_BYTES + BYTES_A_TOKEN * num_tokens):
            logger.warning("not kept: %s has %d bytes with all before it", name, len(record))
            return
        key, milliseconds = _key(owner, name), self._milliseconds

        async def write(redis: Redis) -> bool:
            return bool(await redis.set(key, record, px=milliseconds))

        await self._valkey.call(write)

    async def drop(self, owner: bytes, name: str) -> bool:
        """Was it there. Raises PeerLost."""
        if not _NAME.fullmatch(name):
            return False
        key = _key(owner, name)

        async def delete(redis: Redis) -> int:
            return int(await redis.delete(key))

        if (count := await self._valkey.call(delete)) is None:
            raise PeerLost("kept answers cannot be reached now")
        return count > 0

    async def close(self) -> None:
        """Close the connections."""
        await self._valkey.close()


def _key(owner: bytes, name: str) -> str:
    return f"weft:response:{owner.hex()}:{name}"


def _parts(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Texts with their logprobs."""
    return item["content"] if item["type"] == "message" else []


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    parts = [{**part, "logprobs": []} for part in _parts(item)]
    return {**item, "content": parts} if parts else item

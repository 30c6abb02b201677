"""A key that is revoked, or may do less than before, opens nothing any more: not even what it had opened already."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.services.gateway.conftest import MakeBench
from tests.services.gateway.test_page import events
from weft.keys import Key, digest_of, dump_keys, make_secret

SECRET = make_secret()
OPS, OTHER = Key("ops", digest_of(SECRET), operator=True), Key("other", digest_of(make_secret()))


@pytest.mark.parametrize("left", [[OTHER], [OTHER, Key("ops", OPS.digest)]], ids=["revoked", "no operator any more"])
async def test_the_fleets_events_end_with_the_key_that_they_are_told_to(
    bench: MakeBench, tmp_path: Path, left: list[Key]
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(dump_keys([OPS, OTHER]))
    async with bench(keys=str(path)) as b:
        asked = b.http.stream("GET", "/weft/fleet/events", headers={"x-api-key": SECRET})
        async with asked as response, asyncio.timeout(20):
            told = events(response)
            assert [(await anext(told))[0] for _ in range(3)] == ["hello", "fleet", "fleet"]
            path.write_text(dump_keys(left))
            while (event := await anext(told, None)) is not None and event[0] == "fleet":
                pass
            assert event is not None
            assert (event[0], event[1]["code"]) == ("error", "invalid_api_key")
            assert await anext(told, None) is None

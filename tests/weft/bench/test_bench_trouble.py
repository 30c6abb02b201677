"""`weft bench` where something goes wrong: a server that stands still, files that cannot be read or written."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.weft.cli.conftest import HELLO, HOLD, Gateway
from typer.testing import CliRunner

from weft.bench.load import NEVER_SENT, OUT_OF_TIME, Load, open_target
from weft.bench.workload import Job
from weft.cli.main import app

runner = CliRunner()
LINE = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'


def run(gateway: Gateway, *options: str) -> tuple[int, str]:
    result = runner.invoke(app, ["bench", "--chat", "--url", gateway.url, *options])
    return result.exit_code, result.output


def test_a_server_that_stands_still_costs_the_time_that_it_took_and_all_that_was_never_sent(
    gateway: Gateway, tmp_path: Path
) -> None:
    gateway.scripts = [*([list(HELLO)] * 4), [HOLD]]
    raw = tmp_path / "raw.json"
    options = ["--requests", "9", "--concurrency", "1", "--max-seconds", "1.5", "--raw", str(raw)]
    code, output = run(gateway, *options)
    gateway.released.set()
    assert code == 0, output
    assert "2 of 9 answered" in output
    assert "1 x out of time" in output
    assert "6 x never sent: out of time" in output
    figures = json.loads(raw.read_text())["figures"]
    assert figures["seconds"] >= 1.5, "not the time of the last good answer"
    assert figures["good_share"] == 2 / 9


@pytest.mark.parametrize("line", [b"{", b"\n", b"\x1f\x8b\x08 not text"])
def test_a_trace_is_read_to_its_end_before_anything_is_sent(gateway: Gateway, tmp_path: Path, line: bytes) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(LINE.encode() * 3 + line)
    code, output = run(gateway, "--requests", "0", "--trace", str(trace))
    assert code == 1
    assert f"{trace}, line 4" in output.replace("\n", "")
    assert gateway.asked == []


@pytest.mark.parametrize("option", ["--report", "--raw"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_sent(
    gateway: Gateway, tmp_path: Path, option: str
) -> None:
    code, output = run(gateway, option, str(tmp_path / "nowhere" / "file"))
    assert code == 1
    assert "No such file or directory" in output
    assert gateway.asked == []


def test_a_full_disk_is_told_in_one_line_and_costs_no_other_file(gateway: Gateway, tmp_path: Path) -> None:
    gateway.scripts = [list(HELLO) for _ in range(3)]
    report = tmp_path / "page.html"
    code, output = run(gateway, "--requests", "1", "--raw", "/dev/full", "--report", str(report))
    assert code == 1
    assert "1 of 1 answered" in output
    assert "weft bench: /dev/full: No space left on device" in output
    assert report.read_text().endswith("</html>")


def test_prompts_cannot_share_more_than_they_are_long(gateway: Gateway) -> None:
    code, output = run(gateway, "--shared-tokens", "256", "--prompt-tokens", "256")
    assert code == 2
    assert "--shared-tokens" in output


def test_a_trace_has_its_own_times(gateway: Gateway, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(LINE)
    code, output = run(gateway, "--rate", "3", "--trace", str(trace))
    assert code == 2
    assert "--rate" in output
    assert gateway.asked == []


def test_what_a_chat_template_adds_does_not_shorten_prompts(gateway: Gateway, tmp_path: Path) -> None:
    def answer(prompt_tokens: int) -> list[object]:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1}
        return [HELLO[1], {"choices": [], "usage": usage}, "[DONE]"]

    # words of 4.5 characters are tokens, and 36 more are the template's
    gateway.scripts = [answer(236), answer(76), list(HELLO)]
    code, output = run(gateway, "--requests", "1", "--prompt-tokens", "1000")
    assert code == 0, output
    assert len(gateway.asked[-1][1]["messages"][0]["content"]) == pytest.approx(4500, rel=0.01)


def test_a_model_whose_first_token_is_no_text_can_be_measured(gateway: Gateway) -> None:
    silent = [{"choices": [{"delta": {}, "finish_reason": "length"}]}, HELLO[3], "[DONE]"]
    gateway.scripts = [silent, silent, silent]
    code, output = run(gateway, "--requests", "1")
    assert code == 0, output
    assert "1 of 1 answered" in output


def test_a_stream_that_breaks_off_is_no_answer(gateway: Gateway) -> None:
    gateway.scripts = [list(HELLO), list(HELLO), [HELLO[1], HELLO[1]], list(HELLO)]
    code, output = run(gateway, "--requests", "2", "--concurrency", "1")
    assert code == 0, output
    assert "1 of 2 answered" in output
    assert "1 x broken off" in output


def test_answers_that_are_shorter_than_asked_for_are_counted(gateway: Gateway) -> None:
    gateway.scripts = [list(HELLO) for _ in range(4)]
    assert "2 answers" in run(gateway, "--requests", "2", "--output-tokens", "9")[1]
    gateway.scripts = [list(HELLO) for _ in range(3)]
    assert "shorter than asked for" not in run(gateway, "--requests", "1", "--output-tokens", "3")[1]


async def test_in_an_open_loop_too_no_request_is_forgotten(gateway: Gateway) -> None:
    gateway.scripts = [list(HELLO), list(HELLO), [HOLD], list(HELLO)]
    target = await open_target(gateway.url, "tiny", "", is_chat=True)
    load = Load(target, iter([Job(at, (("x", 8),), 4) for at in (0.0, 0.3, 5.0, 9.0)]))
    try:
        records = await load.run(0, 1.0)
    finally:
        gateway.released.set()
        await target.client.aclose()
    assert [record.error for record in records] == [OUT_OF_TIME, "", NEVER_SENT, NEVER_SENT]
    assert all(record.ended >= 1.0 for record in records[2:])


def test_who_has_seen_enough_keeps_what_was_answered(gateway: Gateway) -> None:
    gateway.scripts = [*([list(HELLO)] * 4), [HOLD]]
    command = [sys.executable, "-m", "weft.cli.main", "bench", "--chat", "--url", gateway.url, "--concurrency", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        deadline = time.monotonic() + 30
        while len(gateway.asked) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        bench.send_signal(signal.SIGINT)
        output, said = bench.communicate(timeout=30)
        gateway.released.set()
    assert bench.returncode == 0, said
    assert "stopped; results so far" in said
    assert "2 of 2 answered" in output


def test_the_url_of_openais_clients_is_taken_too(gateway: Gateway) -> None:
    gateway.scripts = [list(HELLO) for _ in range(3)]
    result = runner.invoke(app, ["bench", "--chat", "--url", f"{gateway.url}/v1", "--requests", "1"])
    assert result.exit_code == 0, result.output
    assert {path for path, _, _ in gateway.asked} == {"/v1/chat/completions"}


def test_it_may_open_as_many_connections_as_the_system_lets_it(gateway: Gateway) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        gateway.scripts = [list(HELLO) for _ in range(3)]
        assert run(gateway, "--requests", "1")[0] == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_figure_that_there_is_not_is_null_in_the_file_which_stays_json(gateway: Gateway, tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    one_piece = [{"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}, "[DONE]"]
    gateway.scripts = [one_piece, one_piece]
    raw = tmp_path / "raw.json"
    code, output = run(gateway, "--requests", "1", "--output-tokens", "1", "--raw", str(raw))
    assert code == 0, output
    latencies = json.loads(raw.read_text(), parse_constant=refuse)["figures"]["latencies"]
    assert latencies["between pieces"] == {"mean": None, "percentiles": [None, None, None]}


def test_brackets_in_what_a_server_says_are_no_markup_and_cost_no_figures(gateway: Gateway, tmp_path: Path) -> None:
    broken = [{"error": {"message": "unbalanced [/INST] after [type=user]"}}]
    gateway.scripts = [list(HELLO), list(HELLO), broken, list(HELLO)]
    raw, report = tmp_path / "raw.json", tmp_path / "[run]" / "page.html"
    report.parent.mkdir()
    options = ["--requests", "2", "--concurrency", "1", "--raw", str(raw), "--report", str(report)]
    code, output = run(gateway, *options)
    assert code == 0, output
    assert "1 x unbalanced [/INST] after [type=user]" in output
    assert json.loads(raw.read_text())["figures"]["answered"] == 1
    assert str(report) in output


def test_one_file_for_figures_and_report_is_refused_before_the_load(gateway: Gateway, tmp_path: Path) -> None:
    both = ["--raw", str(tmp_path / "run"), "--report", str(tmp_path / "run")]
    result = runner.invoke(app, ["bench", "--url", gateway.url, *both])
    assert (result.exit_code, "--raw and --report are both" in result.stderr) == (2, True)
    assert gateway.asked == []


def test_one_file_by_two_names_is_not_written_over(gateway: Gateway, tmp_path: Path) -> None:
    """The report would take the trace's place, and the second file the first one's."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(LINE)
    (tmp_path / "link").symlink_to(trace)
    (tmp_path / "hard").hardlink_to(trace)
    for name in ("trace.jsonl", "./trace.jsonl", "link", "hard"):
        code, output = run(gateway, "--trace", str(trace), "--report", f"{tmp_path}/{name}")
        assert (code, output) == (2, f"weft bench: --trace and --report are both {trace}\n")
    (tmp_path / "to nothing").symlink_to(tmp_path / "new")
    code, output = run(gateway, "--raw", f"{tmp_path}/new", "--report", f"{tmp_path}/to nothing")
    assert (code, output) == (2, f"weft bench: --raw and --report are both {tmp_path}/new\n")
    assert (trace.read_text(), gateway.asked) == (LINE, [])


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ('{"object": "list", "data": []}', "lists no model"),
        ('{"data": null}', "does not answer like a mesh"),
        ('{"data": [{}]}', "does not answer like a mesh"),
        ("<!doctype html><html></html>", "does not answer like a mesh"),
        ("[]", "does not answer like a mesh"),
    ],
)
def test_bench_says_what_a_list_of_models_lacks(gateway: Gateway, models: str, said: str) -> None:
    gateway.models = models
    code, output = run(gateway)
    assert code == 1
    assert said in output
    assert gateway.url in output
    assert "Error(" not in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("options", [[], ["--model", "tiny"]])
def test_bench_says_that_no_server_answers(options: list[str]) -> None:
    with socket.socket() as taken:  # bound, and nothing listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = runner.invoke(app, ["bench", "--url", url, *options])
    assert result.exit_code == 1
    assert f"answers at {url}" in result.output


def test_bench_says_what_an_unknown_model_is_refused_with(gateway: Gateway) -> None:
    gateway.status = 404
    code, output = run(gateway, "--model", "other")
    assert code == 1
    assert "HTTP 404: model: no such model" in output


@pytest.mark.parametrize("option", ["--report", "--raw", "--trace"])
def test_bench_names_a_folder_given_as_a_file(gateway: Gateway, tmp_path: Path, option: str) -> None:
    code, output = run(gateway, option, str(tmp_path))
    assert code in (1, 2)
    assert "directory" in output
    assert "Errno" not in output

"""`weft bench`: what it asks and computes, runs against a scripted server, and servers and files that fail."""

from __future__ import annotations

import itertools
import json
import math
import resource
import signal
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.weft.cli.conftest import HELLO, HOLD, Gateway
from typer.testing import CliRunner

from weft.bench.load import NEVER_SENT, OUT_OF_TIME, Load, Record, open_target
from weft.bench.stats import LatencySlo, percentile, summarize
from weft.bench.workload import BadTrace, Job, WorkloadSpec, from_recipe, from_trace
from weft.cli.main import app
from weft.svg import Axis, distribution, over_time, steps

runner = CliRunner()


def test_seed_determines_the_requests() -> None:
    first, again = (list(from_recipe(WorkloadSpec(requests=5, spread=0.5, seed=1))) for _ in range(2))
    assert first == again
    other = list(from_recipe(WorkloadSpec(requests=5, spread=0.5, seed=2)))
    assert not {job.text(4) for job in first} & {job.text(4) for job in other}


def test_prompts_share_the_beginning_that_the_recipe_names() -> None:
    texts = [job.text(4.0) for job in from_recipe(WorkloadSpec(requests=3, prompt_tokens=100, shared_tokens=40))]
    assert len({text[:160] for text in texts}) == 1
    assert len({text[:180] for text in texts}) == 3
    assert all(abs(len(text) - 400) <= 1 for text in texts)


def test_lengths_spread_around_what_was_asked_for() -> None:
    jobs = list(from_recipe(WorkloadSpec(requests=400, output_tokens=100, spread=0.5)))
    lengths = [job.output_tokens for job in jobs]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert 90 < sum(lengths) / len(lengths) < 110


def test_an_open_loop_comes_by_chance_at_the_rate() -> None:
    times = [job.at or 0.0 for job in from_recipe(WorkloadSpec(requests=2000, rate=50.0))]
    assert times == sorted(times)
    assert 35 < times[-1] < 45
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    # exponential: the deviation is the mean
    assert 0.8 < math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean < 1.2


def test_a_trace_keeps_its_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 5000, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]},
        {"timestamp": 7000, "input_length": 1000, "output_length": 0, "hash_ids": [1, 3]},
        {"timestamp": 8000, "input_length": 10, "output_length": 1},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    jobs = list(from_trace(path, 0, speed=2.0))
    assert [job.at for job in jobs] == [0.0, 1.0, 1.5]
    assert [job.output_tokens for job in jobs] == [9, 1, 1]
    assert [sum(tokens for _, tokens in job.pieces) for job in jobs] == [700, 1000, 10]
    first, second, _ = (job.text(4.0) for job in jobs)
    assert first[:2048] == second[:2048]
    assert first[2049:2300] != second[2049:2300]
    assert len(list(from_trace(path, 2, 1.0))) == 2


def test_unsorted_trace_is_replayed_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": at, "input_length": at, "output_length": 1} for at in (1000, 500, 3000, 2000)]
    path.write_text("\n".join(map(json.dumps, rows)))
    jobs = list(from_trace(path, 3, 1.0))
    assert [(job.at, job.pieces[0][1]) for job in jobs] == [(0.0, 500), (0.5, 1000), (2.5, 3000)]


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", '{"timestamp": 1}', '{"timestamp": "x", "input_length": 1}'),
        '{"timestamp": NaN, "input_length": 1, "output_length": 1}',
        '{"timestamp": 1, "input_length": 1e999, "output_length": 1}',
    ],
)
def test_a_trace_that_is_none_is_refused_by_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n' + line)
    with pytest.raises(BadTrace, match=r"trace.jsonl, line 2: (?!\w+Error)"):
        list(from_trace(path, 0, 1.0))


RECORDS = [
    # due a second before it was sent: the wait counts
    Record(0.0, 1.0, [1.5, 1.7, 1.9], 2.0, prompt_tokens=10, cached_tokens=5, output_tokens=3),
    Record(1.0, 1.0, [1.1, 3.1], 4.0, prompt_tokens=30, output_tokens=2),
    Record(2.0, 2.0, [], 2.5, error="HTTP 429"),
]


def test_errors_of_one_kind_are_told_once() -> None:
    said = ("HTTP 429: back in 1.25 s", "HTTP 503: no worker", "HTTP 429: back in 2.5 s", "ReadTimeout")
    records = [Record(0.0, 0.0, [], 1.0, error=error) for error in said]
    assert summarize(records, LatencySlo()).errors == {said[0]: 2, said[1]: 1, said[3]: 1}


def test_figures_are_what_one_computes_by_hand() -> None:
    figures = summarize(RECORDS, LatencySlo(first_token=1.0, per_token=3.0))
    assert (figures.requests, figures.answered, figures.errors) == (3, 2, {"HTTP 429": 1})
    assert figures.seconds == 4.0
    assert (figures.request_rate, figures.prompt_rate, figures.output_rate) == (0.5, 10.0, 1.25)
    assert figures.cached_share == 5 / 40
    # one first token came after 1.5 s, one request failed
    assert (figures.goodput, figures.good_share) == (0.25, 1 / 3)
    assert figures.latencies["TTFT"].percentiles == pytest.approx((100.0, 1500.0, 1500.0))
    assert figures.latencies["time per token"].mean == pytest.approx((200 + 2000) / 2)
    assert figures.latencies["between pieces"].percentiles[0] == pytest.approx(200.0)
    assert summarize(RECORDS, LatencySlo(per_token=1.0)).goodput == 0.25
    assert summarize(RECORDS, LatencySlo()).goodput == 0.5


def test_a_percentile_is_the_nearest_rank() -> None:
    assert [percentile(range(1, 101), each) for each in (50, 99, 100)] == [50, 99, 100]
    assert percentile([7.0], 1) == 7.0
    assert math.isnan(percentile([], 50))


@pytest.mark.parametrize("values", [[], [0.0], [5.0] * 3, [0.001, 1e6], list(range(10_000))])
def test_plots_are_xml_and_stay_within_their_frame(values: list[float]) -> None:
    pairs = [(value, value) for value in values]
    marked = distribution(values, "<ms>", {each: percentile(values, each) for each in (50, 99)} if values else {})
    assert marked.count("<circle") == (2 if values else 0)
    for svg in (marked, over_time(pairs, "a&b"), steps([(value, 1) for value in values], "n")):
        root = ET.fromstring(svg)
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        corners = [point.split(",") for line in root.iter("polyline") for point in line.attrib["points"].split()]
        corners += [[dot.attrib["cx"], dot.attrib["cy"]] for dot in root.iter("circle")]
        assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in corners)


def test_ticks_are_few_and_round() -> None:
    for high in (0.003, 1, 7, 100, 12345):
        ticks = Axis("x", 0, high).ticks
        assert 3 <= len(ticks) <= 8
        assert ticks[0] == 0
        assert ticks[-1] <= high * 1.0001


class Links(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


def test_bench_prints_tables_and_writes_standalone_page(gateway: Gateway, tmp_path: Path) -> None:
    gateway.scripts = [list(HELLO) for _ in range(8)]
    page, raw = tmp_path / "report.html", tmp_path / "raw.json"
    options = ["--chat", "--requests", "6", "--concurrency", "2", "--prompt-tokens", "20", "--api-key", "very-secret"]
    files = ["--report", str(page), "--raw", str(raw)]
    result = runner.invoke(app, ["bench", "--url", gateway.url, *options, *files])
    assert result.exit_code == 0, result.output
    assert "6 of 6 answered" in result.output
    assert "TTFT" in result.output
    assert len(gateway.asked) == 8, "two to find out how long its tokens are"
    path, body, _ = gateway.asked[-1]
    assert (path, body["model"], body["stream"]) == ("/v1/chat/completions", "tiny", True)
    links = Links()
    links.feed(page.read_text())
    assert links.found == []
    assert "very-secret" not in page.read_text() + raw.read_text() + result.output
    records = json.loads(raw.read_text())["records"]
    assert [record["output_tokens"] for record in records] == [3] * 6


def test_an_open_loop_counts_what_fails(gateway: Gateway) -> None:
    gateway.scripts = [list(HELLO) for _ in range(4)] + [["[DONE]"], [{"error": {"code": "unavailable"}}, "[DONE]"]]
    result = runner.invoke(app, ["bench", "--chat", "--url", gateway.url, "--requests", "4", "--rate", "200"])
    assert result.exit_code == 0, result.output
    assert "2 of 4 answered" in result.output
    assert "1 x no text" in result.output
    assert "1 x unavailable" in result.output


def test_malformed_event_fails_its_request_only(gateway: Gateway) -> None:
    odd: list[Any] = ["null", {"usage": {"tokens": 3}}, {"choices": [7]}]
    gateway.scripts = [list(HELLO), list(HELLO), *([each, "[DONE]"] for each in odd), [{"choices": None}, *HELLO]]
    result = runner.invoke(app, ["bench", "--chat", "--url", gateway.url, "--requests", "4", "--concurrency", "1"])
    assert result.exit_code == 0, result.output
    assert "1 of 4 answered" in result.output
    assert "3 x an event that is not OpenAI's" in result.output


def test_a_server_that_refuses_is_told_and_no_run(gateway: Gateway) -> None:
    gateway.status = 500
    result = runner.invoke(app, ["bench", "--url", gateway.url])
    assert result.exit_code == 1
    assert "HTTP 500: model: no such model" in result.output


def test_server_that_rejects_ignore_eos_is_measured(gateway: Gateway) -> None:
    gateway.unknown_fields = {"ignore_eos"}
    gateway.scripts = [list(HELLO) for _ in range(4)]
    result = runner.invoke(app, ["bench", "--chat", "--url", gateway.url, "--requests", "2"])
    assert result.exit_code == 0, result.output
    assert "2 of 2 answered" in result.output
    assert "rejects ignore_eos" in result.output
    assert ["ignore_eos" in body for _, body, _ in gateway.asked] == [True, False, False, False, False]
    gateway.unknown_fields = {"stream_options"}
    result = runner.invoke(app, ["bench", "--chat", "--url", gateway.url, "--requests", "2"])
    assert result.exit_code == 1
    assert "HTTP 400: unknown parameter: stream_options" in result.output


def test_thoughts_are_tokens_whatever_a_server_calls_them(gateway: Gateway) -> None:
    thinking = {"choices": [{"index": 0, "delta": {"reasoning": "Hm"}, "finish_reason": None}]}
    gateway.scripts = [
        list(HELLO),
        list(HELLO),
        [thinking, {**thinking, "usage": {"prompt_tokens": 3, "completion_tokens": 1}}, "[DONE]"],
    ]
    result = runner.invoke(app, ["bench", "--chat", "--url", gateway.url, "--requests", "1"])
    assert "1 of 1 answered" in result.output, result.output


def test_events_may_have_names_comments_and_any_line_ends(gateway: Gateway) -> None:
    text = [json.dumps(event) for event in HELLO[:-1]]
    named = [f"event: chunk\r\nid: 7\r\ndata: {each}\r\n\r\n".encode() for each in text]
    gateway.scripts = [list(HELLO), list(HELLO), [b": waiting\n\n", *named, b"event: end\ndata: [DONE]\n\n"]]
    result = runner.invoke(app, ["bench", "--chat", "--url", gateway.url, "--requests", "1"])
    assert "1 of 1 answered" in result.output, result.output


LINE = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'


def run(gateway: Gateway, *options: str) -> tuple[int, str]:
    result = runner.invoke(app, ["bench", "--chat", "--url", gateway.url, *options])
    return result.exit_code, result.output


def test_stalled_server_counts_time_and_unsent_requests(gateway: Gateway, tmp_path: Path) -> None:
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
def test_unwritable_file_is_reported_before_the_load(gateway: Gateway, tmp_path: Path, option: str) -> None:
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


def test_missing_figure_is_null_in_valid_json(gateway: Gateway, tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    one_piece = [{"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}, "[DONE]"]
    gateway.scripts = [one_piece, one_piece]
    raw = tmp_path / "raw.json"
    code, output = run(gateway, "--requests", "1", "--output-tokens", "1", "--raw", str(raw))
    assert code == 0, output
    latencies = json.loads(raw.read_text(), parse_constant=refuse)["figures"]["latencies"]
    assert latencies["between pieces"] == {"mean": None, "percentiles": [None, None, None]}


def test_brackets_in_errors_are_not_markup(gateway: Gateway, tmp_path: Path) -> None:
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


def test_raw_and_report_must_be_different_files(gateway: Gateway, tmp_path: Path) -> None:
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

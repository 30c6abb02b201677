"""`weft bench`: what it asks, what it computes, and a whole run against a server that answers from a script."""

from __future__ import annotations

import itertools
import json
import math
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.weft.cli.conftest import HELLO, Gateway
from typer.testing import CliRunner

from weft.bench.load import Record
from weft.bench.plots import Axis, distribution, over_time, steps
from weft.bench.stats import LatencySlo, percentile, summarize
from weft.bench.workload import BadTrace, WorkloadSpec, from_recipe, from_trace
from weft.cli.main import app

runner = CliRunner()


def test_the_same_seed_asks_the_same_and_another_one_something_else() -> None:
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


def test_a_trace_that_was_written_as_requests_ended_is_replayed_in_the_order_of_their_times(tmp_path: Path) -> None:
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
    marked = distribution(values, "<ms>", (50, 99))
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


def test_a_run_against_a_server_prints_tables_and_writes_a_page_that_needs_nothing(
    gateway: Gateway, tmp_path: Path
) -> None:
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


def test_an_event_that_is_not_openais_costs_its_own_request_and_no_other(gateway: Gateway) -> None:
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


def test_a_server_that_knows_openais_fields_alone_is_measured_without_the_others(gateway: Gateway) -> None:
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

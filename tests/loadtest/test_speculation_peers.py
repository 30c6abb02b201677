"""Peers of the speculation benchmark: the requests they get, and the rows that their answers make."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from loadtest.processes import BenchError
from loadtest.speculation import peer_llama
from loadtest.speculation.bench import OFF, Run
from loadtest.speculation.peers import HEADINGS, measure, num_same, rows
from loadtest.speculation.tasks import Prompt

from weft.request import DraftCounts

SCHEMA = {"type": "object"}
FORCED = Prompt((1, 5), 4, replayed=(7, 8, 9, 2))
CALL = Prompt((1, 5), 96, grammar=json.dumps({"grammars": [{"json_schema": SCHEMA}]}))


class Peer:
    """Answers prompt p0 with tokens 7, 8 and 9 in as many seconds as are given for each run."""

    name = "peer"
    modes: Sequence[str] = (OFF, "copy")

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = iter(seconds)

    def run(self, prompts: Mapping[str, Prompt], mode: str) -> Run:
        drafts = DraftCounts() if mode == OFF else DraftCounts(4, 1)
        return Run(next(self._seconds), 2, 2 - drafts.accepted, drafts, {name: [7, 8, 9] for name in prompts})

    def close(self) -> None:
        """Nothing was started."""


class BrokenPeer(Peer):
    name = "broken"

    def run(self, prompts: Mapping[str, Prompt], mode: str) -> Run:
        raise BenchError("broken: HTTP 500")


def test_rows_leave_out_the_first_round() -> None:
    runs = measure([Peer([1000, 1, 2, 1, 2, 0.5])], {"p0": FORCED}, rounds=2)
    (row,) = rows("edit", runs, {"p0": [7, 8, 9, 2]})
    found = dict(zip(HEADINGS, row, strict=True))
    # Off takes 2 s and 2 s, "copy" 1 s and 0.5 s: the ratios are 2 and 4.
    assert found == {
        "task": "edit",
        "engine": "peer",
        "mode": "copy",
        "tok/s": "3",
        "off": "1",
        "ratio": "3.00",
        "tokens per step": "2.00",
        "accepted": "0.25",
        "same text": "1/1",
    }


def test_measure_names_a_failed_peer(capsys: pytest.CaptureFixture[str]) -> None:
    runs = measure([BrokenPeer([]), Peer([1] * 4)], {"p0": FORCED}, rounds=1)
    assert list(runs) == ["peer"]
    assert "missing: broken: HTTP 500" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "same"), [([7, 2], 1), ([7], 1), ([7, 8, 2], 0), ([], 0)])
def test_same_text_ignores_a_missing_end_token(answer: list[int], same: int) -> None:
    assert num_same({"p0": answer}, {"p0": [7, 2]}) == same


def test_llama_request_forces_the_replayed_tokens() -> None:
    body = peer_llama.completion_body(FORCED)
    assert body["grammar"] == "root ::= <[7]> <[8]> <[9]>"
    assert (body["prompt"], body["n_predict"], body["temperature"]) == ([1, 5], 4, 0)
    assert peer_llama.completion_body(CALL)["json_schema"] == SCHEMA


def test_llama_run_counts_from_the_first_token() -> None:
    timings = {"predicted_n": 11, "predicted_ms": 500.0, "draft_n": 8, "draft_n_accepted": 6}
    run = peer_llama.to_run("p0", {"tokens": [7, 8], "timings": timings})
    assert (run.speed, run.steps, run.tokens_per_step) == (20.0, 4, 2.5)
    assert run.drafts == DraftCounts(8, 6)
    undrafted = peer_llama.to_run("p0", {"tokens": [7], "timings": {"predicted_n": 11, "predicted_ms": 1.0}})
    assert undrafted.drafts == DraftCounts()


LLAMA_SERVER = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        drafts = {{"draft_n": 5, "draft_n_accepted": 2}} if "--spec-type" in sys.argv else {{}}
        count = body["n_predict"]
        self.answer({{"tokens": [7] * count, "timings": {{"predicted_n": count, "predicted_ms": 500.0, **drafts}}}})

    def answer(self, found):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.parametrize(("clock", "tokens"), [("wall", 3), ("cpu", 4)])
def test_llama_server_answers_with_and_without_drafts(tmp_path: Path, clock: str, tokens: int) -> None:
    server = tmp_path / "llama-server"
    server.write_text(LLAMA_SERVER)
    server.chmod(server.stat().st_mode | stat.S_IXUSR)
    llama = peer_llama.LlamaServer(tmp_path / "python", tmp_path / "model.gguf", 1, clock)
    runs = {mode: llama.run({"p0": FORCED}, mode) for mode in (OFF, "ngram-mod")}
    assert {run.tokens for run in runs.values()} == {tokens}
    assert runs[OFF].drafts == DraftCounts()
    assert runs["ngram-mod"].drafts == DraftCounts(5, 2)
    assert runs["ngram-mod"].steps == tokens - 2
    assert runs[OFF].answers == {"p0": [7] * 4}

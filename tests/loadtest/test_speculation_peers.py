"""Peers of the speculation benchmark: the requests they get, and the rows that their answers make."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from loadtest.models import NANO
from loadtest.processes import ROOT, BenchError
from loadtest.speculation import peer_llama, peer_vllm, vllm_driver
from loadtest.speculation.bench import OFF, Run
from loadtest.speculation.peers import HEADINGS, gains, measure, num_same, rows
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
    """Fails in one mode."""

    name = "broken"

    def __init__(self, seconds: Sequence[float], broken: str) -> None:
        super().__init__(seconds)
        self._broken = broken

    def run(self, prompts: Mapping[str, Prompt], mode: str) -> Run:
        if mode == self._broken:
            raise BenchError("broken: HTTP 500\nand its log")
        return super().run(prompts, mode)


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


@pytest.mark.parametrize("broken", [OFF, "copy"])
def test_measure_goes_on_after_a_failed_mode(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    results = measure([BrokenPeer([1] * 2, broken), Peer([1, 1, 2, 1])], {"p0": FORCED}, rounds=1)
    assert "missing: broken: HTTP 500" in capsys.readouterr().err
    failed, counted = rows("edit", results, {"p0": [7, 8, 9, 2]})
    assert failed == ["edit", "broken", "copy", *"-----", "broken: HTTP 500"]
    assert counted[:3] == ["edit", "peer", "copy"]
    assert gains("edit", results) == ["edit", "-", "2.00 copy", "short"]


@pytest.mark.parametrize(("seconds", "verdict"), [(1.0, "met"), (2.0, "short")])
def test_gains_compare_our_default_with_the_best_of_a_peer(seconds: float, verdict: str) -> None:
    ours, peer = Peer([1, 1, 1, 2, 0.5, seconds]), Peer([1, 1, 1, 2, 1, 4])
    ours.modes = peer.modes = (OFF, "short", "long")
    peer.name = "other"
    results = measure([ours, peer], {"p0": FORCED}, rounds=1)
    assert gains("edit", results)[-1] == verdict


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


def test_vllm_run_counts_rows_as_drafts() -> None:
    answer = {"tokens": [7, 8, 9, 7, 8, 9, 7], "seconds": 2.0, "steps": 3, "rows": 11}
    run = peer_vllm.to_run("p0", answer)
    assert (run.speed, run.tokens_per_step, run.drafts) == (3.0, 2.0, DraftCounts(8, 3))
    assert run.answers == {"p0": answer["tokens"]}


def test_vllm_request_has_the_schema_or_the_replayed_text() -> None:
    assert peer_vllm.request_body(CALL)["json_schema"] == SCHEMA
    body = peer_vllm.request_body(FORCED)
    assert (body["replayed"], body["json_schema"]) == ((7, 8, 9, 2), None)


def test_vllm_head_reads_the_states_that_the_head_names(tmp_path: Path) -> None:
    folder = peer_vllm.write_head(NANO / "draft", tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert (folder / "model.safetensors").samefile(NANO / "draft" / "model.safetensors")


VLLM_DRIVER = f"""#!{sys.executable}
import json, sys
from multiprocessing.connection import Listener

sys.path.insert(0, {str(ROOT)!r})
from loadtest.speculation import vllm_driver

class Driver:
    def __init__(self, model, dtype, speculative, clock):
        self.speculative = speculative

    def answer(self, prompt):
        if self.speculative and prompt["replayed"]:
            raise ValueError("no drafts here")
        rows = 12 if self.speculative else 3
        return {{"tokens": [7] * 4, "seconds": 1.0, "steps": 3, "rows": rows}}

vllm_driver.Driver = Driver
sys.argv = sys.argv[2:]
vllm_driver.main()
"""


def test_vllm_process_answers_until_it_fails(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(VLLM_DRIVER)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    vllm = peer_vllm.VllmPeer(python, tmp_path, None, "float32", 1, "cpu")
    assert vllm.modes == (OFF, peer_vllm.NGRAM)
    assert vllm.run({"p0": FORCED, "p1": CALL}, OFF).tokens == 6
    assert vllm.run({"p0": CALL}, peer_vllm.NGRAM).drafts == DraftCounts(9, 0)
    with pytest.raises(BenchError, match="ValueError: no drafts here"):
        vllm.run({"p0": FORCED}, peer_vllm.NGRAM)
    assert vllm.run({"p0": CALL}, peer_vllm.NGRAM).tokens == 3, "the next run starts another process"
    vllm.close()


class FakeModel:
    """Two rows with a vocabulary of 4; token 3 is the most likely one."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.0, 1.0, 2.0, 3.0]] * len(hidden_states))


def test_replay_forces_the_text_behind_the_drafts() -> None:
    model = FakeModel()
    replay = vllm_driver.Replay(model)
    assert model.compute_logits(torch.zeros(2, 1)).argmax(-1).tolist() == [3, 3]
    replay.text, replay.place = (1, 2, 0), 1
    assert model.compute_logits(torch.zeros(3, 1)).argmax(-1).tolist() == [2, 0, 0]
    assert (replay.num_steps, replay.num_rows) == (2, 5)

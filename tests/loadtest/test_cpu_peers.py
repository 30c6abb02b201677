"""The comparison on a CPU: why an engine has no figures, and what its bars say of those that it has."""

from __future__ import annotations

import importlib
import stat
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from loadtest.engine import cpu_peers
from loadtest.engine.cpu_peers import Engine, bars, is_behind
from loadtest.engine.cpu_task import VOCAB_SIZE, Task

TASK = Task(Path("model"), 1, (1,), 8, 2, 8, "wall")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'INFO: loading' >&2; kill -9 $$", "it was ended by SIGKILL"),
        ("echo 'INFO: loading' >&2; exec sleep 30", "it did not end within 1 s"),
        ("echo 'Traceback' >&2; echo 'ImportError: no vllm' >&2; exit 1", "ImportError: no vllm"),
        ("echo >&2; exit 3", "status 3"),
    ],
)
def test_a_peer_without_figures_is_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reason: str
) -> None:
    monkeypatch.setattr(cpu_peers, "ROUND_SECONDS", 1)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    engine = Engine("vLLM", str(python), "cpu_vllm", "bf16")
    engine.run(TASK)
    assert engine.error == reason


def test_a_file_that_is_made_for_the_first_round_is_no_part_of_a_start(tmp_path: Path) -> None:
    python = tmp_path / "python"
    figures = '{"first_token_at": %s, "making_seconds": 40}'
    python.write_text(f"#!/bin/sh\nprintf '{figures}' $(($(date +%s) + 42))\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    engine = Engine("llama.cpp", str(python), "cpu_llama", "bf16")
    engine.run(TASK)
    assert engine.error == ""
    assert 0.5 < engine.rounds[0]["first_token_seconds"] < 5


def test_llama_cpp_is_given_prompts_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes so many rows at a time as it was told there would be, and others are written beyond its memory."""

    def batch_init(rows: int, *_: int) -> SimpleNamespace:
        names = ("token", "pos", "n_seq_id", "logits")
        return SimpleNamespace(**{name: [0] * rows for name in names}, seq_id=[[0] for _ in range(rows)])

    library = MagicMock(llama_batch_init=batch_init)
    library.llama_decode.return_value = 0
    library.llama_get_logits_ith.return_value = np.zeros(VOCAB_SIZE, np.float32)
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.setitem(sys.modules, "gguf", MagicMock())
    monkeypatch.delitem(sys.modules, "loadtest.engine.cpu_llama", raising=False)
    monkeypatch.setattr(np.ctypeslib, "as_array", lambda row, shape: row)
    cpu_llama = importlib.import_module("loadtest.engine.cpu_llama")
    task = replace(TASK, prefill_tokens=5000)
    llama = cpu_llama.Llama(task, Path("model.gguf"))
    llama.open(1, task.prefill_tokens + 1, is_unified=True)
    assert llama.generate([task.long_prompt()], 1) == ([], [0])
    assert library.llama_init_from_model.call_args.args[1].n_batch == 5000
    monkeypatch.delitem(sys.modules, "loadtest.engine.cpu_llama")


FIGURES = {
    "batch 1, ms": 16.0,
    "batch 8, ms": 25.0,
    "batch 32, ms": 40.0,
    "prefill tok/s": 1500.0,
    "first token, s": 2.0,
}


def times(factor: float) -> dict[str, float]:
    """A peer that takes so many times as long for everything."""
    return {name: value / factor if name == "prefill tok/s" else value * factor for name, value in FIGURES.items()}


def verdicts(peers: dict[str, dict[str, float]], least_step_ms: float = 14.0) -> dict[str, str]:
    found = bars("weft bf16", {"weft bf16": FIGURES, "weft fp32": times(0.1), **peers}, least_step_ms)
    return {bar.name: bar.verdict for bar in found}


def test_an_engine_ahead_of_everybody_meets_all_and_one_behind_none() -> None:
    assert set(verdicts({"llama.cpp f16": times(1.3), "vLLM bf16": times(1.2)}).values()) == {"met"}
    behind = verdicts({"llama.cpp f16": times(0.9), "vLLM bf16": times(0.9)}, least_step_ms=13.0)
    assert behind.pop("process start to first token, s") == "met"  # that bar is no peer's
    assert set(behind.values()) == {"short"}


def test_the_quickest_dtype_of_a_peer_counts_and_our_own_others_do_not() -> None:
    found = verdicts({"llama.cpp f16": times(1.3), "llama.cpp bf16": times(1.1), "vLLM fp32": times(2)})
    assert found["step at batch 8, of llama.cpp's"] == "short"  # 1 / 1.1 is more than 0.85
    assert found["step at batch 1, of llama.cpp's"] == "met"
    assert found["step at batch 32, of vLLM's"] == "met"


def test_a_peer_that_did_not_start_is_no_peer_that_was_beaten() -> None:
    found = verdicts({"transformers fp32": times(2)})
    assert found["step at batch 8, of llama.cpp's"] == found["step at batch 32, of vLLM's"] == "not measured"
    assert found["step at batch 8, of the quickest peer's"] == "met"
    assert verdicts({})["prefill, of the quickest peer's rate"] == "not measured"


def test_a_batch_that_was_left_out_is_not_measured() -> None:
    rest = {name: value for name, value in FIGURES.items() if name != "batch 1, ms"}
    found = {bar.name: bar.verdict for bar in bars("weft fp32", {"weft fp32": rest, "vLLM bf16": times(2)}, 14.0)}
    assert found["read bandwidth at batch 1"] == found["step at batch 1, of the quickest peer's"] == "not measured"
    assert found["step at batch 32, of vLLM's"] == "met"


def test_batches_that_nobody_was_asked_for_are_not_measured() -> None:
    ours, theirs = ({name: of[name] for name in of if "batch" not in name} for of in (FIGURES, times(2)))
    found = {bar.name: bar.verdict for bar in bars("weft fp32", {"weft fp32": ours, "vLLM bf16": theirs}, 14.0)}
    assert {found[name] for name in found if "batch" in name} == {"not measured"}
    assert found["prefill, of the quickest peer's rate"] == "met"


@pytest.mark.parametrize("name", FIGURES)
def test_a_dtype_is_left_only_if_it_is_behind_in_everything(name: str) -> None:
    assert is_behind(times(1.2), FIGURES)
    assert not is_behind({**times(1.2), name: FIGURES[name]}, FIGURES)
    assert not is_behind(FIGURES, times(1.2))

"""The comparison on a CPU: why an engine has no figures, and what is no part of them."""

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
from loadtest.engine.cpu_peers import Engine
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

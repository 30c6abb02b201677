"""The benchmark of a bare GPU machine, with tiny models on whatever is here: it ends with results, whatever fails."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loadtest.engine import gpu, sweep
from loadtest.engine.drive import Bench
from loadtest.engine.gpu import TINY, run_shape, settings_for
from loadtest.engine.results import Point, Results
from loadtest.engine.shapes import SHAPES

from weft.capacity.layout import Gpu

GRID = replace(TINY, batches=(1, 2), contexts=(128,), prompts=(64,), mixed=())


def test_a_point_that_fails_is_named_and_the_next_shape_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(settings_for("cpu", is_tiny=True), chunk_tokens=64)
    results, device = Results(None, float("inf")), Gpu("this one", 1.0, 0.01, 0.1, 0.1)
    decode = Bench.decode

    def fails_for_two(bench: Bench, batch: int, *others: Any) -> Any:
        if batch == 2 and bench.config.experts is None:
            raise RuntimeError("CUDA error: no kernel image\nand forty lines more")
        return decode(bench, batch, *others)

    monkeypatch.setattr(Bench, "decode", fails_for_two)
    for name in ("8B", "Scout"):
        run_shape(SHAPES[name].tiny(), settings, device, GRID, results)
    rows = {key: row.get("note", "measured") for key, row in results.points.items()}
    assert rows == {
        "weft/8B/decode/1/128/0": "measured",
        "weft/8B/decode/2/128/0": "failed: RuntimeError: CUDA error: no kernel image",
        "weft/Scout/decode/1/128/0": "measured",
        "weft/Scout/decode/2/128/0": "measured",
        "weft/Scout/prefill/1/64/0": "measured",
    }
    assert "; ended at " in results.facts["8B"]
    assert "ended" not in results.facts["Scout"]


def test_a_sweep_whose_point_fails_tells_what_it_has_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image")

    monkeypatch.setattr(Bench, "prefill", fails)
    monkeypatch.setattr(sweep, "measure", lambda *_: Gpu("this one", 1.0, 0.01, 0.1, 0.1))
    options = [
        "--shape",
        "213M",
        "--tiny",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--kv-gib",
        "0.1",
        "--chunk-tokens",
        "64",
    ]
    options += ["--batches", "1", "--contexts", "128", "--prompts", "64", "--mixed", ""]
    monkeypatch.setattr(sys, "argv", ["sweep", *options])
    with pytest.raises(sweep.ShapeFailed):
        sweep.main()
    assert "## weft, 213M: decode" in capsys.readouterr().out


def test_a_shape_whose_engine_does_not_come_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(bench: Bench, *_: Any) -> None:
        raise RuntimeError("out of resource: shared memory\nRequired: 300000")

    monkeypatch.setattr(Bench, "__init__", fails)
    results = Results(None, float("inf"))
    shape, settings = SHAPES["8B"].tiny(), settings_for("cpu", is_tiny=True)
    run_shape(shape, settings, Gpu("this one", 1.0, 0.01, 0.1, 0.1), GRID, results)
    assert results.points == {}
    assert results.facts["8B"].endswith("; RuntimeError: out of resource: shared memory")


def test_results_of_other_conditions_are_not_gone_on_with() -> None:
    results = Results(None, float("inf"))
    results.under({"dtype": "float32", "tiny": True, "tflops": 1.0})
    results.under({"dtype": "bfloat16", "tiny": False, "tflops": 1.0})
    results.add(Point("8B", "decode", 1, 128), tok_s=1.0)
    results.under({"dtype": "bfloat16", "tiny": False, "tflops": 2.0})
    with pytest.raises(SystemExit, match="measured with tiny False, and this is True: name another --out"):
        results.under({"dtype": "bfloat16", "tiny": True, "tflops": 2.0})


def test_the_large_models_do_not_begin_by_themselves_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Their weights and contexts are sized for one."""
    begun: list[str] = []

    def begin(device: str) -> Gpu:
        begun.append(device)
        raise SystemExit

    monkeypatch.setattr(gpu, "measure", begin)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for words in ([], ["--tiny"], ["--device", "cpu"]):
        monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path), *words])
        with pytest.raises(SystemExit):
            gpu.main()
    assert begun == ["cpu", "cpu"]
    assert "no GPU here: --tiny is for any machine" in capsys.readouterr().err

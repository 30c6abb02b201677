"""The benchmark for a bare GPU machine runs from a checkout with torch alone, goes on where it ended, and tells all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from loadtest.engine.idle import idle_share
from loadtest.engine.results import Results, panels
from loadtest.plots import save_plot

ROOT = Path(__file__).parents[2]
# What Weft needs elsewhere, and a machine with nothing but torch and triton has not.
ABSENT = (
    "grpc google pydantic rich typer httpx orjson uvicorn starlette redis prometheus_client xxhash uvloop tokenizers"
    " transformers matplotlib llguidance minijinja mooncake weft_mesh weft_services"
)
RUN = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ImportError(f"{{name}} is not on this machine")
sys.meta_path.insert(0, Absent())
sys.argv[0] = "gpu"
runpy.run_module("loadtest.engine.gpu", run_name="__main__")
"""


def run_gpu(out: Path, *arguments: str) -> dict[str, Any]:
    """Its results."""
    code = RUN.format(names=set(ABSENT.split()))
    command = [sys.executable, "-c", code, "--tiny", "--device", "cpu", "--out", str(out), *arguments]
    path = os.pathsep.join(str(ROOT / part) for part in ("libs", "kernels", "."))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


@pytest.mark.timeout(240)
def test_the_gpu_benchmark_runs_on_torch_alone_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    cut_short = run_gpu(tmp_path, "--shapes", "8B,Kimi", "--limit-seconds", "0")
    late = [row for row in cut_short["points"].values() if row.get("is_late")]
    assert late
    assert not any("ms" in row for row in cut_short["points"].values())
    whole = run_gpu(tmp_path, "--shapes", "8B,Kimi")
    measured = {(row["shape"], row["kind"]) for row in whole["points"].values() if "ms" in row}
    assert measured == {(shape, kind) for shape in ("8B", "Kimi") for kind in ("decode", "prefill", "mixed")}
    for row in whole["points"].values():
        assert row.get("note", "") if "ms" not in row else row["of_limit"] > 0
    assert {row["note"] for row in whole["points"].values() if row["engine"] != "weft"} != {""}
    assert all(row["us"] > 0 for row in whole["attention"])
    text = (tmp_path / "results.md").read_text()
    assert "## weft, Kimi: decode" in text
    assert "transformers is not on this machine" in text
    drawn = panels(Results.open(tmp_path / "results.json", 0.0))
    assert [(len(panel.lines), len(panel.limits)) for panel in drawn] == [(2, 2), (2, 2)]  # two contexts, two shapes
    save_plot(tmp_path / "sweep.svg", drawn)
    ids = [each.get("id", "") for each in ElementTree.parse(tmp_path / "sweep.svg").getroot().iter()]
    assert {"axes_1", "axes_2"} <= set(ids)


def test_idle_time_is_what_no_kernel_covers() -> None:
    busy = [(float(at), at + 0.75) for at in range(100)]
    assert idle_share(busy) == pytest.approx(0.25, abs=0.01)
    assert idle_share([*busy, (10.0, 90.0)]) == 0
    assert idle_share([(0.0, 10.0), (5.0, 20.0), (90.0, 100.0)]) == pytest.approx(1)

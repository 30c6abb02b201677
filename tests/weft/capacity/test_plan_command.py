"""`weft plan` as one types it: what it prints, its exit status, what it says of options and files that are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weft.cli.main import app

CONFIGS = Path(__file__).parents[1] / "model/configs"
NANO = Path(__file__).parents[3] / "models" / "weft-nano"


def weft(*args: str) -> Result:
    return CliRunner().invoke(app, ["plan", *args])


def test_the_command_plans_resident_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code = "from weft.cli.main import main; main()"
    command = [sys.executable, "-c", code, "plan", str(CONFIGS / "llama3-8b"), "--gpu", "h200"]
    run = subprocess.run([*command, "--weight-format", "packed12"], capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stderr
    assert "11.29 GiB as bfloat16, matrices as F12" in run.stdout


def test_what_is_not_bfloat16_is_planned_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """F12 is a form of bfloat16: otherwise nothing is packed, and no room is kept to unpack it in."""
    monkeypatch.setenv("COLUMNS", "160")
    plain, resident = (
        weft(str(CONFIGS / "llama3-8b"), "--dtype", "float32", "--weight-format", each)
        for each in ("plain", "packed12")
    )
    assert "29.92 GiB as float32, KV" in plain.stdout
    assert resident.stdout == plain.stdout


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_whatever_a_checkpoint_has_workers_on_a_gpu_compute_in_bfloat16(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    fields = json.loads((CONFIGS / "llama3-8b/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"dtype": dtype, "torch_dtype": dtype}))
    for weights in ("plain", "packed12"):
        found, published = (
            weft(str(each), "--weight-format", weights).stdout for each in (tmp_path, CONFIGS / "llama3-8b")
        )
        assert "KV in bfloat16" in found
        assert found == published


def test_the_command_shows_its_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    run = weft(str(CONFIGS / "llama4-scout"), "--gpu", "h200", "--gpus", "2")
    assert run.exit_code == 0, run.stderr
    for text in (
        "107.77 B parameters",
        "TP2 PP1 EP1",
        "12 layers x 4 heads x 2 x 128 x 2 B x 64 tokens",
        "1 x 12 growing layers",
        "8,192 tokens",
    ):
        assert text in run.stdout
    assert weft(str(CONFIGS / "kimi-k2.5"), "--gpu", "l40s", "--gpus", "8").exit_code == 1


def test_a_draft_head_is_planned_with_its_kv_and_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    run = weft(str(NANO), "--draft", str(NANO / "draft"), "--batch", "8")
    assert run.exit_code == 0, run.stderr
    for text in (
        "weights: draft model",
        "81 x 8 + 2,120 rows x 3 x 256 x 2 B",
        "512 B a token, in the same pages",
        "7 layers x 2 heads x 2 x 64 x 2 B",
    ):
        assert text in run.stdout
    assert "draft" not in weft(str(NANO)).stdout


def test_a_drafting_layer_is_planned_by_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    run = weft(str(CONFIGS / "deepseek-v3"), "--gpus", "16", "--draft", "mtp")
    assert "weights: draft model" in run.stdout, run.stderr
    assert "1,152 B a token, in the same pages" in run.stdout
    run = weft(str(NANO), "--draft", "mtp")
    assert (run.exit_code, "no layer that drafts" in run.stderr.replace("\n", " ")) == (2, True)


def test_no_digit_is_cut_off_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = weft(str(CONFIGS / "kimi-k2.5"), "--gpu", "h200", "--gpus", "16")
    assert run.exit_code == 0, run.stderr
    assert "\u2026" not in run.stdout


def test_layouts_over_several_gpus_are_said_to_be_arithmetic() -> None:
    assert "compute on one GPU each" in weft(str(CONFIGS / "llama3-8b"), "--gpus", "2").stdout
    assert "compute on one GPU each" not in weft(str(CONFIGS / "llama3-8b")).stdout


def test_packed_weights_fit_as_they_stay_packed() -> None:
    """Eight H100 have room for Kimi's INT4, four have not."""
    run = weft(str(CONFIGS / "kimi-k2.5"), "--gpu", "h100", "--gpus", "8", "--tp", "8", "--ep", "8")
    assert run.exit_code == 0
    assert "553.70 GiB as INT4" in run.stdout
    assert weft(str(CONFIGS / "kimi-k2.5"), "--gpu", "h100", "--gpus", "4").exit_code == 1


def test_expanded_weights_are_planned_in_the_dtype_of_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    run = weft(str(CONFIGS / "gpt-oss-20b"), "--gpu", "h100")
    assert run.exit_code == 0
    assert "20.91 B parameters, 38.96 GiB as bfloat16 out of MXFP4 EXPERTS" in run.stdout
    assert weft(str(CONFIGS / "gpt-oss-20b"), "--gpu", "rtx4090").exit_code == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpu", "h300"], "--gpu: 'h300' is not known; known: h100"),
        (["--gpus", "7", "--tp", "7"], "--tp: 7 does not divide 32 heads"),
        (["--context", "200000"], "--context: 200000 is more than the model's 131072 positions"),
    ],
)
def test_bad_options_are_named(args: list[str], message: str) -> None:
    run = weft(str(CONFIGS / "llama3-8b"), *args)
    assert run.exit_code == 2
    assert message in run.stderr.replace("\n", " ")


def test_bad_configs_are_named_by_file_and_field(tmp_path: Path) -> None:
    assert "no such file" in weft(str(tmp_path)).stderr
    assert f"{tmp_path}/[/b] is no directory" in weft(f"{tmp_path}/[/b]").stderr
    fields = json.loads((CONFIGS / "llama3-8b/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"hidden_size": -1}))
    assert "config.json: hidden_size: expected a whole number above 0" in weft(str(tmp_path)).stderr


@pytest.mark.parametrize("place", ["x" * 300, "x" * 300 + "/config.json"])
def test_a_model_that_cannot_be_looked_at_is_told_in_one_line(place: str) -> None:
    """As one in a folder that may not be entered, which root may always."""
    run = weft(place)
    assert run.exit_code == 2
    assert run.stderr.startswith("weft plan: ")
    assert run.stderr.endswith("not readable: File name too long\n")


def test_planning_needs_no_torch() -> None:
    code = "import sys, weft.cli.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

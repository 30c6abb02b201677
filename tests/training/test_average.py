"""The mean of checkpoints, by the command that the model card names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def test_weights_are_the_weighted_mean_and_the_rest_is_the_last_ones(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 4.0)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((3, 2), value, dtype=torch.bfloat16)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(name)
    parts = [f"{tmp_path / 'a'}=1", f"{tmp_path / 'b'}=2"]
    subprocess.run(
        [sys.executable, "-m", "training.weft_nano.average", str(tmp_path / "mean"), *parts], check=True, timeout=60
    )
    mean = load_file(tmp_path / "mean" / "model.safetensors")["w"]
    assert mean.dtype == torch.bfloat16
    assert torch.equal(mean, torch.full((3, 2), 3.0, dtype=torch.bfloat16))
    assert (tmp_path / "mean" / "config.json").read_text() == "b"

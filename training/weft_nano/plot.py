"""Draws the loss curve of a training log. Knows the log's JSON lines, nothing of the model.

`python -m training.weft_nano.plot` writes `models/weft-nano/training.png`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt


def read(log: Path) -> list[dict[str, Any]]:
    """The log's entries, with the steps of each phase counted on from where the one before ended."""
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    before, counted = 0, []
    for phase in sorted({e["phase"] for e in entries}):
        of_phase = [e | {"step": e["step"] + before} for e in entries if e["phase"] == phase]
        counted += of_phase
        before = of_phase[-1]["step"]
    return counted


def draw(log: Path, out: Path) -> None:
    entries = read(log)
    losses = [e for e in entries if "loss" in e]
    judged = [e for e in entries if "exact_answers" in e]
    figure, left = plt.subplots(figsize=(8, 4.5))
    left.plot([e["step"] for e in losses], [e["loss"] for e in losses], color="tab:blue")
    left.set_xlabel("step")
    left.set_ylabel("training loss (nats per weighted token)", color="tab:blue")
    left.set_yscale("log")
    right = left.twinx()
    for key, colour in (("exact_answers", "tab:orange"), ("exact_calls", "tab:green")):
        right.plot([e["step"] for e in judged], [e[key] for e in judged], color=colour, label=key.replace("_", " "))
    right.set_ylabel("held-out turns right in every token")
    right.set_ylim(0, 1)
    right.legend(loc="center right")
    figure.tight_layout()
    figure.savefig(out, dpi=100)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, default=Path("models/weft-nano/training.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("models/weft-nano/training.png"))
    options = parser.parse_args()
    draw(options.log, options.out)


if __name__ == "__main__":
    main()

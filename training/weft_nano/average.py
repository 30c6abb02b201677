"""Writes the weighted mean of checkpoints' weights: ends of phases of one run lie in one basin, and their mean is
steadier than each.

`python -m training.weft_nano.average OUT PHASE_4=1 PHASE_5=2`; everything but the weights is copied from the last one.
Source: Wortsman et al., Model soups, 2022.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"


def mean(checkpoints: list[tuple[Path, float]]) -> dict[str, Tensor]:
    """In FP32, given back in the first one's types. Raises KeyError where a tensor is missing."""
    whole = sum(share for _, share in checkpoints)
    loaded = [(load_file(folder / WEIGHTS), share / whole) for folder, share in checkpoints]
    return {
        name: sum((tensors[name].float() * share for tensors, share in loaded), torch.zeros(())).to(tensor.dtype)
        for name, tensor in loaded[0][0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("checkpoints", nargs="+", metavar="FOLDER=SHARE")
    options = parser.parse_args()
    parts = [text.rpartition("=") for text in options.checkpoints]
    checkpoints = [(Path(folder), float(share)) for folder, _, share in parts]
    weights = mean(checkpoints)
    shutil.copytree(checkpoints[-1][0], options.out, dirs_exist_ok=True)
    save_file(weights, options.out / WEIGHTS, metadata={"format": "pt"})


if __name__ == "__main__":
    main()

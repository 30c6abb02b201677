"""A trained model in every quantized format, served by the engine and compared with transformers, token for token.

    python -m loadtest.formats [--model DIR] [--only awq --only nf4]

DIR holds SmolLM2-135M-Instruct, as `make smollm2` leaves it, or a like model with ChatML. It is widened to float32,
packed here, and read again. transformers computes with the weights that the packed tensors stand for. Prints a row for
each format; fails if a text differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.weft.engine.harness import Driver
from tests.weft.model.packers import FORMATS, Tensors, pack
from tests.weft.model.test_quantized import quantized
from tests.weft.tiny_families import TinyFamily
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from loadtest.report import ROOT
from weft.model.config import read_config
from weft.weights.checkpoint import read_checkpoint

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many days has a week?",
    "Name three colours.",
    "Explain what a computer does to a child.",
    "Translate to Spanish: good morning.",
    "What is 12 plus 30?",
    "Who wrote Romeo and Juliet?",
)
NUM_TOKENS = 32
SMOLLM2 = ROOT / ".weft" / "SmolLM2-135M-Instruct"
MIB = 1 << 20


def widened(source: Path, folder: Path) -> TinyFamily:
    """Copy the model in float32, in which packing and both engines compute."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: weight.float() for name, weight in load_file(source / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    oracle: Any = AutoModelForCausalLM.from_pretrained(folder)
    oracle.eval()
    return TinyFamily(oracle, folder, read_config(folder))


def prompts_of(source: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(form.format(question), add_special_tokens=False).ids for question in QUESTIONS]


def count_equal(model: TinyFamily, prompts: list[list[int]]) -> int:
    """Return how many greedy texts of the engine are those of the oracle."""
    read_checkpoint(model.directory)
    with Driver(model) as driver:
        keys = [driver.submit(str(number), prompt, NUM_TOKENS) for number, prompt in enumerate(prompts)]
        texts = [driver.wait_end(key).tokens for key in keys]
    return sum(model.is_greedy(prompt, tokens) for prompt, tokens in zip(prompts, texts, strict=True))


def run(source: Path, forms: list[str], folder: Path) -> bool:
    """Print a row for each format; return whether all texts are equal."""
    prompts, plain = prompts_of(source), widened(source, folder / "float32")
    print(f"| format | texts equal, of {len(prompts)} | file, MiB |\n|---|---|---|", flush=True)
    are_equal = _report("float32", plain, prompts)
    for form in forms:
        model = quantized(plain, FORMATS[form], folder / form, _pack)
        are_equal &= _report(form, model, prompts)
        shutil.rmtree(folder / form)
    return are_equal


def _pack(module: str, weight: torch.Tensor, fields: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    parts, unpacked = pack(module, weight, fields)
    return parts, unpacked.contiguous()


def _report(form: str, model: TinyFamily, prompts: list[list[int]]) -> bool:
    equal, size = count_equal(model, prompts), (model.directory / "model.safetensors").stat().st_size
    print(f"| {form} | {equal} | {size / MIB:.0f} |", flush=True)
    return equal == len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM2, metavar="DIR")
    parser.add_argument("--only", action="append", choices=list(FORMATS), help="format to try; default: all")
    arguments = parser.parse_args()
    if not (arguments.model / "model.safetensors").is_file():
        sys.exit(f"{arguments.model}: no model.safetensors there; run make smollm2, or name a directory with --model")
    with tempfile.TemporaryDirectory() as folder:
        if not run(arguments.model, arguments.only or list(FORMATS), Path(folder)):
            sys.exit("texts differ")


if __name__ == "__main__":
    main()

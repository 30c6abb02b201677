"""Fixtures of the training tests: the tokenizer of the checkpoint that the repository carries."""

from pathlib import Path

import pytest
import torch
from training.weft_nano.tokenizer import load_tokenizer
from transformers import PreTrainedTokenizerFast

CHECKPOINT = Path(__file__).parents[2] / "models" / "weft-nano"


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    torch.set_num_threads(1)
    return CHECKPOINT


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(checkpoint)

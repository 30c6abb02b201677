"""A checkpoint of random parameters behind weft-nano's tokenizer. With the 30 million that it has unless told otherwise
it is fast enough for two cores to serve, slow enough for computing to be what its requests wait for. What it says does
not matter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from loadtest.engine.cpu_model import CONFIG, make_model
from loadtest.local_mesh import ROOT

NANO = ROOT / "models" / "weft-nano"
SMALL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10, "num_attention_heads": 8}


def make_checkpoint(folder: Path, sizes: Mapping[str, int] = SMALL) -> Path:
    """The small model, or one of other `sizes`, with weft-nano's tokenizer and chat template."""
    nano = json.loads((NANO / "config.json").read_text())
    ids = {name: nano[name] for name in ("vocab_size", "bos_token_id", "eos_token_id") if name in nano}
    make_model(folder, {**CONFIG, **sizes, **ids})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(NANO / name, folder / name)
    return folder

"""The settings of the weights process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from weft.config import ConfigError, read_models

MAX_READERS = 8  # more readers than this gain nothing from one disk


@dataclass(frozen=True, slots=True)
class Config:
    """`model` is a Hugging Face checkpoint directory, or NAME=DIR,NAME=DIR; `threads` read it, 0 = one per core, at
    most 8."""

    model: str
    model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ConfigError(f"WEFT_THREADS={self.threads}: expected 0 or more")
        read_models(self.model, self.model_name)

    @property
    def models(self) -> dict[str, Path]:
        """Checkpoint directories, by the models' names in requests."""
        return read_models(self.model, self.model_name)

    @property
    def num_readers(self) -> int:
        """Reading threads."""
        return self.threads or min(MAX_READERS, os.cpu_count() or 1)

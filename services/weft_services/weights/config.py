"""The settings of the weights process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from weft.config import ConfigError

MAX_READERS = 8  # more readers than this gain nothing from one disk


@dataclass(frozen=True, slots=True)
class Config:
    """`model` is a Hugging Face checkpoint directory; `threads` read it, 0 = one per core, at most 8."""

    model: Path
    model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ConfigError(f"WEFT_THREADS={self.threads}: expected 0 or more")

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return self.model_name or self.model.absolute().name

    @property
    def num_readers(self) -> int:
        """Reading threads."""
        return self.threads or min(MAX_READERS, os.cpu_count() or 1)

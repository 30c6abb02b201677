"""The settings of the weights process."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from weft.config import Address, Count, Port, Settings, Threads, read_models
from weft.errors import ConfigError
from weft.options import HEAD_OF_ONE_MODEL, CpuKernels, DraftChoice, names_draft_head
from weft.weights.object_store import is_remote

REMOTE_READERS = 24  # object stores have high latency and serve many requests at once
READERS = 8  # independent of the cores: readers mostly wait for the disk, and more of them gain nothing


class WeightsConfig(Settings):
    """Settings of the weights process.

    model: a Hugging Face checkpoint directory, or NAME=DIR,NAME=DIR. threads: readers per model; 0 = 8, or 24 for an
    object store. weights_from: the weights service of another node that may hold the model already. weights_shm_bytes:
    limit for the images of all models; 0 = no limit. draft: the draft models to serve, see `weft.options.DraftChoice`.
    """

    model: str
    model_name: str = ""
    host: str = "127.0.0.1"
    port: Port = 0
    metrics_port: Port = 0
    threads: Threads = 0
    weights_from: Address = ""
    weights_shm_bytes: Count = 0
    draft: str = DraftChoice.AUTO
    cpu_kernels: CpuKernels | None = None

    @model_validator(mode="after")
    def _check(self) -> WeightsConfig:
        if self.weights_from and ":" not in self.weights_from:
            raise ConfigError(f"WEFT_WEIGHTS_FROM={self.weights_from!r}: expected host:port")
        if len(read_models(self.model, self.model_name)) > 1 and names_draft_head(self.draft):
            raise ConfigError(f"WEFT_DRAFT={self.draft}: {HEAD_OF_ONE_MODEL}")
        return self

    @property
    def models(self) -> dict[str, Path]:
        """Checkpoint directories by the model names of requests."""
        return read_models(self.model, self.model_name)

    def num_readers(self, directory: Path) -> int:
        """Return the number of threads that read this model."""
        return self.threads or (REMOTE_READERS if is_remote(directory) else READERS)

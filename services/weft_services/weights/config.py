"""The settings of the weights process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.config import MAX_THREADS, ConfigError, CpuKernels, read_models
from weft.weights.object_store import is_remote

REMOTE_READERS = 24  # object stores have high latency and serve many requests at once
READERS = 8  # independent of the cores: readers mostly wait for the disk, and more of them gain nothing


@dataclass(frozen=True, slots=True)
class WeightsConfig:
    """Settings of the weights process.

    model: a Hugging Face checkpoint directory, or NAME=DIR,NAME=DIR. threads: readers per model; 0 = 8, or 24 for an
    object store. weights_from: the weights service of another node that may hold the model already. weights_shm_bytes:
    limit for the images of all models; 0 = no limit.
    """

    model: str
    model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int = 0
    threads: int = 0
    weights_from: str = ""
    weights_shm_bytes: int = 0
    cpu_kernels: CpuKernels | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"WEFT_THREADS={self.threads}: expected 0 to {MAX_THREADS}")
        if self.weights_shm_bytes < 0:
            raise ConfigError(f"WEFT_WEIGHTS_SHM_BYTES={self.weights_shm_bytes}: expected 0 or more")
        if self.weights_from and ":" not in self.weights_from:
            raise ConfigError(f"WEFT_WEIGHTS_FROM={self.weights_from!r}: expected host:port")
        read_models(self.model, self.model_name)

    @property
    def models(self) -> dict[str, Path]:
        """Checkpoint directories by the model names of requests."""
        return read_models(self.model, self.model_name)

    def num_readers(self, directory: Path) -> int:
        """Return the number of threads that read this model."""
        return self.threads or (REMOTE_READERS if is_remote(directory) else READERS)

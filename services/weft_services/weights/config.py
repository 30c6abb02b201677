"""The settings of the weights process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.config import MAX_THREADS, ConfigError, CpuKernels, read_models
from weft.weights.object_store import is_remote

REMOTE_READERS = 24  # an object store answers each request late, and many at a time
READERS = 8  # whatever the cores: they wait for the disk most of the time, and more gain nothing from one


@dataclass(frozen=True, slots=True)
class WeightsConfig:
    """`model` is a Hugging Face checkpoint directory, or NAME=DIR,NAME=DIR; `threads` read each, 0 = 8 of them, 24 from
    an object store.

    `weights_from` is the weights service of another node that may hold the model in memory already.
    `weights_shm_bytes` limits the shared memory of all models' images together; 0: no limit.
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
        """Checkpoint directories, by the models' names in requests."""
        return read_models(self.model, self.model_name)

    def num_readers(self, directory: Path) -> int:
        """Threads that read this model."""
        return self.threads or (REMOTE_READERS if is_remote(directory) else READERS)

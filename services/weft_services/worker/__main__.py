"""`python -m weft_services.worker`: a worker with both roles."""

from __future__ import annotations

from weft import log
from weft.config import read_config
from weft.rpc.server import run
from weft.weights.object_store import with_local_model
from weft.worker.config import WorkerConfig
from weft.worker.os_tuning import freeze_gc
from weft.worker.process import serve_worker
from weft_services.decode.service import DECODE_ROLE as DECODE
from weft_services.prefill.service import PREFILL_ROLE as PREFILL


async def main() -> None:
    """Read the settings, then serve until SIGTERM."""
    config = read_config(WorkerConfig, with_local_model())
    log.setup(config.worker_id)
    await serve_worker(config, PREFILL, DECODE)


if __name__ == "__main__":
    freeze_gc()
    log.setup("worker")
    run(main)

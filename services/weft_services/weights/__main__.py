"""`python -m weft_services.weights`: one weights process."""

import asyncio
import logging
from functools import partial
from pathlib import Path

from weft import log, metrics
from weft.config import read_config
from weft.errors import BadCheckpoint, ConfigError, Overloaded, StorageUnavailable
from weft.file_descriptors import raise_fd_limit
from weft.rpc.server import RpcServer, run, until_signal
from weft.weights.checkpoint import Checkpoint
from weft.weights.draft_checkpoint import draft_directory, read_draft
from weft.weights.object_store import with_local_draft, with_local_model
from weft_mesh.v1 import weights_service_pb2_grpc as pb2_grpc
from weft_services.weights.config import WeightsConfig
from weft_services.weights.loader import ReadProgress, WeightLoader
from weft_services.weights.peers import WeightsPeer
from weft_services.weights.service import SERVICE_NAME, WeightServicer, draft_name
from weft_services.weights.shm_budget import ShmBudget

RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0
LOG_SECONDS = 5.0


async def serve(config: WeightsConfig) -> None:
    """Load all models, then answer requests until cancelled."""
    rpc = RpcServer([SERVICE_NAME])
    async with asyncio.TaskGroup() as tasks:
        found = {name: draft_directory(config.draft, path) for name, path in config.models.items()}
        places = {name: directory for name, directory in found.items() if directory}
        names = (*config.models, *map(draft_name, places))
        peers = {name: WeightsPeer(config.weights_from, name) for name in names if config.weights_from}
        room = ShmBudget(config.weights_shm_bytes)
        loaders = {
            name: WeightLoader(path, config.num_readers(path), tasks, peers.get(name), room)
            for name, path in config.models.items()
        }
        # Loaded on demand: a worker on a GPU may want none.
        drafts = {
            name: WeightLoader(
                *(path, config.num_readers(path), tasks, peers.get(draft_name(name)), room),
                read=partial(_read_draft, config.draft, config.models[name]),
            )
            for name, path in places.items()
        }
        pb2_grpc.add_WeightServiceServicer_to_server(WeightServicer(loaders, drafts), rpc.server)
        metrics_port = metrics.expose(config.host, config.metrics_port)
        logging.info("listening at=%s metrics=%d", await rpc.start(config.host, config.port), metrics_port)
        try:
            for name, loader in loaders.items():
                await _preload(name, loader, config.weights_shm_bytes)
            log.startup_phase("weights")
            await rpc.set_ready(True)
            await asyncio.Event().wait()
        finally:
            await rpc.stop(grace_seconds=0.5)
            # Close concurrently: a read may take long to end, and the supervisor waits only briefly.
            await asyncio.gather(*(loader.close() for loader in (*loaders.values(), *drafts.values())))
            for peer in peers.values():
                await peer.close()


def _read_draft(draft: str, model: Path, directory: Path) -> Checkpoint:
    """Read the draft model of a model from its directory, which may be gone by now."""
    if (source := read_draft(draft, model)) is None:
        raise BadCheckpoint(f"{directory}: the draft model is gone; restore it, or set WEFT_DRAFT=ngram")
    return source.checkpoint


async def _preload(name: str, loader: WeightLoader, limit_bytes: int) -> None:
    """Load a model; with a limit, a model that does not fit is loaded on demand.

    A storage failure is retried until the process ends.
    """
    pause = RETRY_SECONDS
    while True:
        try:
            if limit_bytes and not await loader.fits():
                logging.info("model does not fit now, loading on demand model=%r", name)
                return
            return await _load(name, loader)
        except Overloaded as error:
            raise ConfigError(f"the model {name!r} does not fit: {error}") from error
        except StorageUnavailable as error:
            logging.warning("load failed, retrying model=%r seconds=%g error=%s", name, pause, error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_RETRY_SECONDS)


async def _load(name: str, loader: WeightLoader) -> None:
    clock = asyncio.get_running_loop().time
    logged_at = clock()
    async for event in loader.load(is_ahead=True):
        if isinstance(event, ReadProgress) and clock() - logged_at >= LOG_SECONDS:
            logged_at = clock()
            log.progress(f"weights of {name}", event.read_bytes, event.total_bytes)


async def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    raise_fd_limit()  # a load keeps all files of its model open, and models may load concurrently
    config = read_config(WeightsConfig, with_local_draft(with_local_model()))
    logging.info("%s", config)
    log.startup_phase("imports")
    await until_signal(serve(config))


if __name__ == "__main__":
    log.setup("weights")
    run(main)

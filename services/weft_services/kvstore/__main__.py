"""`python -m weft_services.kvstore`: one kvstore process."""

import asyncio
import errno
import logging
import os
from pathlib import Path

from weft import log, metrics, trace
from weft.config import read_config
from weft.errors import ConfigError
from weft.file_descriptors import raise_fd_limit
from weft.rpc.server import RpcServer, run, until_signal
from weft_mesh.v1 import kvstore_service_pb2_grpc as pb2_grpc
from weft_services.kvstore.block_index import IndexLimits, PoolIndex
from weft_services.kvstore.config import KvStoreConfig
from weft_services.kvstore.disk import DiskTier
from weft_services.kvstore.disk_index import DiskLimits
from weft_services.kvstore.node import NodeStore, StoreAddress
from weft_services.kvstore.service import SERVICE_NAME, KvStoreServicer

SWEEP_SECONDS = 1.0
# errors of a failing disk or of a machine short of a resource
TRANSIENT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)


async def main() -> None:
    """Serve until SIGTERM or SIGINT; ready while the store is."""
    config = read_config(KvStoreConfig)
    logging.info("%s", config)
    raise_fd_limit()  # a segment and a connection each take a file descriptor
    trace.setup("kvstore")
    log.startup_phase("imports")
    rpc = RpcServer([SERVICE_NAME])
    place = StoreAddress(config.host, config.store_host, config.store_memory_bytes)
    disk = await _lock_disk(config)
    places = PoolIndex()
    tenant_bytes = int(config.tenant_share * config.store_memory_bytes) if config.tenant_share < 1 else 0
    limits = IndexLimits(
        ttl_seconds=config.cache_ttl_seconds, tenant_bytes=tenant_bytes, max_bytes=config.store_memory_bytes
    )
    store = NodeStore(place, rpc.set_ready, disk, limits)
    pb2_grpc.add_KvStoreServiceServicer_to_server(KvStoreServicer(store, places), rpc.server)
    metrics_port = metrics.expose(config.host, config.metrics_port)
    logging.info("listening at=%s metrics=%d", await rpc.start(config.host, config.port), metrics_port)
    # scanning a large disk takes minutes
    loading = [disk.load()] if disk is not None else []
    try:
        await until_signal(store.run(), _sweep(places, store), *loading)
        await rpc.stop(grace_seconds=0.5)
    finally:
        if disk is not None:
            await asyncio.to_thread(disk.close)


async def _sweep(places: PoolIndex, store: NodeStore) -> None:
    """Drop silent workers and expired blocks once a second, and yield to the event loop in between."""
    while True:
        store.sweep()
        for _ in places.sweep():
            await asyncio.sleep(0)
        await asyncio.sleep(SWEEP_SECONDS)


async def _lock_disk(config: KvStoreConfig) -> DiskTier | None:
    """Lock the disk directory.

    A wrong directory raises ConfigError. A full or broken disk is logged, and the store serves from memory alone.
    """
    if config.disk_path is None:
        return None
    disk = DiskTier(config.disk_path, DiskLimits(config.disk_bytes, config.cache_ttl_seconds, config.tenant_share))
    try:
        await disk.lock()
    except OSError as error:
        await asyncio.to_thread(disk.close)
        if not _is_transient(error, config.disk_path):
            raise ConfigError(f"WEFT_DISK_PATH={config.disk_path}: {error}") from error
        metrics.DISK_FAILURES.labels("open").inc()
        logging.error("disk tier disabled path=%s error=%s", config.disk_path, error)
        return None
    return disk


def _is_transient(error: OSError, directory: Path) -> bool:
    """Return whether the error may pass. A failing disk turns read-only; a path that cannot be created is wrong."""
    return error.errno in TRANSIENT_ERRNOS and (error.errno != errno.EROFS or os.path.isdir(directory))


if __name__ == "__main__":
    log.setup("kvstore")
    run(main)

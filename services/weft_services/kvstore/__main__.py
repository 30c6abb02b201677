"""`python -m weft_services.kvstore`: one kvstore process."""

import logging

from weft import log, metrics
from weft.config import describe, read_config
from weft.rpc.server import RpcServer, run, until_signal
from weft_mesh.v1 import kvstore_service_pb2_grpc as pb2_grpc
from weft_services.kvstore.config import Config
from weft_services.kvstore.node import NodeStore, Place
from weft_services.kvstore.service import SERVICE_NAME, KvStoreServicer


async def main() -> None:
    """Serve until SIGTERM or SIGINT; ready while the store is."""
    config = read_config(Config)
    logging.info(describe(config))
    rpc = RpcServer([SERVICE_NAME])
    place = Place(config.host, config.store_host, config.master_port, config.segment_bytes)
    store = NodeStore(place, announce=rpc.set_ready)
    pb2_grpc.add_KvStoreServiceServicer_to_server(KvStoreServicer(store), rpc.server)
    address = await rpc.start(config.host, config.port)
    logging.info("listening at=%s metrics=%d", address, metrics.expose(config.host, config.metrics_port))
    await until_signal(store.run())
    await rpc.stop(grace_seconds=0.5)


if __name__ == "__main__":
    log.setup("kvstore")
    run(main)

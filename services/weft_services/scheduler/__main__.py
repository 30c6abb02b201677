"""`python -m weft_services.scheduler`: one scheduler process."""

import logging
from time import monotonic

from weft import log, metrics
from weft.config import describe, read_config
from weft.rpc.server import RpcServer, run, until_signal
from weft_services.scheduler.affinity import Affinity
from weft_services.scheduler.config import Config
from weft_services.scheduler.dispatch import Dispatcher
from weft_services.scheduler.service import NAMES, register


async def main() -> None:
    """Serve until SIGTERM; memberships end with the process, so there is nothing to drain."""
    config = read_config(Config)
    affinity = Affinity(config.redis_url, config.affinity_ttl_seconds, monotonic)
    dispatcher = Dispatcher(config.silence_seconds, affinity, monotonic)
    rpc = RpcServer(NAMES)
    register(rpc.server, dispatcher, config.report_interval_ms, config.silence_seconds)
    address = await rpc.start(config.host, config.port)
    metrics_port = metrics.expose(config.host, config.metrics_port)
    logging.info("listening at=%s metrics=%d %s", address, metrics_port, describe(config))
    await rpc.set_ready(True)
    await until_signal(dispatcher.run())
    await rpc.stop(grace_seconds=0.5)


if __name__ == "__main__":
    log.setup("scheduler")
    run(main)
